"""The gradient of an embedding table: row v is the sum of the output gradients of the tokens that looked v up."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_mm, wide_norms
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient


class Indexed(PerSampleGradient):
    """Per-sample gradients of an embedding table [V, D], from the indices and the output gradients of its lookups.

    Row v of sample i's gradient is Σ rows_BTD[i, t] over the tokens t with index_BT[i, t] = v.
    """

    summed_wide = False

    def __init__(self, index_BT: Tensor, rows_BTD: Tensor, vocabulary: int) -> None:
        """Store the indices [B, T] and the output gradients [B, T, D] of a table of `vocabulary` rows; nothing is computed."""
        self.index_BT, self.rows_BTD = index_BT, rows_BTD
        self.batch = rows_BTD.shape[0]
        self.shape = (vocabulary, rows_BTD.shape[2])
        self.dtype = rows_BTD.dtype

    def per_sample(self) -> Tensor:
        """The gradient of the table for every sample: [B, V, D], by scatter-add of the tokens' output gradients."""
        table = wide(self.rows_BTD).new_zeros(self.batch * self.shape[0], self.shape[1])
        offset_B1 = torch.arange(self.batch, device=table.device)[:, None] * self.shape[0]
        return table.index_add_(0, (self.index_BT + offset_B1).flatten(), wide(self.rows_BTD).flatten(0, 1)).reshape(
            self.batch, *self.shape
        )

    def total(self) -> Tensor:
        """The gradient of the table summed over all samples: [V, D], by scatter-add."""
        return self._scatter(wide(self.rows_BTD))

    def token_squares(self) -> Tensor:
        """Σ over all tokens of the squared gradient of a single token: [V, D], by scatter-add of squared output gradients."""
        return self._scatter(wide(self.rows_BTD).square())

    def magnitude(self) -> Tensor:
        """Σ over all tokens of the norm of the token's output gradient, 0-dim: an upper bound of ‖total()‖."""
        return wide_norms(self.rows_BTD).sum()

    def projected(self, directions: Directions) -> Tensor:
        """Terms u_k[index] (g·v_k) [B·T, K] of each token's output gradient g, for K directions u_k v_kᵀ of the table."""
        rows = self.rows_BTD.flatten(0, 1)
        along_rows = wide_mm(rows, directions.sides(rows.dtype)[1])
        return directions.sides(along_rows.dtype)[0][self.index_BT.flatten()] * along_rows

    def tensors(self) -> list[Tensor]:
        """The stored tensors: the indices [B, T] and the output gradients [B, T, D]."""
        return [self.index_BT, self.rows_BTD]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Indexed` of the same table with `function` applied to the indices and to the output gradients."""
        return type(self)(function(self.index_BT), function(self.rows_BTD), self.shape[0])

    @property
    def tokens(self) -> int:
        """Number T of tokens (lookups) per sample."""
        return self.index_BT.shape[1]

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i over samples: [V, D] in `dtype`, by scatter-add of weighted output gradients."""
        return self._scatter(wide(self.rows_BTD) * weights_B[:, None, None]).to(dtype)

    def algorithm(self, choice: str) -> str:
        """Name of the algorithm for squared norms: always "sorted rows", whatever `choice` asks for."""
        return "sorted rows"

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """‖g_i‖² of every sample: [B]. Sorts a sample's tokens by index, sums those of equal index, squares the sums.

        Takes B·T·(D + log T) operations and no V×D buffer, and does not wait for the device; `choice` has no effect.
        """
        if not self.rows_BTD.numel():
            return wide(self.rows_BTD).new_zeros(self.batch)
        sorted_BT, order_BT = self.index_BT.sort(dim=1, stable=True)
        run_BT = torch.zeros_like(sorted_BT)
        run_BT[:, 1:] = (sorted_BT[:, 1:] != sorted_BT[:, :-1]).cumsum(1)
        rows_BTD = wide(self.rows_BTD).gather(1, order_BT[..., None].expand_as(self.rows_BTD))
        runs_BTD = torch.zeros_like(rows_BTD).scatter_add_(1, run_BT[..., None].expand_as(rows_BTD), rows_BTD)
        return wide_norms(runs_BTD.flatten(1)).square()

    def _scatter(self, rows_BTD: Tensor) -> Tensor:
        return rows_BTD.new_zeros(self.shape).index_add_(0, self.index_BT.flatten(), rows_BTD.flatten(0, 1))
