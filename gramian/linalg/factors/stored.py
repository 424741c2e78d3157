"""Matrices rounded for storage: a body in any dtype, scales for half precision, and the measured rounding error.

float16 has full precision only from 6e-5 to 65504. Gradients are often far below that, so in half precision every column (of a
symmetric matrix every row and column) has a scale of its own: M = diag(l) B diag(r), B the stored body.

A matrix is read and written some columns or rows at a time (`wide.pieces`), so that besides source and result only a bounded
number of entries exists in float32 or float64.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gramian.core.dtypes import HALF
from gramian.linalg.wide import pieces, wide


class MatrixSource(ABC):
    """A matrix [n, r] whose columns are computed on request, some at a time."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """Dtype of the columns that `piece` returns."""
    device: torch.device

    @abstractmethod
    def piece(self, columns: slice) -> Tensor:
        """Compute the columns of the slice `columns`, [n, c]; storing a matrix in half precision computes each slice twice."""


class _Whole(MatrixSource):
    """A tensor in memory as a `MatrixSource`."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix, self.dtype, self.device = matrix, matrix.dtype, matrix.device
        self.shape = (matrix.shape[0], matrix.shape[1])

    def piece(self, columns: slice) -> Tensor:
        return self._matrix[:, columns]


class LoadedMatrix(MatrixSource):
    """A stored matrix as a `MatrixSource`, whose columns are converted to a given dtype on request."""

    def __init__(self, stored: "Stored", dtype: torch.dtype) -> None:
        """Reference the stored matrix; columns are converted to `dtype` on request."""
        self._stored, self.dtype, self.device = stored, dtype, stored.body.device
        self.shape = (stored.body.shape[0], stored.body.shape[1])

    def piece(self, columns: slice) -> Tensor:
        """The columns of the slice, [n, c], multiplied by their scales, in this source's dtype."""
        part, right = self._stored, self._stored.right
        right = None if right is None else right[columns]
        return replace(part, body=part.body[:, columns], right=right).load(dtype=self.dtype)


