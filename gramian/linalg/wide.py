"""Products and sums that accumulate in the wide dtype: float64 for float64 operands, float32 for everything narrower."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gramian.core.dtypes import HALF, wide_dtype

BLOCK = 2**24
"""Number of entries of a stored matrix that are converted to float32 or float64 at a time."""
TENSOR_FLOAT_32 = 2.0**-10
"""Relative rounding of the operands of products in TF32."""
ROUNDING = {"none": 0.0, "ieee": 0.0, "tf32": TENSOR_FLOAT_32, "bf16": 2.0**-8}
PRODUCTS = ("cuda", "matmul"), ("mkldnn", "matmul")
"""Switches of matrix products, of which "none" takes the precision of its backend, and that the one of all backends."""
_get: Any = torch._C._get_fp32_precision_getter
_set: Any = torch._C._set_fp32_precision_setter  # torch.backends.mkldnn.fp32_precision sets that of all backends


def pieces(count: int, each: int, most: int | None = None) -> Iterator[slice]:
    """Slices that cover `count` rows (or columns) of `each` entries, with at most `most` entries or one row per slice.

    `most` None: `BLOCK`.
    """
    step = max(1, (BLOCK if most is None else most) // max(each, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def piece_entries(count: int, each: int) -> int:
    """Number of entries of the largest slice that `pieces(count, each)` yields."""
    return min(count, max(1, BLOCK // max(each, 1))) * each


def by_columns(y_NK: Tensor, side: int, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Apply `function`, which maps columns to columns, to Y; returns the result in `dtype`. A large Y is split by columns.

    `side` is the number of rows that determines the size of the chunks; `y_NK` itself may have only some of these rows.
    """
    parts = list(pieces(y_NK.shape[1], side))
    if len(parts) < 2:
        return function(y_NK).to(dtype)
    found = torch.empty(y_NK.shape, dtype=dtype, device=y_NK.device)
    for columns in parts:
        found[:, columns] = function(y_NK[:, columns])
    return found


def exact_float32() -> AbstractContextManager[None]:
    """A context in which float32 matrices are multiplied in full float32, whatever precision the user has set."""
    return _NOTHING if _are_exact() else _float32_products("highest")


def exact_products(device: str) -> AbstractContextManager[object]:
    """A context in which products are in the operands' own dtypes, float32 in full, also inside of the user's autocast.

    `device`: type of the device, "cuda". Where nothing has to be changed, nothing is: every call of a layer enters one.
    """
    return _exact_products(device) if torch.is_autocast_enabled(device) or not _are_exact() else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _exact_products(device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False), exact_float32():
        yield


def tensor_float32() -> AbstractContextManager[None]:
    """A context in which float32 matrices are multiplied on tensor cores where there are any, operands rounded to TF32."""
    return _float32_products("high")


def _are_exact() -> bool:
    """True if `product_rounding` is 0; the older switch is quicker to read, or cannot be where a newer one allows more."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return False


def product_rounding() -> float:
    """Relative rounding of the operands of float32 products that the user allows now: 0, 2⁻¹⁰ (TF32) or 2⁻⁸ (bfloat16)."""
    return max(ROUNDING[_get("cuda", "matmul")], ROUNDING[_get("mkldnn", "matmul")])


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Set the newer switches and, now that they allow nothing, the older one; restore what was set, and what was inherited."""
    outer = [(switch, _taken(*switch)) for switch in (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))]
    inner = [(switch, _taken(*switch)) for switch in PRODUCTS]
    older = torch.get_float32_matmul_precision()
    for switch, before in outer:
        _set(*switch, before)
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for switch, before in inner:
            _set(*switch, before)


def _taken(backend: str, operation: str) -> str:
    """A switch's own precision, which becomes "none"; those that it inherits from are "none"."""
    before: str = _get(backend, operation)
    _set(backend, operation, "none")
    return before


