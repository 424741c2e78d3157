"""Symmetric eigendecomposition that falls back to float64, and to the CPU, where it fails."""

import torch
from torch import Tensor

from gramian.core.errors import GramianError

WORKSPACE = 3
"""Memory of an eigendecomposition in units of the matrix, besides the matrix: one for the eigenvectors, two of workspace."""


def fits(side: int, itemsize: int, free: int) -> bool:
    """True if the eigendecomposition of a [side, side] matrix takes at most half of `free` bytes."""
    return WORKSPACE * side**2 * itemsize <= free // 2


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could still allocate: free memory, and what torch's allocator caches unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def eigendecompose(matrix_NN: Tensor) -> tuple[Tensor, Tensor, str]:
    """Eigendecomposition M = Q diag(σ) Qᵀ of a symmetric matrix, σ ascending.

    Tried in turn: in the matrix's dtype on its device, in float64 on its device, in float64 on the CPU. Only the CPU is used
    if the decomposition would need more than half of the GPU's free memory. Cost: about 9 n³ FLOPs and 3 n² numbers.

    Returns:
        σ [n], Q [n, n], both in the matrix's dtype and on its device, and what succeeded, such as "float32 on cuda".

    Raises:
        GramianError: if the matrix contains NaN or infinity, or every attempt failed.
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
    """Eigenvalues σ [n], ascending, and eigenvectors Q [n, n] of a positive semi-definite matrix, by SVD where eigh failed.

    The SVD runs in float64 on the CPU; the results have the matrix's dtype and device.

    Raises:
        GramianError: if the SVD fails.
    """
    try:
        _, values, transposed = torch.linalg.svd(matrix_NN.to(device="cpu", dtype=torch.float64))
    except RuntimeError as error:
        raise GramianError(
            f"svd: failed after eigh did ({type(error).__name__}); expected a matrix that converges"
        ) from error
    return values.flip(0).to(matrix_NN), transposed.mT.flip(1).to(matrix_NN)