@dataclass(frozen=True)
class Stored:
    """A stored matrix M = diag(left) body diag(right); a scale that is None is 1."""

    body: Tensor
    left: Tensor | None
    right: Tensor | None
    relative_error: Tensor
    """‖M − stored‖_F / ‖M‖_F, 0-dim; the error of U Uᵀ is about twice that of a stored U."""
    home: torch.device | None = None
    """The GPU that computes products with M after it was copied to the host; None: the device on which it is stored."""
    rounded: bool = True
    """False if it is known, without reading `relative_error` from the device, that the error is 0."""

    @property
    def plain(self) -> bool:
        """True if the body is the matrix itself, without scales or a rounding error."""
        return not self.rounded and self.left is None and self.right is None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored matrix: body and scales."""
        return self.body.nbytes + sum(t.nbytes for t in (self.left, self.right) if t is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products with M: float64 if stored so, else float32."""
        return torch.float64 if self.body.dtype == torch.float64 else torch.float32

    def load(
        self, rows: slice = slice(None), dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The rows M[rows] in `dtype` (None: float32, or float64 if stored so) on `device` (None: where they are stored).

        They are moved in the storage dtype and converted there. The result shares memory with the body if nothing changes.
        """
        return self.widen(self.body[rows].to(device=device), rows, dtype)

    def widen(self, body: Tensor, rows: slice = slice(None), dtype: torch.dtype | None = None) -> Tensor:
        """The rows M[rows] in `dtype` (None: float32, or float64 if stored so), from `body`, a copy of their stored entries.

        They are converted and scaled on the device of `body`.
        """
        whole = body.to(dtype or self.dtype)
        own = whole.dtype != self.body.dtype or whole.device != self.body.device
        for scale in (None if self.left is None else self.left[rows, None], self.right):
            if scale is not None:
                scale = scale.to(whole.device, non_blocking=whole.is_cuda).to(whole.dtype)
                whole = whole.mul_(scale) if own else whole * scale
                own = True
        return whole

    def select(self, columns: Tensor, scale: float) -> "Stored":
        """A new `Stored` with the columns of M that have the indices `columns`, times `scale`."""
        body = self.body.index_select(1, columns)
        right = self.right.index_select(0, columns) if self.right is not None else None
        if body.dtype in HALF:
            ones = torch.ones(body.shape[1], device=body.device)
            right = (ones if right is None else right) * scale
        else:
            body = body * scale
        return replace(self, body=body, right=right)

    def to(self, device: torch.device | str | None = None) -> "Stored":
        """The same stored matrix on another device."""
        return self.moved(lambda t: t.to(device=device))

    def moved(self, move: Callable[[Tensor], Tensor], home: torch.device | None = None) -> "Stored":
        """The same stored matrix with every tensor passed through `move`; `home`: device for products, None: where they are."""
        left, right = (None if t is None else move(t) for t in (self.left, self.right))
        return Stored(move(self.body), left, right, move(self.relative_error), home, self.rounded)

    def scaled(self, factor: float) -> "Stored":
        """The stored matrix factor·M, without rounding the body again: the factor multiplies the column scales, in float64."""
        one_R = torch.ones(self.body.shape[1], dtype=torch.float64, device=self.body.device)
        right = factor * (one_R if self.right is None else self.right.double())
        return replace(self, right=right)


class RowGroup(Protocol):
    """The processes among which the rows of one matrix are sharded; every method is a collective with equal results on all."""

    def sum(self, t: Tensor) -> Tensor:
        """The sum of the tensor `t` over all processes of the group, on each of them."""

    def largest(self, t: Tensor) -> Tensor:
        """The entry-wise maximum of the tensor `t` over all processes of the group, on each of them."""


def store_columns(matrix_NR: Tensor | MatrixSource, dtype: torch.dtype, others: RowGroup | None = None) -> Stored:
    """Store U [n, r] in `dtype`; in half precision each column is scaled by a power of two to a largest entry near 2¹⁰.

    `others`: the processes that store the other rows of U; scales and rounding error are then computed over all rows. None: all
    rows are in `matrix_NR`.
    """
    source = _Whole(matrix_NR) if isinstance(matrix_NR, Tensor) else matrix_NR
    if dtype not in HALF:
        return _plain(matrix_NR, source, dtype, others)
    tops = [_largest(wide(source.piece(columns))) for columns in pieces(source.shape[1], source.shape[0])]
    top_R = torch.cat(tops) if tops else torch.zeros(0, dtype=torch.float64, device=source.device)
    if others is not None:
        top_R = others.largest(top_R.nan_to_num(torch.inf, torch.inf))
    scale_R = _powers_of_two(top_R / 2**10)
    return _rounded(source, dtype, None, scale_R.float(), others)


def store_symmetric(matrix_NN: Tensor, dtype: torch.dtype) -> Stored:
    """Store a symmetric matrix in `dtype`; in half precision rows and columns are scaled by powers of two near √diagonal."""
    if dtype not in HALF:
        return _plain(matrix_NN, _Whole(matrix_NN), dtype)
    scale_N = _powers_of_two(matrix_NN.diagonal().double().clamp(min=0).sqrt())
    return _rounded(_Whole(matrix_NN), dtype, scale_N.float(), scale_N.float())


def join_columns(left: Stored, right: Stored, others: RowGroup | None = None) -> Stored:
    """[left, right] side by side as one stored matrix in the dtype of `left`; `right` is rounded only if the dtypes differ.

    `others`: the processes that store the other rows of both, None: all rows are here. The error is the larger of both errors.
    """
    if left.body.dtype != right.body.dtype:
        source = LoadedMatrix(right, torch.promote_types(right.dtype, left.dtype))
        right = store_columns(source, left.body.dtype, others)
    right = right.to(left.body.device)
    parts = [part if part.right is not None else part.scaled(1.0) for part in (left, right)]
    scales = torch.cat([part.right.double() for part in parts if part.right is not None])
    error = torch.maximum(left.relative_error.double(), right.relative_error.double())
    return Stored(torch.cat([left.body, right.body], dim=1), None, scales, error, left.home)


def _plain(
    matrix_NR: Tensor | MatrixSource, source: MatrixSource, dtype: torch.dtype, others: RowGroup | None = None
) -> Stored:
    if dtype.itemsize < source.dtype.itemsize:
        return _rounded(source, dtype, None, None, others)
    if isinstance(matrix_NR, Tensor):
        body = matrix_NR.to(dtype, memory_format=torch.contiguous_format).contiguous()
    else:
        body = torch.empty(source.shape, dtype=dtype, device=source.device)
        for columns in pieces(source.shape[1], source.shape[0]):
            body[:, columns] = source.piece(columns)
    return Stored(body, None, None, _no_error(body.device), rounded=False)


@functools.cache
def _no_error(device: torch.device) -> Tensor:
    """0 as the error of all matrices that are stored as they are; never written to."""
    return torch.zeros((), dtype=torch.float64, device=device)


def _rounded(
    source: MatrixSource, dtype: torch.dtype, left: Tensor | None, right: Tensor | None, others: RowGroup | None = None
) -> Stored:
    """Store diag(left)⁻¹ M diag(right)⁻¹ in `dtype`, a chunk of columns at a time, and measure the rounding error of M."""
    body = torch.empty(source.shape, dtype=dtype, device=source.device)
    norms = [torch.zeros(2, dtype=torch.float64, device=source.device)]
    for columns in pieces(source.shape[1], source.shape[0]):
        exact = wide(source.piece(columns))
        scales = [] if left is None else [left[:, None].to(exact)]
        scales += [] if right is None else [right[columns].to(exact)]
        rounded = exact.clone()
        for scale in scales:
            rounded /= scale
        body[:, columns] = rounded
        rounded.copy_(body[:, columns])
        for scale in scales:
            rounded *= scale
        norms.append(torch.stack([_norm(exact), _norm(rounded.sub_(exact))]))
    size, error = _norm(torch.stack(norms), dim=0)
    if others is not None:
        size, error = others.sum(torch.stack([size, error]).square()).sqrt()
    return Stored(body, left, right, error / size.clamp(min=torch.finfo(torch.float64).tiny))


def _norm(t: Tensor, dim: int | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t, dim=dim, dtype=torch.float64)
    return norm


def _largest(piece_NC: Tensor) -> Tensor:
    """Largest absolute value of every column, float64; 0 where there are no rows."""
    if not piece_NC.shape[0]:
        return torch.zeros(piece_NC.shape[1], dtype=torch.float64, device=piece_NC.device)
    largest: Tensor = torch.linalg.vector_norm(piece_NC, ord=torch.inf, dim=0)
    return largest.double()


def _powers_of_two(positive: Tensor) -> Tensor:
    """The nearest powers of two within float32's range; 1 where a value is 0 or not finite."""
    usable = positive.isfinite() & (positive > 0)
    return torch.where(usable, positive, 1.0).log2().round().clamp(-120, 120).exp2()
