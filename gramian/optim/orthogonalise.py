"""Orthogonalisation of a stack of matrices by products alone: U S Vᵀ becomes U S' Vᵀ with singular values S' near 1.

X ← aX + (b XXᵀ + c (XXᵀ)²) X maps every singular value s to as + bs³ + cs⁵, as in Muon (Jordan et al. 2024), whose five
iterations with one polynomial bring [0.002, 1] into [0.68, 1.20]. Here each of four iterations has a polynomial of its own:
the one that brings the interval before it nearest to 1, in the maximum norm. Together they bring [0.003, 1] into [0.78, 1.22].

All iterations multiply X from the left by polynomials of its Gram matrix A = XXᵀ, so their product Q follows from A alone,
whatever the number of X's columns:

    p = aI + bA + cA²,    Q ← Qp,    A ← Ap².
"""

import torch
from torch import Tensor

from gramian.kernels.matrix_steps import scaled_in_parts

COEFFICIENTS = (
    (8.2218, -23.3469, 16.6338),
    (3.9728, -2.8449, 0.5170),
    (3.4735, -2.5057, 0.4810),
    (2.5044, -1.7907, 0.4071),
)
"""(a, b, c) of every iteration. Each interval is taken 2 % longer at its upper end than it is, for rounding in 16 bits."""
SCALE = 2.0**10
"""Trace with which a Gram matrix enters products: in float16, whose smallest normal number is 2⁻¹⁴, entries keep their bits."""


def orthogonaliser(gram_BRR: Tensor, dtype: torch.dtype) -> Tensor:
    """Q, a polynomial of A = XXᵀ, such that the singular values of QX/‖X‖_F are near 1, for every matrix of a stack.

    Products and Q are in `dtype`. The squares of small singular values would be lost beside the largest where A is rounded to
    float16; so the first iteration, which brings them nearer to each other, takes A as the sum of two. 28 r³ FLOPs a matrix.
    """
    wide = torch.promote_types(gram_BRR.dtype, torch.float32)
    traces_B11 = gram_BRR.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide)[:, None, None]
    A, rest = scaled_in_parts(gram_BRR, SCALE, traces_B11, dtype)
    Q = p = _polynomial(A, COEFFICIENTS[0])
    p2 = p @ p
    A = (A @ p2).baddbmm_(rest, p2)
    for coefficients in COEFFICIENTS[1:-1]:
        p = _polynomial(A, coefficients)
        Q, A = Q @ p, A @ p @ p
    return Q @ _polynomial(A, COEFFICIENTS[-1])


def _polynomial(A: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """aI + bA + cA² of every matrix of a stack, for A given `SCALE` times."""
    a, b, c = coefficients
    p = torch.baddbmm(A, A, A, beta=b / SCALE, alpha=c / SCALE**2)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p
