"""The gradient of an embedding table: row v is the sum of the output gradients of the tokens that looked v up."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_mm, wide_norms
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient


class Indexed(PerSampleGradient):
    """g_i[v] = Σ_{t: index_it = v} rows_it, from index_BT and rows_BTD, for a table of V×D."""

    summed_wide = False

    def __init__(self, index_BT: Tensor, rows_BTD: Tensor, vocabulary: int) -> None:
        """Store views; nothing is computed."""
        self.index_BT, self.rows_BTD = index_BT, rows_BTD
        self.batch = rows_BTD.shape[0]
        self.shape = (vocabulary, rows_BTD.shape[2])
        self.dtype = rows_BTD.dtype

    def per_sample(self) -> Tensor:
        """Scatter-add: [B, V, D]."""
        table = wide(self.rows_BTD).new_zeros(self.batch * self.shape[0], self.shape[1])
        offset_B1 = torch.arange(self.batch, device=table.device)[:, None] * self.shape[0]
        return table.index_add_(0, (self.index_BT + offset_B1).flatten(), wide(self.rows_BTD).flatten(0, 1)).reshape(
            self.batch, *self.shape
        )

    def total(self) -> Tensor:
        """Scatter-add over all samples: [V, D]."""
        return self._scatter(wide(self.rows_BTD))

    def token_squares(self) -> Tensor:
        """Scatter-add of squares: [V, D]."""
        return self._scatter(wide(self.rows_BTD).square())

    def magnitude(self) -> Tensor:
        """Σ ‖g_t‖."""
        return wide_norms(self.rows_BTD).sum()

    def projected(self, directions: Directions) -> Tensor:
        """u_k[x_t] (g_t·v_k) for every token: [B·T, K]. 2·B·T·K·D FLOPs."""
        rows = self.rows_BTD.flatten(0, 1)
        along_rows = wide_mm(rows, directions.sides(rows.dtype)[1])
        return directions.sides(along_rows.dtype)[0][self.index_BT.flatten()] * along_rows

    def tensors(self) -> list[Tensor]:
        """Index and rows."""
        return [self.index_BT, self.rows_BTD]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same table from index and rows, mapped; padding by unit looks up row 0 with a zero gradient."""
        return type(self)(function(self.index_BT), function(self.rows_BTD), self.shape[0])

    @property
    def tokens(self) -> int:
        """T."""
        return self.index_BT.shape[1]

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Scatter-add of weighted rows: [V, D]."""
        return self._scatter(wide(self.rows_BTD) * weights_B[:, None, None]).to(dtype)

    def algorithm(self, choice: str) -> str:
        """There is one way."""
        return "sorted rows"

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """Sort each sample's tokens, sum runs of equal index, square. B·T·(D + log T), never V×D, no host check."""
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
