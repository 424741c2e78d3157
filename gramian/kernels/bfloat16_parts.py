"""A float32 matrix as the sum of two in bfloat16, x = H + L to 2⁻¹⁶, three parts beside or below each other.

The three products of `linalg.tensor_core_products` are one product of these. 10 bytes an entry are moved, where torch's
operations move 42.
"""

import torch
from torch import Tensor

from gramian.kernels.launch import on_device, takes_kernel

BLOCK = 1024
"""Columns of a Triton program."""


def bfloat16_parts(x: Tensor, parts: str, axis: int) -> Tensor:
    """H and L of x [..., n, m] in the order of `parts`, such as "HHL", joined along `axis`, the last (−1) or the one before."""
    kernel = takes_kernel(x) and x.dtype == torch.float32 and x.is_contiguous() and x.shape[-2] < 2**16
    return (bfloat16_parts_kernel if kernel else bfloat16_parts_twin)(x, parts, axis)


def bfloat16_parts_twin(x: Tensor, parts: str, axis: int) -> Tensor:
    """`bfloat16_parts` in torch."""
    high = x.bfloat16()
    low = (x - high.to(x)).bfloat16()
    return torch.cat([high if part == "H" else low for part in parts], dim=axis)


def bfloat16_parts_kernel(x: Tensor, parts: str, axis: int) -> Tensor:
    """`bfloat16_parts` in Triton, of a contiguous float32 tensor."""
    from gramian.kernels import _triton_bfloat16_parts as triton_kernels

    *stack, rows, columns = x.shape
    shape = (rows, 3 * columns) if axis == -1 else (3 * rows, columns)
    out = torch.empty((*stack, *shape), dtype=torch.bfloat16, device=x.device)
    row_stride, part_stride = (3 * columns, columns) if axis == -1 else (columns, rows * columns)
    matrices = torch.Size(stack).numel()
    if x.numel():
        with on_device(x):
            triton_kernels.bfloat16_parts[(-(-columns // BLOCK), rows, matrices)](
                out, x, rows, columns, 3 * rows * columns, row_stride, part_stride,
                *(part == "L" for part in parts), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return out
