"""Runs of the library on the user's own hardware: checks against the oracles, and measurements.

A run may import every room. It computes and returns plain data; how that is shown is the command line's concern.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """One number of the library held against one of a reference."""

    layer: str
    """What was compared: a layer, a parameter or a side of a block."""
    case: str
    """Under which options."""
    error: float
    declared: str = ""
    """What the library's own record says it does in place of the exact thing, where it is held to that."""


@dataclass(frozen=True)
class VerifyCheck:
    """A property, and the function that measures how far the library is from it."""

    model: str
    name: str
    tolerance: float
    """Largest error that passes."""
    measure: Callable[[], Iterable[Comparison]]
    unit: str = ""
    """Of error and tolerance; empty: relative errors."""

    @property
    def title(self) -> str:
        """Model and property."""
        return f"{self.model}: {self.name}"


@dataclass(frozen=True)
class VerifyOutcome:
    """What came of a check."""

    check: VerifyCheck
    comparisons: tuple[Comparison, ...]
    crash: str = ""
    """The exception that ended it, if one did."""

    @property
    def worst(self) -> Comparison | None:
        """The comparison with the largest error; NaN is larger than everything."""
        return max(self.comparisons, key=lambda c: math.inf if math.isnan(c.error) else c.error, default=None)

    @property
    def passed(self) -> bool:
        """True if something was compared, nothing crashed and every error is within the tolerance."""
        good = all(comparison.error <= self.check.tolerance for comparison in self.comparisons)
        return good and bool(self.comparisons) and not self.crash

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty if it passed."""
        if self.passed:
            return ""
        if self.crash:
            return f"crashed: {self.crash}"
        if self.worst is None:
            return "compared nothing"
        at = ", ".join(part for part in (self.worst.layer, self.worst.case) if part)
        unit = f" {self.check.unit}" if self.check.unit else ""
        return f"error {self.worst.error:.2g}{unit}, tolerance {self.check.tolerance:g}{unit}, at {at}"


def run_checks(
    checks: Sequence[VerifyCheck],
    on_progress: Callable[[int, VerifyCheck], None] = lambda done, check: None,
    stop_at_crash: bool = False,
) -> list[VerifyOutcome]:
    """Run every check; one that raises has failed, and the others run on.

    Args:
        checks: in the order in which they run.
        on_progress: called before each with the number of those done.
        stop_at_crash: end there instead: where checks are collective, the others are no longer in step.

    Returns:
        One outcome per check that ran.
    """
    outcomes = []
    with _one_thread():
        for done, check in enumerate(checks):
            on_progress(done, check)
            seen: list[Comparison] = []
            crash = ""
            try:
                for comparison in check.measure():
                    seen.append(comparison)
            except Exception as problem:
                crash = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            outcomes.append(VerifyOutcome(check, tuple(seen), crash))
            if crash and stop_at_crash:
                break
    return outcomes


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices: several threads only wait for each other, ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64 on the CPU; absolute where the reference is zero.

    Raises:
        ValueError: if the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(f"shape {list(value.shape)} against {list(reference.shape)} of the reference")
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    size = float(torch.linalg.vector_norm(reference))
    return float(torch.linalg.vector_norm(value - reference)) / (size or 1.0)
