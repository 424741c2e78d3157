"""The gradient of an embedding table, from lookups that belong to samples in any order and number: packed documents."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_norms
from gramian.taps.gradients.grouped_rows import GroupedRows
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.units import Units


class GroupedIndexed(PerSampleGradient):
    """Per-sample gradients of a table [V, D]: row v of sample b's is Σ_r rows_RD[r] over its rows r with index_R[r] = v."""

    summed_wide = False

    def __init__(self, index_R: Tensor, rows_RD: Tensor, rows: GroupedRows, vocabulary: int) -> None:
        """Store the indices [R] and the output gradients [R, D] of lookups with the samples of `rows`, which has one group."""
        self.index_R, self.rows_RD, self.rows = index_R, rows_RD, rows
        self.batch, self.shape, self.dtype = rows.batch, (vocabulary, rows_RD.shape[1]), rows_RD.dtype

    def per_sample(self) -> Tensor:
        """The gradients [B, V, D], by scatter-add."""
        found = wide(self.rows_RD).new_zeros(self.batch * self.shape[0], self.shape[1])
        place_R = self.rows.samples_R * self.shape[0] + self.index_R
        return found.index_add_(0, place_R, wide(self.rows_RD)).reshape(self.batch, *self.shape)

    def total(self) -> Tensor:
        """Gradient summed over samples, [V, D], by scatter-add."""
        return self._scatter(wide(self.rows_RD))

    def token_squares(self) -> Tensor:
        """Σ over all lookups of the squared gradient of a single one, [V, D]."""
        return self._scatter(wide(self.rows_RD).square())

    def magnitude(self) -> Tensor:
        """Σ_r ‖g_r‖ over the output gradients of all lookups, 0-dim: an upper bound of ‖total()‖."""
        return wide_norms(self.rows_RD).sum()

    def tensors(self) -> list[Tensor]:
        """The stored tensors: indices [R] and output gradients [R, D]."""
        return [self.index_R, self.rows_RD]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `GroupedIndexed` of the same samples with `function` applied to indices and output gradients."""
        return type(self)(function(self.index_R), function(self.rows_RD), self.rows, self.shape[0])

    def select(self, start: int, stop: int) -> Self:
        """The gradients of samples start … stop−1 only. Waits for the device."""
        rows, mask_R = self.rows.of(torch.arange(start, stop, device=self.rows_RD.device))
        return type(self)(self.index_R[mask_R], self.rows_RD[mask_R], rows, self.shape[0])

    def regroup(self, units: Units) -> "GroupedIndexed":
        """The gradients of units (groups of rows of the batch, or of tokens) instead of samples."""
        return GroupedIndexed(self.index_R, self.rows_RD, self.rows.regrouped(units), self.shape[0])

    @property
    def tokens(self) -> int:
        """Mean number of lookups per sample, rounded up."""
        return -(-self.index_R.shape[0] // max(self.batch, 1))

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_b weights_B[b] · g_b over samples: [V, D] in `dtype`, by scatter-add of weighted output gradients."""
        return self._scatter(wide(self.rows_RD) * weights_B[self.rows.samples_R, None]).to(dtype)

    def algorithm(self, choice: str) -> str:
        """Name of the algorithm for squared norms: always "sorted rows", whatever `choice` asks for."""
        return "sorted rows"

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """‖g_b‖² of every sample: [B]. Sorts lookups by sample and index, sums equal ones, squares the sums.

        Takes R·(D + log R) operations and no V×D buffer, and does not wait for the device; `choice` has no effect.
        """
        if not self.rows_RD.numel():
            return wide(self.rows_RD).new_zeros(self.batch)
        sorted_R, order_R = (self.rows.samples_R * self.shape[0] + self.index_R).sort(stable=True)
        run_R = torch.zeros_like(sorted_R)
        run_R[1:] = (sorted_R[1:] != sorted_R[:-1]).cumsum(0)
        rows_RD = wide(self.rows_RD)[order_R]
        runs_RD = torch.zeros_like(rows_RD).index_add_(0, run_R, rows_RD)
        squares_R = wide_norms(runs_RD).square()  # of run i in place i, behind the last run zeros
        starts_B = torch.arange(self.batch + 1, device=sorted_R.device) * self.shape[0]
        firsts_B = torch.searchsorted(sorted_R, starts_B)
        ends_B = torch.nn.functional.pad(run_R + 1, (1, 0))[firsts_B]  # number of runs before each sample's first
        return torch.segment_reduce(squares_R, "sum", offsets=ends_B, unsafe=True, initial=0)

    def _scatter(self, rows_RD: Tensor) -> Tensor:
        return rows_RD.new_zeros(self.shape).index_add_(0, self.index_R, rows_RD)
