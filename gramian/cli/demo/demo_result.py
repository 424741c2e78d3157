"""What the demo found, as it is printed and as `demo.json` holds it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gramian.cli.demo.score import Score
from gramian.core.errors import GramianError
from gramian.train.state.run_folder import write_whole

FILE = "demo.json"
TIE = 0.02
"""Nats per byte; gains of three seeds were as far apart."""


@dataclass(frozen=True)
class Checked:
    """A check of the doctor."""

    name: str
    measured: str
    threshold: str
    ok: bool
    hint: str = ""


@dataclass(frozen=True)
class Cached:
    """The teacher's cache."""

    folder: str
    windows: int
    length: int
    """Tokens of a window."""
    bytes_per_token: int
    largest_logit_error: float
    """That rounding makes."""

    @property
    def bytes(self) -> int:
        """Of all windows."""
        return self.windows * self.length * self.bytes_per_token


@dataclass(frozen=True)
class DemoRow:
    """A model of the table."""

    name: str
    folder: str
    parameters: int
    steps: int
    seconds: float
    """Of training, its evaluations among it."""
    score: Score


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote."""

    name: str
    text: str


@dataclass(frozen=True)
class Result:
    """All of it."""

    hashes: dict[str, str]
    """Of the three configs."""
    versions: dict[str, str]
    device: str
    threads: int
    seconds: dict[str, float]
    """Of each stage, as the process that came to the end saw them: what an earlier one had done is not counted."""
    checks: tuple[Checked, ...]
    cache: Cached
    teacher: DemoRow
    distilled: DemoRow
    alone: DemoRow
    samples: tuple[Sample, ...]

    @property
    def rows(self) -> tuple[DemoRow, DemoRow, DemoRow]:
        """In the order of the table."""
        return self.teacher, self.alone, self.distilled

    @property
    def gain(self) -> float:
        """Nats per byte that the teacher saved its student on the validation data; below 0: that it cost it."""
        return self.alone.score.loss - self.distilled.score.loss


def verdict(result: Result) -> str:
    """Who won, by how much and at what price, in plain words."""
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
    """Write `demo.json`, whole or not at all.

    Returns:
        Its path.
    """
    path = out / FILE
    write_whole(path, msgspec.json.format(msgspec.json.encode(_plain(result)), indent=2).decode() + "\n")
    return path


def read_result(out: Path) -> Result | None:
    """What a finished demo left in a folder; None where there is none.

    Raises:
        GramianError: if there is a file and it is not a demo's.
    """
    path = out / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise GramianError(f"argument --out: {path}: {problem.strerror}; accepted: a demo's file, or none") from None
    try:
        return msgspec.json.decode(content, type=Result)
    except msgspec.DecodeError:
        raise GramianError(f"argument --out: {path} is not of this demo; accepted: a demo's file, or none") from None


def _plain(result: Result) -> dict[str, Any]:
    """As JSON has it, with what follows from it."""
    told: dict[str, Any] = msgspec.to_builtins(result)
    return {**told, "gain": result.gain, "verdict": verdict(result)}