def convolutions_round() -> bool:
    """True if the user allows TF32 in float32 convolutions on a GPU."""
    return bool(_get("cuda", "conv") == "tf32")


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """A context in which convolutions are matrix products, not cuDNN's, which has a switch of its own for TF32."""
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def wide(t: Tensor) -> Tensor:
    """The tensor in float64 if it is float64, else in float32; no copy where it already has that dtype."""
    return t.to(wide_dtype(t))


def wide_norm(matrix_NK: Tensor) -> Tensor:
    """‖M‖_F, 0-dim float64: summed in float64, a chunk of rows at a time."""
    parts = [matrix_NK.new_zeros((), dtype=torch.float64)]
    for rows in pieces(*matrix_NK.shape):
        parts.append(torch.linalg.vector_norm(matrix_NK[rows], dtype=torch.float64))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm


def wide_norms(t: Tensor) -> Tensor:
    """Euclidean norms over the last axis, in float32, or float64 for a float64 tensor."""
    norms: Tensor = torch.linalg.vector_norm(t, dim=-1, dtype=wide_dtype(t))
    return norms


def wide_bmm(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    """Batched product [B, M, N], multiplied in the operands' own precision and accumulated in float32 or float64.

    On CUDA, half operands use the tensor cores and return float32, so the result is not rounded to half;
    elsewhere the operands are converted first. Cost: 2·B·M·K·N FLOPs.
    """
    half = left_BMK.dtype == right_BKN.dtype and left_BMK.dtype in HALF
    if half and left_BMK.is_cuda:
        return torch.bmm(left_BMK, right_BKN, out_dtype=torch.float32)
    dtype = wide_dtype(left_BMK, right_BKN)
    return torch.bmm(left_BMK.to(dtype), right_BKN.to(dtype))


def wide_mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Matrix product [M, N], accumulated in float32 (float64 for float64 operands) as in `wide_bmm`. 2·M·K·N FLOPs."""
    return wide_bmm(left_MK[None], right_KN[None])[0]


def wide_square(rows_TN: Tensor) -> Tensor:
    """Σ_t x_t x_tᵀ [N, N] over rows x_t, as in `wide_moments`."""
    plain = rows_TN.is_cuda or rows_TN.dtype == wide_dtype(rows_TN)
    return wide_mm(rows_TN.mT, rows_TN) if plain else wide_moments(rows_TN)[0]


def wide_moments(rows_TN: Tensor, weights_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_t w_t x_t x_tᵀ [N, N] and Σ_t w_t x_t [N] over rows x_t, in float32, or float64 for float64 rows. 2·T·N² FLOPs.

    `weights_T`: the weights w_t; None: all are 1. Rows are converted and weighted a chunk at a time.
    """
    dtype = wide_dtype(rows_TN)
    if weights_T is None and (rows_TN.is_cuda or rows_TN.dtype == dtype):
        return wide_mm(rows_TN.mT, rows_TN), rows_TN.sum(0, dtype=dtype)
    tokens, width = rows_TN.shape
    product, first = rows_TN.new_zeros(width, width, dtype=dtype), rows_TN.new_zeros(width, dtype=dtype)
    for piece in pieces(tokens, width):
        rows_CN = wide(rows_TN[piece])
        left_CN = rows_CN if weights_T is None else rows_CN * weights_T[piece, None].to(dtype)
        product.addmm_(left_CN.mT, rows_CN)
        first += left_CN.sum(0)
    return product, first


def padded(matrix_NK: Tensor) -> Tensor:
    """The matrix with columns of zeros appended, so that its rows begin at multiples of 16 bytes, as tensor cores require.

    On other devices than GPUs, and if the rows are aligned already, it is returned unchanged.
    """
    width, step = matrix_NK.shape[1], 16 // matrix_NK.element_size()
    if not matrix_NK.is_cuda or width % step == 0:
        return matrix_NK
    wider = matrix_NK.new_zeros(matrix_NK.shape[0], -(-width // step) * step)
    wider[:, :width] = matrix_NK
    return wider
