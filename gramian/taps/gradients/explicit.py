"""A per-sample gradient that is stored as such: one tensor for each sample."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.weighted_sum import row_squares, weighted_sum
from gramian.linalg.wide import wide, wide_norms
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient, flat
from gramian.taps.units import Units


class ExplicitGradient(PerSampleGradient):
    """g_i, given as a tensor [B, *shape]. A "token" of such a gradient is the entire sample."""

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
        """As given, wide."""
        return wide(self.gradients_B)

    def total(self) -> Tensor:
        """Sum over samples."""
        return self.per_sample().sum(0)

    def token_squares(self) -> Tensor:
        """Sum of squares over samples."""
        return self.sum_of_squares()

    def magnitude(self) -> Tensor:
        """Σ ‖g_i‖."""
        return wide_norms(flat(self.gradients_B)).sum()

    def regroup(self, units: Units) -> "ExplicitGradient":
        """Rows summed by unit."""
        return ExplicitGradient(units.sum_rows(self.per_sample()), self.dtype)

    def tensors(self) -> list[Tensor]:
        """The gradients."""
        return [self.gradients_B]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The gradients, mapped."""
        return type(self)(function(self.gradients_B), self.dtype)

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """Of what is given, one read: [B]."""
        return row_squares(flat(self.gradients_B))

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """One read of what is given."""
        return weighted_sum(flat(self.gradients_B), weights_B, dtype).reshape(self.shape)
