"""Per-sample gradients that are stored as they are: one gradient tensor for each sample."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.weighted_sum import row_squares, weighted_sum
from gramian.linalg.wide import wide, wide_norms
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient, flat
from gramian.taps.units import Units


class ExplicitGradient(PerSampleGradient):
    """Per-sample gradients that are stored as one tensor [B, *shape]. The "token" of such a gradient is the entire sample."""

    def __init__(self, gradients_B: Tensor, dtype: torch.dtype | None = None) -> None:
        """Store the gradients.

        Args:
            gradients_B: [B, *shape], a gradient per sample.
            dtype: narrowest dtype that they were formed from, if not their own.
        """
        self.gradients_B = gradients_B
        self.batch = gradients_B.shape[0]
        self.shape = tuple(gradients_B.shape[1:])
        self.dtype = dtype or gradients_B.dtype

    def per_sample(self) -> Tensor:
        """The stored gradients [B, *shape], cast to float32, or float64 if they are float64."""
        return wide(self.gradients_B)

    def total(self) -> Tensor:
        """Sum of the stored gradients over the samples, of the parameter's shape."""
        return self.per_sample().sum(0)

    def token_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i over samples: the "token" of an explicitly stored gradient is the entire sample."""
        return self.sum_of_squares()

    def magnitude(self) -> Tensor:
        """Σ_i ‖g_i‖ over the samples' gradients, 0-dim: an upper bound of ‖total()‖."""
        return wide_norms(flat(self.gradients_B)).sum()

    def regroup(self, units: Units) -> "ExplicitGradient":
        """The gradients of units (groups of rows): the stored gradients, summed over the rows of each unit.

        Raises:
            GramianError: if units are groups of tokens.
        """
        return ExplicitGradient(units.sum_rows(self.per_sample()), self.dtype)

    def tensors(self) -> list[Tensor]:
        """The one stored tensor: the gradients [B, *shape]."""
        return [self.gradients_B]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `ExplicitGradient` with `function` applied to the stored gradients [B, *shape]."""
        return type(self)(function(self.gradients_B), self.dtype)

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """‖g_i‖² of every stored gradient: [B], in one read; `choice` of an algorithm has no effect."""
        return row_squares(flat(self.gradients_B))

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i, of the parameter's shape in `dtype`: one read of the stored gradients."""
        return weighted_sum(flat(self.gradients_B), weights_B, dtype).reshape(self.shape)
