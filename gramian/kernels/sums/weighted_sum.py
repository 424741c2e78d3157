"""Stored per-sample gradients g_b: their squared norms, and their weighted sum Σ_b c_b g_b.

B samples, N elements of each gradient.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels.launch import DTYPES, on_device, takes_kernel
from gramian.plan.norm_algorithm import CHUNK_ELEMENTS


def weighted_sum(kept_BN: Tensor, weights_B: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Σ_b c_b g_b of stored gradients g [B, N] with weights c [B], accumulated in float32; returns [N] in `out_dtype`.

    A gradient of weight exactly 0 adds nothing, even if it contains NaN or infinity; the kernel does not read it. Float64
    gradients are summed in float64. The sum is rounded once; `out_dtype` None: not rounded. Any strides are allowed. Cost: one
    read of the gradients.

    Raises:
        GramianError: if c is not [B].
    """
    if weights_B.shape != kept_BN.shape[:1]:
        raise GramianError(f"weights: shape {list(weights_B.shape)}, expected one for each of the {len(kept_BN)} rows")
    if takes_kernel(kept_BN) and weights_B.is_cuda and out_dtype in (None, *DTYPES):
        return weighted_sum_kernel(kept_BN, weights_B, out_dtype)
    return weighted_sum_twin(kept_BN, weights_B, out_dtype)


def row_squares(kept_BN: Tensor) -> Tensor:
    """‖g_b‖² of each of B stored gradients [B, N]: [B] in float32; in float64 if the gradients are. Cost: one read of them."""
    return row_squares_kernel(kept_BN) if takes_kernel(kept_BN) else row_squares_twin(kept_BN)


@torch.no_grad()
def weighted_sum_twin(kept_BN: Tensor, weights_B: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """`weighted_sum`, Σ_b c_b g_b of stored gradients, in plain torch, one gradient at a time."""
    wide = wide_dtype(kept_BN)
    weights_B = weights_B.to(wide)
    total_N = kept_BN.new_zeros(kept_BN.shape[1], dtype=wide)
    for row_N, weight in zip(kept_BN, weights_B, strict=True):
        total_N += (row_N.to(wide) * weight).masked_fill_(weight == 0, 0)
    return total_N if out_dtype is None else total_N.to(out_dtype)


@torch.no_grad()
def row_squares_twin(kept_BN: Tensor) -> Tensor:
    """`row_squares`, the squared norm of each stored gradient, in plain torch: a chunk of columns at a time."""
    wide = wide_dtype(kept_BN)
    squares_B = kept_BN.new_zeros(len(kept_BN), dtype=wide)
    for some_BN in kept_BN.split(max(1, CHUNK_ELEMENTS // max(1, len(kept_BN))), dim=1):
        squares_B += some_BN.to(wide).square().sum(1)
    return squares_B


@torch.no_grad()
def weighted_sum_kernel(
    kept_BN: Tensor, weights_B: Tensor, out_dtype: torch.dtype | None = None, *, rows: int = 4, columns: int = 1024
) -> Tensor:
    """`weighted_sum`, Σ_b c_b g_b, in Triton: a program sums `columns` elements, `rows` gradients at a time (powers of two)."""
    from gramian.kernels.sums import _triton_weighted_sum as triton_kernels

    samples, width = kept_BN.shape
    if not kept_BN.numel():
        return kept_BN.new_zeros(width, dtype=out_dtype or torch.float32)
    out_N = kept_BN.new_empty(width, dtype=out_dtype or torch.float32)
    weights_B = weights_B.to(torch.float32).contiguous()
    with on_device(kept_BN):
        triton_kernels.weighted_sum[(-(-width // columns),)](
            out_N, kept_BN, weights_B, samples, width, *kept_BN.stride(), ROWS=rows, COLUMNS=columns, num_warps=4
        )
    return out_N


@torch.no_grad()
def row_squares_kernel(kept_BN: Tensor, *, chunk: int = 1 << 15, columns: int = 2048) -> Tensor:
    """`row_squares`, the squared norm of each stored gradient, in Triton: one program per gradient and chunk of its elements.

    A program sums `chunk` elements and reads `columns` of them at once, a power of two that divides `chunk`; torch sums the
    chunks.
    """
    from gramian.kernels.sums import _triton_weighted_sum as triton_kernels

    samples, width = kept_BN.shape
    chunks = -(-width // chunk)
    partials_BC = kept_BN.new_empty((samples, chunks), dtype=torch.float32)
    if partials_BC.numel():
        with on_device(kept_BN):
            triton_kernels.row_squares[(samples * chunks,)](
                partials_BC, kept_BN, width, chunks, *kept_BN.stride(), CHUNK=chunk, COLUMNS=columns, num_warps=8
            )
    return partials_BC.sum(1, dtype=torch.float64).float()
