"""Matrices at rest: a half-precision body, float32 scales, and the error that this made.

A body in float16 holds five decimal orders at full precision. Gradients span more and sit far below its range, so every
column (or, of a symmetric matrix, every row and column) carries a scale of its own: M = diag(l) B diag(r).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gramian.linalg.wide import wide

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """M = diag(left) body diag(right); a scale that is None is 1."""

    body: Tensor
    left: Tensor | None
    right: Tensor | None
    relative_error: Tensor
    """‖M − stored‖_F / ‖M‖_F, 0-dim: of U Uᵀ about twice that of U."""

    @property
    def nbytes(self) -> int:
        """Bytes of body and scales."""
        return self.body.nbytes + sum(t.nbytes for t in (self.left, self.right) if t is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products with it: float64 if stored so, else float32."""
        return torch.float64 if self.body.dtype == torch.float64 else torch.float32

    def load(self, rows: slice = slice(None), dtype: torch.dtype | None = None, device: object = None) -> Tensor:
        """M[rows] in full, as a new tensor unless nothing had to be done."""
        whole = self.body[rows].to(device=device, dtype=dtype or self.dtype)  # type: ignore[call-overload]
        if self.left is not None:
            whole = whole * self.left[rows].to(whole)[:, None]
        if self.right is not None:
            whole = whole * self.right.to(whole)[None, :]
        return whole  # type: ignore[no-any-return]

    def select(self, columns: Tensor, scale: float) -> "Stored":
        """Some of the columns, times a factor."""
        body = self.body.index_select(1, columns)
        right = self.right.index_select(0, columns) if self.right is not None else None
        if body.dtype in HALF:
            ones = torch.ones(body.shape[1], device=body.device)
            right = (ones if right is None else right) * scale
        else:
            body = body * scale
        return Stored(body, self.left, right, self.relative_error)

    def to(self, device: torch.device | str | None = None) -> "Stored":
        """The same on another device."""
        scales = [None if t is None else t.to(device=device) for t in (self.left, self.right)]
        return Stored(self.body.to(device=device), scales[0], scales[1], self.relative_error.to(device=device))

    def scaled(self, factor: float) -> "Stored":
        """factor·M, without rounding anything a second time: the factor goes into the scales, in float64."""
        one_R = torch.ones(self.body.shape[1], dtype=torch.float64, device=self.body.device)
        right = factor * (one_R if self.right is None else self.right.double())
        return Stored(self.body, self.left, right, self.relative_error)


class Others(Protocol):
    """The other holders of a matrix's rows: what all have together is the same for each of them."""

    def sum(self, t: Tensor) -> Tensor:
        """Σ over holders."""

    def largest(self, t: Tensor) -> Tensor:
        """The largest over holders, entry by entry."""


class AtRest:
    """What a factor says of itself that follows from the matrix it stores."""

    stored: Stored

    @property
    def dtype(self) -> torch.dtype:
        """Of results: float64 if stored so, else float32."""
        return self.stored.dtype

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the body."""
        return self.stored.body.dtype

    @property
    def device(self) -> torch.device:
        """Of the body."""
        return self.stored.body.device


def store_columns(matrix_NR: Tensor, dtype: torch.dtype, others: Others | None = None) -> Stored:
    """Store with one scale per column: the largest entry of each becomes 2¹⁰, powers of two, so scaling is exact.

    Args:
        matrix_NR: U, or the rows of it that lie here.
        dtype: of the body.
        others: who holds the other rows; scales and the error are then those of all of U.
    """
    if dtype not in HALF:
        return _plain(matrix_NR, dtype, others)
    matrix_NR = wide(matrix_NR)
    top_R = matrix_NR.abs().amax(0).double() if matrix_NR.shape[0] else matrix_NR.new_zeros(matrix_NR.shape[1]).double()
    if others is not None:
        top_R = others.largest(top_R.nan_to_num(torch.inf, torch.inf))
    scale_R = _powers_of_two(top_R / 2**10)
    body = (matrix_NR / scale_R.to(matrix_NR)).to(dtype).contiguous()
    return _with_error(matrix_NR, body, None, scale_R.float(), others)


def store_symmetric(matrix_NN: Tensor, dtype: torch.dtype) -> Stored:
    """Store with the square roots of the diagonal (to powers of two) as scales of rows and columns: entries within ±4."""
    if dtype not in HALF:
        return _plain(matrix_NN, dtype)
    matrix_NN = wide(matrix_NN)
    scale_N = _powers_of_two(matrix_NN.diagonal().double().clamp(min=0).sqrt())
    narrow = scale_N.to(matrix_NN)
    body = (matrix_NN / narrow[:, None] / narrow[None, :]).to(dtype)
    return _with_error(matrix_NN, body, scale_N.float(), scale_N.float())


def join_columns(left: Stored, right: Stored, others: Others | None = None) -> Stored:
    """[left, right] side by side, as `store_columns` made them; rounded again only where their dtypes differ."""
    if left.body.dtype != right.body.dtype:
        right = store_columns(right.load(dtype=torch.promote_types(right.dtype, left.dtype)), left.body.dtype, others)
    right = right.to(left.body.device)
    parts = [part if part.right is not None else part.scaled(1.0) for part in (left, right)]
    scales = torch.cat([part.right.double() for part in parts if part.right is not None])
    error = torch.maximum(left.relative_error.double(), right.relative_error.double())
    return Stored(torch.cat([left.body, right.body], dim=1), None, scales, error)


def _plain(matrix: Tensor, dtype: torch.dtype, others: Others | None = None) -> Stored:
    body = matrix.to(dtype).contiguous()
    if body.dtype.itemsize >= matrix.dtype.itemsize:
        return Stored(body, None, None, torch.zeros((), device=body.device))
    return _with_error(matrix, body, None, None, others)


def _with_error(
    matrix: Tensor, body: Tensor, left: Tensor | None, right: Tensor | None, others: Others | None = None
) -> Stored:
    stored = Stored(body, left, right, torch.zeros(()))
    size = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    error = torch.linalg.vector_norm(matrix - stored.load(dtype=matrix.dtype), dtype=torch.float64)
    if others is not None:
        size, error = others.sum(torch.stack([size, error]).square()).sqrt()
    return Stored(body, left, right, error / size.clamp(min=torch.finfo(torch.float64).tiny))


def _powers_of_two(positive: Tensor) -> Tensor:
    """The nearest powers of two within float32's range, 1 for zeros and for what is not finite."""
    usable = positive.isfinite() & (positive > 0)
    return torch.where(usable, positive, 1.0).log2().round().clamp(-120, 120).exp2()
