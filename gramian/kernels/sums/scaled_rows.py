"""A batch with every sample multiplied by its weight, rounded once to the dtype of the batch.

B samples, of any shape.
"""

import torch
from torch import Tensor

from gramian.kernels.launch import on_device, takes_kernel


def scaled_rows(x_B: Tensor, weights_B: Tensor) -> Tensor:
    """x [B, …] with sample b multiplied by weights_B[b], as a new contiguous tensor in x's dtype. Cost: one read, one write."""
    if takes_kernel(x_B) and weights_B.is_cuda and x_B.is_contiguous() and x_B.numel():
        return scaled_rows_kernel(x_B, weights_B)
    return scaled_rows_twin(x_B, weights_B)


@torch.no_grad()
def scaled_rows_twin(x_B: Tensor, weights_B: Tensor) -> Tensor:
    """`scaled_rows`, every sample times its weight, in plain torch."""
    out_B = torch.empty_like(x_B, memory_format=torch.contiguous_format)
    return torch.mul(x_B, weights_B.reshape(-1, *[1] * (x_B.dim() - 1)), out=out_B)


@torch.no_grad()
def scaled_rows_kernel(x_B: Tensor, weights_B: Tensor, *, block: int = 4096) -> Tensor:
    """`scaled_rows`, every sample of a contiguous x times its weight in float32, in Triton: `block` elements per program.

    `block` is a power of two.
    """
    from gramian.kernels.sums import _triton_scaled_rows as triton_kernels

    out_B = torch.empty_like(x_B)
    samples, width = len(x_B), x_B.numel() // max(1, len(x_B))
    weights_B = weights_B.to(torch.float32).contiguous()
    with on_device(x_B):
        triton_kernels.scaled_rows[(-(-width // block), samples)](
            out_B, x_B, weights_B, width, BLOCK=block, num_warps=8
        )
    return out_B
