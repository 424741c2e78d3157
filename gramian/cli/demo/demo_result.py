"""The result of the demo, the sentence that says which student won, and `demo.json`."""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gramian.cli.demo.score import Score
from gramian.core.durable_files import replace_text
from gramian.core.errors import GramianError

FILE = "demo.json"
FORMAT = 2
"""Version of the layout of `demo.json`."""
TIE = 0.02
"""Differences of the two students' losses below this are a tie, in nats per byte: gains varied as much over three seeds."""


@dataclass(frozen=True)
class Checked:
    """Outcome of one check of `gramian doctor`: measured value, threshold, whether it passed, and a hint."""

    name: str
    measured: str
    threshold: str
    ok: bool
    hint: str = ""


@dataclass(frozen=True)
class Cached:
    """Size of the teacher's cache, and its largest rounding error."""

    folder: str
    windows: int
    length: int
    """Number of tokens of a window."""
    bytes_per_token: int
    largest_logit_error: float
    """Largest absolute error of a logit, caused by rounding the stored hidden states."""

    @property
    def bytes(self) -> int:
        """Bytes of the stored windows of the cache."""
        return self.windows * self.length * self.bytes_per_token


@dataclass(frozen=True)
class Spent:
    """The privacy that the private student's training spent: (ε, δ), and whether the ε is valid."""

    epsilon: float
    delta: float
    valid: bool


@dataclass(frozen=True)
class Curved:
    """Curvature of the teacher in three numbers; `curvature.json` in the folder has the rest."""

    folder: str
    damping: float
    effective_dimension: float
    """Σ λ/(λ + damping) over the eigenvalues λ of K-FAC: about the number of directions that are curved by more than that."""
    largest_eigenvalue: float
    """Largest eigenvalue of the Gauss-Newton matrix."""


@dataclass(frozen=True)
class DemoRow:
    """One row of the demo's table: a trained model, its size, training time and score."""

    name: str
    folder: str
    parameters: int
    steps: int
    seconds: float
    """Training time in seconds, evaluations included."""
    score: Score


@dataclass(frozen=True)
class Sample:
    """A text that one of the demo's models generated."""

    name: str
    text: str


@dataclass(frozen=True)
class Result:
    """Everything that the demo measured, as written to `demo.json`."""

    hashes: dict[str, str]
    """{run: hash of its config}."""
    versions: dict[str, str]
    device: str
    threads: int
    seconds: dict[str, float]
    """{stage: seconds} in the process that finished the demo; the work of earlier, interrupted processes is not counted."""
    checks: tuple[Checked, ...]
    cache: Cached
    teacher: DemoRow
    distilled: DemoRow
    alone: DemoRow
    private: DemoRow
    privacy: Spent
    curvature: Curved
    samples: tuple[Sample, ...]

    @property
    def rows(self) -> tuple[DemoRow, ...]:
        """The four models as rows of the table: teacher, student without a teacher, distilled and private student."""
        return self.teacher, self.alone, self.distilled, self.private

    @property
    def gain(self) -> float:
        """Nats per byte by which the distilled student's validation loss is below that of the student without a teacher."""
        return self.alone.score.loss - self.distilled.score.loss


def verdict(result: Result) -> str:
    """One sentence: which student won, by how much, and the training time of both."""
    gain, gap = result.gain, result.alone.score.loss - result.teacher.score.loss
    steps, price = result.distilled.steps, f"{result.distilled.seconds:.0f} s against {result.alone.seconds:.0f} s"
    if abs(gain) < TIE:
        who = f"A tie: after {steps} steps each, the students are {abs(gain):.3f} nats per byte apart"
    else:
        percent = abs(math.expm1(-gain)) * 100
        won, lost = ("distilled student", "CE-only twin") if gain > 0 else ("CE-only student", "distilled twin")
        how = "lower" if gain > 0 else "higher for the distilled one"
        who = f"The {won} beats its {lost} after {steps} steps each: loss {abs(gain):.3f} nats per byte"
        who += f" and perplexity {percent:.1f} % {how}"
        if gain > 0 and gap > 0:
            who += f", {gain / gap:.0%} of the way to the teacher"
    return (
        f"{who}. Training with the teacher took {price} without, its own training and the cache not counted. "
        f"This is one seed: differences below {TIE:g} nats mean nothing."
    )


def write_result(result: Result, out: Path) -> Path:
    """Write `demo.json` atomically, and return its path."""
    path = out / FILE
    content = {"format": FORMAT, **msgspec.to_builtins(result), "gain": result.gain, "verdict": verdict(result)}
    replace_text(path, msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")
    return path


def read_result(out: Path) -> Result | None:
    """Read `demo.json` of a finished demo; returns None if the folder has no such file.

    Raises:
        GramianError: if the file is not one that a demo wrote.
    """
    path = out / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise GramianError(f"argument --out: {path}: {problem.strerror}; expected a demo's file, or none") from None
    try:
        return msgspec.json.decode(content, type=Result)
    except msgspec.DecodeError:
        raise GramianError(f"argument --out: {path} is not of this demo; expected a demo's file, or none") from None
