"""Part of `gramian plan --target-epsilon E`: batch, steps and noise with which a config would spend E, and what each costs.

A private step releases (Σ_i c_i g_i + σ·C·z)/B. Relative to C its noise is σ/B, and the average over S steps is σ/(B·√S): what
large batches and many steps buy. Samples, S·B, are what they cost. C itself is no row: σ·C grows with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gramian.cli.terminal import add_group, make_table
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.train.config.config import Config

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Batches that are shown, relative to the config's."""
CLIP_NORM = (
    "C: the noise is σ·C, so that C and the learning rate move together; begin with the median of sample_norms in the log of a "
    'short run on public data, or take clip_function = "automatic" (no C) or "adaptive" (C follows the median privately)'
)


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


def choices(epsilon: float, delta: float, records: int, batch: int, steps: int, mechanism: str) -> list[list[Choice]]:
    """[choices of as many samples as the config, choices of as many steps], batches ascending; those above `records` left out.

    Cost: one search of σ for each, from 0.1 s with "rdp" to a second with "prv".
    """
    from gramian.privacy.accounting.noise_search import find_noise_multiplier

    sizes = [size for factor in FACTORS if 1 <= (size := round(batch * factor)) <= records]
    if not sizes:
        raise GramianError(f"data.batch: {batch:,} of {records:,} samples; expected at most as many as there are")

    def choice(size: int, count: int) -> Choice:
        return Choice(size, count, find_noise_multiplier(epsilon, delta, size / records, count, mechanism))

    return [
        [choice(size, max(1, round(steps * batch / size))) for size in sizes],
        [choice(size, steps) for size in sizes if size != batch],
    ]


def privacy_table(config: Config, epsilon: float) -> list[RenderableType]:
    """The table of `choices` for a config's training data, with [privacy]'s δ and accountant, and what follows from it.

    Reads and tokenises the data, whose number of windows decides.
    """
    from gramian.data import load_windows
    from gramian.train.config.config_sections import PrivacySection

    options = config.privacy or PrivacySection(target_epsilon=epsilon)
    records = len(load_windows(config.data)[0])
    batch, steps = config.data.batch, config.run.steps
    same_samples, same_steps = choices(epsilon, options.delta, records, batch, steps, options.accountant)
    table = make_table(
        "", ">batch", ">steps", ">σ", ">noise of a step / C", ">of all steps / C", ">samples",
        title=f"ε = {epsilon:g} at δ = {options.delta:g} for {records:,} windows ({options.accountant})",
    )  # fmt: skip
    given = batch * steps
    add_group(table, "as many samples", (choice.cells(given) for choice in same_samples))
    add_group(table, "as many steps", (choice.cells(given) for choice in same_steps))
    best = min(same_samples, key=lambda choice: choice.total_noise)
    lines = [
        f"least noise for the samples of this config: data.batch={best.batch} run.steps={best.steps} "
        f"privacy.noise_multiplier={best.sigma:.4g} (rate of Poisson draws {best.batch / records:.3g})",
        CLIP_NORM,
    ]
    if options.delta >= 1 / records:
        lines.append(f"privacy.delta: {options.delta:g} is 1/records or more; expected below {1 / records:.1g}")
    return ["", table, *lines, ""]
