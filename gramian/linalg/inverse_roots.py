"""M^(−1/4) of a stack of symmetric positive definite matrices.

By eigenvectors on a CPU. On a GPU, where an eigendecomposition takes as long as a hundred products, by a coupled Newton
iteration for X = M^(−1/4) with S = X⁴ M → I:

    T = (5I − S)/4,    X ← X T,    S ← T⁴ S,

four products of 2n³ FLOPs an iteration. An eigenvalue s of S grows by (5/4)⁴ an iteration while it is small, and converges
quadratically once it is near 1.
"""

import math

import torch
from torch import Tensor

from gramian.linalg.tensor_core_products import Operand, Precision

GROWTH = 4 * math.log(5 / 4)
"""Natural logarithm of the growth of a small eigenvalue in one iteration."""
QUADRATIC = 5
"""Iterations from an eigenvalue near ½ to 1 within rounding of float32."""


def inverse_fourth_root(matrices_BNN: Tensor, condition: float) -> Tensor:
    """M^(−1/4) of every matrix M [n, n] of a stack; `condition` is a bound on the ratio of ‖M‖_F to M's smallest eigenvalue.

    The Newton iteration multiplies in three bfloat16 products per product (rounding 2⁻¹⁶): eigenvalues far below 2⁻¹⁶ of the
    largest are lost, so `condition` should be below 2¹⁶.
    """
    if not matrices_BNN.is_cuda or matrices_BNN.dtype == torch.float64:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
        tiny = torch.finfo(values_BN.dtype).tiny
        return (vectors_BNN * values_BN.clamp(min=tiny).pow(-0.25)[:, None, :]) @ vectors_BNN.mT
    return newton_fourth_root(matrices_BNN, condition, "bf16x3")


def newton_fourth_root(matrices_BNN: Tensor, condition: float, precision: Precision) -> Tensor:
    """M^(−1/4) of every matrix of a stack by Newton's iteration, with products in `precision`; nothing waits for the device."""
    # S starts with its largest eigenvalue at most 5/2: the iteration converges for eigenvalues between 0 and 5.
    scale_B11 = 2.5 / torch.linalg.matrix_norm(matrices_BNN, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    S_BNN = matrices_BNN * scale_B11
    identity_NN = torch.eye(S_BNN.shape[-1], dtype=S_BNN.dtype, device=S_BNN.device)
    X_BNN = identity_NN * scale_B11**0.25
    for _ in range(math.ceil(math.log(max(1.0, condition / 2.5)) / GROWTH) + QUADRATIC):
        T_BNN = 1.25 * identity_NN - 0.25 * S_BNN
        by_T = Operand.of(T_BNN, precision, "left")
        X_BNN = by_T.times(X_BNN)
        T2_BNN = by_T.times(T_BNN)
        by_T2 = Operand.of(T2_BNN, precision, "left")
        S_BNN = by_T2.times(by_T2.times(S_BNN))
        S_BNN = 0.5 * (S_BNN + S_BNN.mT)  # all of them commute; rounding alone makes a product asymmetric
    return 0.5 * (X_BNN + X_BNN.mT)
