"""The gradient of vectors [G, N] that are each added to some of the tokens: biases of fused experts."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.weighted_sum import weighted_sum
from gramian.linalg.wide import wide, wide_norms
from gramian.taps.gradients.grouped_rows import GroupedRows
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient, flat
from gramian.taps.units import Units


class GroupedSum(PerSampleGradient):
    """Per-sample gradients of a stack of vectors [G, N]: sample b's for vector g is Σ_r rows_RN[r] over segment (b, g)."""

    summed_wide = False

    def __init__(
        self, rows_RN: Tensor, rows: GroupedRows, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Store the token gradients, with the sample and group of each; nothing is computed.

        Args:
            rows_RN: a gradient per row.
            rows: sample and group of each.
            shape: [G, N], or that of a parameter of N elements with one group.
            dtype: narrowest dtype that the rows were formed from, if not their own.
        """
        self.rows_RN, self.rows = rows_RN, rows
        self.batch, self.shape, self.dtype = rows.batch, shape, dtype or rows_RN.dtype

    def per_sample(self) -> Tensor:
        """The gradients [B, *shape], in float32 or float64: one addition for each entry of a row."""
        return self.rows.sums(wide(self.rows_RN)).reshape(self.batch, *self.shape)

    def total(self) -> Tensor:
        """Gradient summed over samples, of the parameter's shape."""
        return self.per_sample().sum(0)

    def token_squares(self) -> Tensor:
        """Σ over all rows of the squared gradient of a row, of the parameter's shape."""
        return GroupedSum(wide(self.rows_RN).square(), self.rows, self.shape).total()

    def magnitude(self) -> Tensor:
        """Σ_r ‖g_r‖ over the gradients of all rows, 0-dim: an upper bound of ‖total()‖."""
        return wide_norms(self.rows_RN).sum()

    def tensors(self) -> list[Tensor]:
        """The one stored tensor: the gradients of rows [R, N]."""
        return [self.rows_RN]

    def fingerprinted(self) -> list[tuple[str | None, Tensor]]:
        """Digests of each sample's output gradients [B, K, N]."""
        return [("output gradient", self.rows.digests(self.rows_RN))]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `GroupedSum` of the same rows with `function` applied to their gradients."""
        return type(self)(function(self.rows_RN), self.rows, self.shape, self.dtype)

    def select(self, start: int, stop: int) -> Self:
        """The gradients of samples start … stop−1 only. Waits for the device."""
        rows, mask_R = self.rows.of(torch.arange(start, stop, device=self.rows_RN.device))
        return type(self)(self.rows_RN[mask_R], rows, self.shape, self.dtype)

    def regroup(self, units: Units) -> "GroupedSum":
        """The gradients of units (groups of rows of the batch, or of tokens) instead of samples."""
        return GroupedSum(self.rows_RN, self.rows.regrouped(units), self.shape, self.dtype)

    @property
    def tokens(self) -> int:
        """Mean number of rows per sample, rounded up."""
        return -(-self.rows_RN.shape[0] // max(self.batch, 1))

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """‖Σ_r g_r‖² of every sample: [B]; `choice` has no effect."""
        return wide_norms(flat(self.per_sample())).square()

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_b weights_B[b] · g_b, of the parameter's shape in `dtype`, from the samples' sums g_b."""
        return weighted_sum(flat(self.per_sample()), weights_B, dtype).reshape(self.shape)

    def algorithm(self, choice: str) -> str:
        """Name of the algorithm for squared norms: always "sum", whatever `choice` asks for."""
        return "sum"
