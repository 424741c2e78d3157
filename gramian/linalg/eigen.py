"""Symmetric eigendecomposition that does not give up at the first refusal."""

import torch
from torch import Tensor

from gramian.errors import GramianError


def eigendecompose(matrix_NN: Tensor) -> tuple[Tensor, Tensor, str]:
    """M = Q diag(σ) Qᵀ, σ ascending.

    Tried in turn: where and as the matrix is, in float64, in float64 on the CPU. Cost: about 9 n³ FLOPs and 3 n² numbers.

    Args:
        matrix_NN: symmetric, [n, n].

    Returns:
        σ [n], Q [n, n] in the matrix's dtype and on its device, and the name of what worked ("float32 on cuda").

    Raises:
        GramianError: if the matrix is not finite, or every try failed.
    """
    if not bool(matrix_NN.isfinite().all()):
        raise GramianError("eigh: the matrix holds NaN or infinity; expected finite numbers")
    here, cpu = matrix_NN.device, torch.device("cpu")
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
    """σ [n], ascending, and Q [n, n] of a positive semi-definite matrix, by another algorithm than `eigendecompose`.

    Raises:
        GramianError: if this one fails too.
    """
    try:
        _, values, transposed = torch.linalg.svd(matrix_NN.to(device="cpu", dtype=torch.float64))
    except RuntimeError as error:
        raise GramianError(
            f"svd: failed after eigh did ({type(error).__name__}); expected a matrix that converges"
        ) from error
    return values.flip(0).to(matrix_NN), transposed.mT.flip(1).to(matrix_NN)
