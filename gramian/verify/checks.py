"""Checks of the library against independent reference computations on the user's hardware: comparisons, tolerances, outcomes.

A check computes and returns plain data; the command line prints it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """The error of one tensor that the library computed, relative to a reference."""

    layer: str
    """What was compared: a layer, a parameter, or a factor (A or G) of a K-FAC block (the curvature of one layer)."""
    case: str
    """Options under which the tensor was computed."""
    error: float
    declared: str = ""
    """Name of a declared K-FAC approximation, which the reference computes too; empty: the reference is exact."""


@dataclass(frozen=True)
class VerifyCheck:
    """A property of the library on one model, and the function that measures its errors.

    Example:
        `VerifyCheck("mlp", "factors", 1e-10, lambda: [Comparison("0 A", "pi", 3e-16)])`.
    """

    model: str
    name: str
    tolerance: float
    """Largest error with which the check passes."""
    measure: Callable[[], Iterable[Comparison]]
    unit: str = ""
    """Unit of error and tolerance; empty: relative errors."""

    @property
    def title(self) -> str:
        """Model and property of the check as "model: property", which identify it."""
        return f"{self.model}: {self.name}"


@dataclass(frozen=True)
class VerifyOutcome:
    """The comparisons that a check made, and the exception that ended it if there was one."""

    check: VerifyCheck
    comparisons: tuple[Comparison, ...]
    crash: str = ""
    """Type and message of the exception that ended the check; empty if none did."""

    @property
    def worst(self) -> Comparison | None:
        """The comparison with the largest error, NaN counting as infinite; None if nothing was compared."""
        return max(self.comparisons, key=lambda c: math.inf if math.isnan(c.error) else c.error, default=None)

    @property
    def passed(self) -> bool:
        """True if something was compared, nothing crashed and every error is within the tolerance."""
        good = all(comparison.error <= self.check.tolerance for comparison in self.comparisons)
        return good and bool(self.comparisons) and not self.crash

    @property
    def problem(self) -> str:
        """What is wrong with the check, as text; empty if it passed."""
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
    """Run checks in order; a check that raises has failed, and the others still run.

    `on_progress` is called before each check with the number of finished ones. `stop_at_crash` ends after a check that raises:
    collective checks would wait for each other. Returns one outcome per check that ran.
    """
    outcomes = []
    with torch_threads(1):  # on small matrices several wait for each other, ten times as long on a busy machine
        for done, check in enumerate(checks):
            on_progress(done, check)
            seen: list[Comparison] = []
            crash = ""
            try:
                for comparison in check.measure():
                    seen.append(comparison)
            except Exception as problem:  # whatever a broken library raises is the outcome of its check
                crash = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            outcomes.append(VerifyOutcome(check, tuple(seen), crash))
            if crash and stop_at_crash:
                break
    return outcomes


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context manager: set torch's number of CPU threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_error(value: Tensor, reference: Tensor, size: float | None = None) -> float:
    """‖value − reference‖ / size in float64 on the CPU; size None: ‖reference‖. If the size is 0 the error is absolute.

    Raises:
        ValueError: if the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(f"shape {list(value.shape)} against {list(reference.shape)} of the reference")
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    size = float(torch.linalg.vector_norm(reference)) if size is None else size
    return float(torch.linalg.vector_norm(value - reference)) / (size or 1.0)
