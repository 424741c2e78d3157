"""Products with a stored thin matrix U [n, r], a block of rows at a time: only one block is converted to float32 or float64.

Products are computed with the rows of U that this process stores. Three methods, `_rows`, `_added` and `_given`, extend them to
rows that other processes store; in the base class all rows are local, and they return their argument.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gramian.core.dtypes import HALF
from gramian.linalg.factors.stored import LoadedMatrix, MatrixSource, RowGroup, Stored, join_columns, store_columns
from gramian.linalg.pinned import blocks_on
from gramian.linalg.wide import pieces, wide_mm, wide_norms


class Columns:
    """A stored matrix U [n, r], and products with it; subclasses shard its rows over processes."""

    others: RowGroup | None = None
    """The processes that store the other rows of U; None: all rows are on this process."""

    def __init__(self, stored: Stored) -> None:
        """Reference the stored rows of U of this process; nothing is copied."""
        self.stored = stored
        self.count = stored.body.shape[1]
        self._gram: Tensor | None = None
        self._exact = False

    # ---- where rows lie --------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Number of rows n of U, over all processes."""
        return self.stored.body.shape[0]

    def whole(self) -> "Columns":
        """The same matrix U with all rows on this process; a collective where rows are sharded."""
        return self

    def alike(self, columns: "Columns") -> "Columns":
        """`columns`, another matrix with as many rows, distributed over processes as this one is."""
        return columns

    def _with(self, stored: Stored) -> "Columns":
        """A new object with the rows `stored`, distributed over processes as this one is."""
        return Columns(stored)

    def _rows(self, y: Tensor) -> Tensor:
        """The rows of a caller's tensor [n, …] that belong to the rows of U on this process."""
        return y

    def _added(self, part: Tensor) -> Tensor:
        """A sum over all rows of U, from the sum `part` over the rows on this process."""
        return part

    def _given(self, rows: Tensor) -> Tensor:
        """A result [n, …] with all rows for the caller, from its rows on this process."""
        return rows

    # ---- products --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the stored U and of the cached Gram matrix UᵀU."""
        return self.stored.nbytes + (0 if self._gram is None else self._gram.nbytes)

    def blocks(self) -> Iterator[slice]:
        """Slices that cover this process's rows of U; products convert one slice at a time to float32 or float64."""
        return pieces(self.stored.body.shape[0], self.count)

    def _loaded(self, dtype: torch.dtype, device: torch.device | None) -> Iterator[tuple[slice, Tensor]]:
        """(slice, rows of U) for all blocks of rows, in `dtype` and on `device` (None: where U is stored)."""
        for rows, body in blocks_on(self.stored.body, self.blocks(), device):
            yield rows, self.stored.widen(body, rows, dtype)

    def transposed_times(self, y_NK: Tensor) -> Tensor:
        """Uᵀ Y, [r, k], for Y [n, k], in Y's dtype and on its device. 2·n·r·k FLOPs."""
        y_NK = self._rows(y_NK)
        total = y_NK.new_zeros(self.count, y_NK.shape[1])
        for rows, block in self._loaded(y_NK.dtype, y_NK.device):
            total.addmm_(block.mT, y_NK[rows])
        return self._added(total)

    def times(self, c_RK: Tensor) -> Tensor:
        """U C, [n, k], for C [r, k], in C's dtype and on its device. 2·n·r·k FLOPs."""
        return self._given(self._times(c_RK))

    def _times(self, c_RK: Tensor) -> Tensor:
        out = c_RK.new_empty(self.stored.body.shape[0], c_RK.shape[1])
        for rows, block in self._loaded(c_RK.dtype, c_RK.device):
            torch.mm(block, c_RK, out=out[rows])
        return out

    def gram(self, weights_N: Tensor | None = None, exact: bool = True) -> Tensor:
        """Uᵀ diag(weights) U, [r, r], float64, as a new tensor; `weights_N` None: all are 1. 2·n·r² FLOPs.

        With `exact` false and without weights, a half-precision U on a GPU is multiplied on tensor cores. Their float32
        accumulators cause relative errors of up to 1e-4 per entry, no more than storing U in half precision did.
        """
        if weights_N is not None:
            return self._summed_gram(self._rows(weights_N).double(), False)
        return self.cached_gram(exact).clone()

    def cached_gram(self, exact: bool = True) -> Tensor:
        """UᵀU [r, r], float64, cached until `forget`; do not write to it. `exact` false allows tensor cores (see `gram`)."""
        coarse = not exact and self.stored.body.is_cuda and self.stored.body.dtype in HALF
        if self._gram is None or not (self._exact or coarse):
            self._gram, self._exact = self._summed_gram(None, coarse), not coarse
        return self._gram

    def take_gram(self, exact: bool = True) -> Tensor:
        """UᵀU [r, r], float64, removed from the cache: the caller owns it. `exact` false allows tensor cores (see `gram`)."""
        gram = self.cached_gram(exact)
        self.forget()
        return gram

    def _summed_gram(self, weights: Tensor | None, coarse: bool) -> Tensor:
        body = self.stored.body
        where = self.stored.home or body.device
        total = torch.zeros(self.count, self.count, dtype=torch.float64, device=where)
        if coarse:
            for rows in self.blocks():
                total += wide_mm(body[rows].mT, body[rows])
            scale_R = total.new_ones(self.count) if self.stored.right is None else self.stored.right.double()
            total *= scale_R[:, None]
            total *= scale_R[None, :]
        else:
            weights = None if weights is None else weights.to(where)
            for rows, block in self._loaded(torch.float64, where):
                total.addmm_(block.mT, block if weights is None else block * weights[rows, None])
        return self._added(total.to(body.device))

    def forget(self) -> None:
        """Free the cached Gram matrix; it is formed again on demand."""
        self._gram = None

    def squared(self) -> Tensor:
        """U Uᵀ, [n, n], of a U whose rows are all on this process. 2·n²·r FLOPs."""
        source = LoadedMatrix(self.stored, self.stored.dtype)
        total = torch.zeros(self.dim, self.dim, dtype=source.dtype, device=source.device)
        for columns in pieces(self.count, self.dim):
            piece = source.piece(columns)
            total.addmm_(piece, piece.mT)
        return total

    def squares_N(self) -> Tensor:
        """Squared norms of the rows of U, [n], float64."""
        return self._given(self._squares())

    def square(self) -> Tensor:
        """Squared Frobenius norm of the stored matrix U, 0-dim float64."""
        return self._added(self._squares().sum())

    def _squares(self) -> Tensor:
        device = self.stored.body.device
        parts = [wide_norms(block).square_() for _, block in self._loaded(torch.float64, self.stored.home)]
        return torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    # ---- other columns from these ----------------------------------------------------------------------------------

    def scaled(self, factor: float) -> "Columns":
        """The matrix factor·U, without a second rounding of U."""
        return self._with(self.stored.scaled(factor))

    def select(self, chosen: Tensor, scale: float) -> "Columns":
        """The columns of U with the indices `chosen`, times `scale`."""
        return self._with(self.stored.select(chosen, scale))

    def join(self, other: "Columns") -> "Columns":
        """[U, U'] side by side, for this U and the other's U', in U's storage dtype; sharded if one of the two is."""
        mine = other.alike(self)
        return mine._with(join_columns(mine.stored, self.alike(other).stored, mine.others))

    def mixed(self, c_RK: Tensor) -> "Columns":
        """U C for C [r, k], in the storage dtype of U and distributed as U is, computed a chunk of columns at a time.

        2·n·r·k FLOPs; twice that in half precision, where a first pass finds the scales of the columns.
        """
        return self._with(store_columns(_Product(self, c_RK), self.stored.body.dtype, self.others))

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Columns":
        """The same matrix with every tensor passed through `move`.

        `home`: device that computes Gram matrices and norms from now on; None: the one on which the moved tensors are.
        """
        return self._with(self.stored.moved(move, home))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Columns":
        """The same matrix on another device or rounded to another storage dtype; None leaves either as it is."""
        stored = self.stored
        if dtype is not None and dtype != stored.body.dtype:
            stored = store_columns(LoadedMatrix(stored, torch.promote_types(stored.dtype, dtype)), dtype, self.others)
        return self._with(stored.to(device))


class _Product(MatrixSource):
    """The rows of the product U C on this process, as a matrix whose columns are computed on request."""

    def __init__(self, columns: Columns, c_RK: Tensor) -> None:
        self._columns, self._c_RK = columns, c_RK
        self.dtype, self.device = columns.stored.dtype, columns.stored.body.device
        self.shape = (columns.stored.body.shape[0], c_RK.shape[1])

    def piece(self, columns: slice) -> Tensor:
        return self._columns._times(self._c_RK[:, columns]).to(self.dtype)
