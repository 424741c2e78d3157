"""Symmetric eigendecomposition that tries other precisions and devices where one fails."""

import torch
from torch import Tensor

from gramian.core.errors import GramianError

WORKSPACE = 3
"""Copies of the matrix that an eigendecomposition needs beside it: the eigenvectors and twice that of work."""


def fits(side: int, itemsize: int, free: int) -> bool:
    """True if the eigendecomposition of a [side, side] matrix takes at most half of `free` bytes."""
    return WORKSPACE * side**2 * itemsize <= free // 2


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could still allocate, the allocator's cache included."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def eigendecompose(matrix_NN: Tensor) -> tuple[Tensor, Tensor, str]:
    """Eigendecomposition M = Q diag(σ) Qᵀ of a symmetric matrix, σ ascending.

    Tried in turn: where and as the matrix is, in float64, in float64 on the CPU; on the CPU at once where it would take more
    than half of a GPU's free memory. Cost: about 9 n³ FLOPs and 3 n² numbers.

    Returns:
        σ [n], Q [n, n] in the matrix's dtype and on its device, and the name of what worked ("float32 on cuda").

    Raises:
        GramianError: if the matrix is not finite, or every try failed.
    """
    if not bool(matrix_NN.isfinite().all()):
        raise GramianError("eigh: the matrix holds NaN or infinity; expected finite numbers")
    here, cpu = matrix_NN.device, torch.device("cpu")
    if here.type == "cuda" and not fits(len(matrix_NN), matrix_NN.element_size(), free_bytes(here)):
        here = cpu
    reason = ""
    for dtype, device in dict.fromkeys([(matrix_NN.dtype, here), (torch.float64, here), (torch.float64, cpu)]):
        try:
            values, vectors = torch.linalg.eigh(matrix_NN.to(device=device, dtype=dtype))
        except RuntimeError as error:  # no convergence, no memory, or a status of the vendor's solver
            reason = type(error).__name__
            continue
        if bool(values.isfinite().all()) and bool(vectors.isfinite().all()):
            name = f"{str(dtype).removeprefix('torch.')} on {device.type}"
            return values.to(matrix_NN), vectors.to(matrix_NN), name
        reason = "result not finite"
    raise GramianError(f"eigh: failed in every precision ({reason}); expected a symmetric matrix that converges")


def singular_pairs(matrix_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues σ [n], ascending, and eigenvectors Q [n, n] of a positive semi-definite matrix, by SVD in place of eigh."""
    try:
        _, values, transposed = torch.linalg.svd(matrix_NN.to(device="cpu", dtype=torch.float64))
    except RuntimeError as error:
        raise GramianError(
            f"svd: failed after eigh did ({type(error).__name__}); expected a matrix that converges"
        ) from error
    return values.flip(0).to(matrix_NN), transposed.mT.flip(1).to(matrix_NN)
