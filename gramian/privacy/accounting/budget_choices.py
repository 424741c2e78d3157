"""Ways to spend a privacy budget: batch, steps and noise, and what each costs, for `gramian plan --target-epsilon`.

A private step releases (Σ_i c_i g_i + σ·C·z)/B. Relative to C its noise is σ/B, and the average over S steps is σ/(B·√S): what
large batches and many steps buy. Samples, S·B, are what they cost. C itself is no row: σ·C grows with it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gramian.core.errors import GramianError
from gramian.privacy.accounting.noise_search import find_noise_multiplier

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Batches that are shown, relative to the config's."""


@dataclass(frozen=True)
class Choice:
    """One way to spend ε: an expected batch, a number of steps, and the noise multiplier that they need."""

    batch: int
    steps: int
    sigma: float

    @property
    def samples(self) -> int:
        """Samples that all steps process together."""
        return self.batch * self.steps

    @property
    def step_noise(self) -> float:
        """Standard deviation of the noise in the mean gradient of a step, relative to C."""
        return self.sigma / self.batch

    @property
    def total_noise(self) -> float:
        """Standard deviation of the average of the noise of all steps, relative to C."""
        return self.step_noise / math.sqrt(self.steps)

    def cells(self, samples: int) -> tuple[str, ...]:
        """The row of a table; `samples` is what the config itself processes."""
        noise = (f"{self.sigma:.3g}", f"{self.step_noise:.2g}", f"{self.total_noise:.2g}")
        return (f"{self.batch:,}", f"{self.steps:,}", *noise, f"{self.samples / samples:.2g} ×")


def choices(
    epsilon: float,
    delta: float,
    records: int,
    batch: int,
    steps: int,
    mechanism: str,
    rest: Callable[[int, int], tuple[Any, ...]] = lambda size, count: (),
) -> list[list[Choice]]:
    """[choices of as many samples as the config, choices of as many steps], batches ascending; those above `records` left out.

    `rest`: what each of `count` steps of batch `size` is beside σ and the rate, as of truncated draws or correlated noise. A
    choice for which it raises is left out, except the config's own.

    Cost: one search of σ for each, from 0.1 s with "rdp" to a second with "prv".

    Raises:
        GramianError: if the config itself cannot run with these records.
    """
    sizes = [size for factor in FACTORS if 1 <= (size := round(batch * factor)) <= records]
    if not sizes:
        raise GramianError(f"data.batch: {batch:,} of {records:,} samples; expected at most as many as there are")

    def choice(size: int, count: int) -> list[Choice]:
        try:
            kind = rest(size, count)
        except GramianError:
            if (size, count) == (batch, steps):
                raise
            return []
        return [Choice(size, count, find_noise_multiplier(epsilon, delta, size / records, count, mechanism, kind))]

    same_samples = [choice(size, max(1, round(steps * batch / size))) for size in sizes]
    same_steps = [choice(size, steps) for size in sizes if size != batch]
    return [list(chain(*found)) for found in (same_samples, same_steps)]
