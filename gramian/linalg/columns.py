"""Thin products with a stored U [n, r], a block of rows at a time: never more than one wide copy of a block."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gramian.linalg.stored import HALF, Stored
from gramian.linalg.wide import wide_mm

BLOCK = 2**25
"""Entries of U that are widened at a time."""


class Columns:
    """U and its products."""

    def __init__(self, stored: Stored) -> None:
        """Keep the stored matrix."""
        self.stored = stored
        self.count = stored.body.shape[1]
        self._gram: Tensor | None = None
        self._exact = False

    @property
    def nbytes(self) -> int:
        """Bytes of U and of the kept Gram."""
        return self.stored.nbytes + (0 if self._gram is None else self._gram.nbytes)

    def blocks(self) -> Iterator[slice]:
        """Slices of rows."""
        size = max(1, BLOCK // max(self.count, 1))
        for start in range(0, self.stored.body.shape[0], size):
            yield slice(start, start + size)

    def transposed_times(self, y_NK: Tensor) -> Tensor:
        """Uᵀ Y, [r, k], in Y's dtype and on its device. 2·n·r·k FLOPs."""
        total = y_NK.new_zeros(self.count, y_NK.shape[1])
        for rows in self.blocks():
            total += self.stored.load(rows, y_NK.dtype, y_NK.device).mT @ y_NK[rows]
        return total

    def times(self, c_RK: Tensor) -> Tensor:
        """U C, [n, k], in C's dtype and on its device. 2·n·r·k FLOPs."""
        out = c_RK.new_empty(self.stored.body.shape[0], c_RK.shape[1])
        for rows in self.blocks():
            torch.mm(self.stored.load(rows, c_RK.dtype, c_RK.device), c_RK, out=out[rows])
        return out

    def gram(self, weights_N: Tensor | None = None, exact: bool = True) -> Tensor:
        """Uᵀ diag(weights) U, [r, r], float64, a tensor of the caller's own. 2·n·r² FLOPs.

        Args:
            weights_N: None: 1.
            exact: multiply in float64. Else a half-precision U on a GPU goes through the tensor cores, whose float32
                accumulators cost up to 1e-4 of an entry: no more than having been stored in half precision did.
        """
        coarse = not exact and weights_N is None and self.stored.body.is_cuda and self.stored.body.dtype in HALF
        if weights_N is None and self._gram is not None and (self._exact or coarse):
            return self._gram.clone()
        total = torch.zeros(self.count, self.count, dtype=torch.float64, device=self.stored.body.device)
        for rows in self.blocks():
            if coarse:
                total += wide_mm(self.stored.body[rows].mT, self.stored.body[rows])
            else:
                block = self.stored.load(rows, torch.float64)
                total += block.mT @ (block if weights_N is None else block * weights_N[rows].double()[:, None])
        if coarse and self.stored.right is not None:
            scale_R = self.stored.right.double()
            total *= scale_R[:, None] * scale_R[None, :]
        if weights_N is None:
            self._gram, self._exact = total.clone(), not coarse
        return total

    def forget(self) -> None:
        """Let the kept Gram go; it is formed again when it is asked for."""
        self._gram = None

    def squares_N(self) -> Tensor:
        """Squared norms of the rows, [n], float64."""
        parts = [self.stored.load(rows, torch.float64).square().sum(1) for rows in self.blocks()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self.stored.body.device)
