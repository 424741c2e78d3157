"""Bytes of one factor (the A or G side of a block) from its shape: stored, while it is factorised, and while it is read.

Legend: n width, r columns of a low-rank factor U [n, r], s bytes of a stored number, i bytes of a number in the matrix that is
factorised ([n, n] of a dense factor, [r, r] of a low-rank one).

| factor | stored | Cholesky | eigenvectors |
|---|---|---|---|
| dense | s·n² (half precision: + 8·n for scales) | 2·i·n² | i·(n² + n), and twice that of workspace |
| low rank | s·n·r + 8·r | 2·i·r², Gram matrix in float64 | 8·(r² + r), and three times that of workspace |
| diagonal | s·n | 0 | 0 |
| diagonal ± low rank | s·n·r + 8·r + 8·n | up to 3·8·r² | none: shifted systems, 3·8·(r² + r) |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from gramian.core.dtypes import HALF
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.factors.eigendecomposition import WORKSPACE
from gramian.linalg.wide import piece_entries

DOUBLE = 8
"""Bytes of a float64 number."""

FactorKind = Literal["dense", "low rank", "diagonal", "diagonal plus low rank", "diagonal minus low rank"]


class FactorisationBytes(NamedTuple):
    """Bytes while factors are first used, in two phases: the norm of each factor is bounded, then all are factorised."""

    gram: int = 0
    """Bytes (of a Gram matrix) that stay stored for each factor once its norm is bounded."""
    bounding: int = 0
    """Bytes on top of `gram`, for one factor at a time, while its norm is bounded."""
    launched: int = 0
    """Bytes stored for each factor from the launch of its factorisation until it is checked."""
    working: int = 0
    """Bytes on top of `launched`, for one factor at a time, while it is factorised."""
    stored: int = 0
    """Bytes of the factorisation that are stored until the next refresh."""


def largest_of(uses: Sequence[FactorisationBytes]) -> FactorisationBytes:
    """The `FactorisationBytes` with the maximum of each field over `uses`; zeros if there are none."""
    return FactorisationBytes(*map(max, zip(*uses, strict=True))) if uses else FactorisationBytes()


@dataclass(frozen=True)
class FactorShape:
    """Representation and sizes of a factor that does not exist yet; `str()` is its cell in the plan's table."""

    kind: FactorKind
    side: int
    """n, the number of rows of the factor's matrix."""
    columns: int
    """r, the number of columns U of a low-rank factor U Uᵀ; the number of rows for a dense or diagonal factor."""
    storage: torch.dtype
    extra: int = 0
    """Bytes that are stored beside the matrix: scales of its columns, and a diagonal of "diagonal ± low rank"."""
    processes: int = 1
    """Number of processes over which the factor's rows are sharded."""

    def __str__(self) -> str:
        """The factor's kind, and for a low-rank one the number of columns, such as "low rank 512"."""
        return f"{self.kind} {self.columns:,}" if self.has_columns else self.kind

    @property
    def has_columns(self) -> bool:
        """True if the factor stores the columns U of a low-rank matrix."""
        return "low rank" in self.kind

    @property
    def is_mixed(self) -> bool:
        """True if the factor is a diagonal plus or minus a low-rank matrix."""
        return self.has_columns and "diagonal" in self.kind

    @property
    def rest(self) -> int:
        """Bytes of the stored factor."""
        if self.kind == "diagonal":
            return self.side * self.storage.itemsize
        return self.local_rows * self.columns * self.storage.itemsize + self.extra

    @property
    def local_rows(self) -> int:
        """Number of rows of the factor on the process that has most."""
        return -(-self.side // self.processes)

    @property
    def small(self) -> int:
        """Number of entries of the matrix that is factorised: r² for r columns; n² for a dense factor."""
        return self.columns**2

    @property
    def fetched(self) -> int:
        """Bytes on a GPU of the two chunks of columns U that are copied there at a time from host memory; 0 without U."""
        return 2 * self.storage.itemsize * self._piece if self.has_columns else 0

    @property
    def visiting(self) -> int:
        """Bytes on a GPU while UᵀU is formed from columns U in host memory: the matrix and two float64 chunks; 0 without U."""
        return DOUBLE * self.small + 2 * self.loaded(DOUBLE) if self.has_columns else 0

    @property
    def traced(self) -> int:
        """Bytes of a chunk of a low-rank factor's columns U in float64, while the trace is summed; 0 without U."""
        return self.loaded(DOUBLE) if self.has_columns else 0

    @property
    def _piece(self) -> int:
        return piece_entries(self.local_rows, self.columns)

    def loaded(self, itemsize: int) -> int:
        """Bytes of a chunk of columns U, or of a dense matrix, converted to a dtype of `itemsize` bytes for products."""
        if self.kind == "dense":
            return itemsize * self.small * int(self.storage.itemsize != itemsize)
        return itemsize * self._piece

    def solving(self, itemsize: int) -> FactorisationBytes:
        """Bytes of the factor's Cholesky factorisation, in numbers of `itemsize` bytes; diagonal ± low rank in float64."""
        matrix, gram = itemsize * self.small, DOUBLE * self.small
        if self.kind == "diagonal":
            return FactorisationBytes()
        if self.kind == "dense":
            bounding = self.loaded(4) + (gram if self.storage != torch.float64 else 0)
            return FactorisationBytes(0, bounding, 2 * matrix, max(self.loaded(itemsize) - matrix, 0), matrix)
        loaded = self.loaded(DOUBLE)
        if "minus" in self.kind:  # its bound is that of the diagonal
            return FactorisationBytes(0, 0, 2 * gram, 2 * loaded, gram)
        if "plus" in self.kind:  # the plain Gram matrix is not the factorised one, and stays
            return FactorisationBytes(gram, loaded, 3 * gram, 2 * loaded, 2 * gram)
        summed = gram if self.processes > 1 else 0  # the sum over processes, beside this process's part
        return FactorisationBytes(gram, max(loaded, summed), 2 * matrix, gram - matrix, matrix)

    def decomposing(self, itemsize: int) -> FactorisationBytes:
        """Bytes of the factor's eigendecomposition, for a dense factor in numbers of `itemsize` bytes, else in float64."""
        if self.kind == "diagonal":
            return FactorisationBytes()
        if self.kind == "dense":
            vectors = itemsize * (self.small + self.side)
            working = (WORKSPACE - 1) * vectors + self.loaded(itemsize)
            return FactorisationBytes(0, 0, vectors, working, vectors)
        gram, loaded = DOUBLE * (self.small + self.columns), self.loaded(DOUBLE)
        if self.is_mixed:  # no eigenvectors: shifted systems, one at a time
            stored = gram if "plus" in self.kind else 0
            return FactorisationBytes(0, 0, stored, 3 * gram + 2 * loaded, stored)
        return FactorisationBytes(0, 0, gram, max(WORKSPACE * gram, loaded), gram)


def dense(side: int, storage: torch.dtype, summed: bool = False) -> FactorShape:
    """The shape of a dense factor; `summed`: an average of several, which is never stored in half precision."""
    storage = torch.float32 if summed and storage in HALF else storage
    return FactorShape("dense", side, side, storage, 8 * side if storage in HALF else 0)


def low_rank(side: int, columns: int, storage: torch.dtype, processes: int = 1) -> FactorShape:
    """The shape of a low-rank factor [side, columns] with one float64 scale per column, its rows sharded over `processes`."""
    return FactorShape("low rank", side, columns, storage, 8 * columns, processes)


def diagonal(side: int, itemsize: int) -> FactorShape:
    """The shape of a diagonal factor in float64 if `itemsize` is 8, else float32."""
    return FactorShape("diagonal", side, side, torch.float64 if itemsize == DOUBLE else torch.float32)


def merged(left: FactorShape, right: FactorShape) -> FactorShape:
    """The shape of the sum of two factors with the same number of rows."""
    if left.kind == right.kind == "diagonal":
        return left
    storage = (right if left.kind == "diagonal" else left).storage
    columns = sum(shape.columns for shape in (left, right) if shape.has_columns)
    if "dense" in (left.kind, right.kind) or left.side <= columns and left.side <= WIDEST_DENSE:
        return dense(left.side, storage, summed=True)
    processes = max(left.processes, right.processes)
    with_diagonal = [shape for shape in (left, right) if "diagonal" in shape.kind]
    if not with_diagonal:
        return low_rank(left.side, columns, storage, processes)
    minus = any("minus" in shape.kind for shape in with_diagonal)
    itemsize = DOUBLE if minus else with_diagonal[0].storage.itemsize
    kind: FactorKind = "diagonal minus low rank" if minus else "diagonal plus low rank"
    return FactorShape(kind, left.side, columns, storage, 8 * columns + itemsize * left.side, processes)
