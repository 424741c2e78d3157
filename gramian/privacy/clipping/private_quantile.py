"""Adaptive clipping: a clip norm that follows the median of the gradient norms, found privately (Andrew et al. 2021).

Each release also publishes how many samples had a norm of at most C_t, with noise, and the next clip norm follows from it:

    b = (Σ_i (1[‖g_i‖ ≤ C_t] − ½) + σ_b·z) / expected batch + ½,    C_{t+1} = C_t · exp(−η (b − ½))

One record changes the count by ½ at most, and the sum of gradients by C_t. Both together are one Gaussian mechanism of noise
multiplier σ if the gradients get σ_grad = (σ⁻² − (2σ_b)⁻²)^(−1/2): arXiv 1905.03871, theorem 1. So ε is that of σ.
"""

import math

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.clipping.clip_factors import ClipFunction
from gramian.privacy.noise.element_noise import NoisePlan

RATE, COUNT_NOISE = 0.2, 1 / 20
"""η, the largest change of log C_t is about half of it; and σ_b relative to the expected batch."""


class PrivateQuantile:
    """Counts samples within the clip norm over the backwards of a draw, and moves the clip norm with each release."""

    def __init__(
        self, clip: ClipFunction, noise_multiplier: float, expected_batch: float, parallel: ProcessGrid
    ) -> None:
        """Let `clip` follow the median.

        Raises:
            GramianError: if the expected batch is so small that the count's noise alone would exceed σ.
        """
        self._clip, self._expected_batch, self._parallel = clip, expected_batch, parallel
        self._count_noise = expected_batch * COUNT_NOISE if noise_multiplier else 0.0
        if noise_multiplier >= 2 * self._count_noise > 0:
            raise GramianError(
                f'clip_function: "adaptive" needs an expected batch above 10 times the noise multiplier {noise_multiplier:g}, '
                f"got {expected_batch:g}; expected a larger batch, less noise, or another function"
            )
        self.noise_multiplier = 0.0
        """σ_grad, the noise multiplier of the gradients: larger than σ, which pays for both."""
        if noise_multiplier:
            self.noise_multiplier = (noise_multiplier**-2 - (2 * self._count_noise) ** -2) ** -0.5
        self._twice: Tensor | None = None
        """Σ (2·1[‖g_i‖ ≤ C_t] − 1) of this process so far."""

    def count(self, norms_B: Tensor) -> None:
        """Count the samples of a backward; does not wait for the device."""
        found = (2 * (norms_B <= self._clip.limits[0]).long() - 1).sum()
        self._twice = found if self._twice is None else self._twice + found.to(self._twice.device)

    def forget(self) -> None:
        """Drop the counts of a draw whose sums are dropped."""
        self._twice = None

    def release(self, key: bytes, number: int, device: torch.device) -> float:
        """Publish the noised count of release `number`, and set and return the next clip norm. Collective.

        Waits for the device. `key` is of a key stream of its own, so that the count shares no noise with the gradients.
        """
        twice = torch.zeros((), dtype=torch.int64, device=device) if self._twice is None else self._twice.to(device)
        self._twice = None
        reduction = self._parallel.start_sum(twice)
        if reduction is not None:
            reduction.wait()
        count = torch.tensor([int(twice) / 2], dtype=torch.float64)
        if self._count_noise:
            plan = NoisePlan(key, [("count", (1,))])
            plan.add_noise_to([count], [count], [plan.place("count", (1,))], self._count_noise, number)
        self._clip.limits[0] *= math.exp(-RATE * float(count) / self._expected_batch)
        return self._clip.limits[0]
