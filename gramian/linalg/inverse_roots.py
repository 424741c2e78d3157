"""M^(−1/4) of a stack of symmetric positive definite matrices.

By eigenvectors on a CPU. On a GPU, where an eigendecomposition takes as long as a hundred products, by an iteration for
X = M^(−1/4) with S = X⁴ M → I, four products of 2n³ FLOPs each time:

    T = aI − bS,    X ← X T,    S ← T⁴ S.

An eigenvalue s of S becomes s(a − bs)⁴. Newton's iteration has a = 5/4 and b = 1/4, which multiplies small eigenvalues by 2.4.
Here a and b are chosen for the interval [l, 1] in which the eigenvalues lie: so that all of them stay at most 1, and the
smallest becomes as large as possible. Then small ones grow tenfold, and half the iterations do (`coefficients`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gramian.linalg.tensor_core_products import Operand, Precision

CLOSE = 1e-3
"""The iteration ends when the smallest eigenvalue of S is at least 1 − this: M^(−1/4) is then right to a quarter of it."""

SMALL = 2.0**-6
"""While S may have eigenvalues below this, products need a rounding finer than TF32's 2⁻¹¹, which would destroy them."""


def coefficients(smallest: float) -> Iterator[tuple[float, float, float]]:
    """(a, b, l) of every iteration, for eigenvalues of S that begin in [l, 1] with l = `smallest`.

    With r = b/a, s(a − bs)⁴ has its largest value on [0, 1] at s = 1/(5r): it is 1 for a⁴ = 5r(5/4)⁴. The values at l and at 1
    are equal, and the smallest, for l^(1/4)·(1 − rl) = 1 − r.
    """
    while smallest < 1 - CLOSE:
        root = smallest**0.25
        r = max(0.2, (1 - root) / (1 - root * smallest))
        a = (5 * r) ** 0.25 * 1.25
        yield a, a * r, smallest
        smallest = smallest * (a - a * r * smallest) ** 4


def inverse_fourth_root(matrices_BNN: Tensor, condition: float) -> Tensor:
    """M^(−1/4) of every matrix M [n, n] of a stack; `condition` is a bound on the ratio of ‖M‖_F to M's smallest eigenvalue.

    On a GPU with a rounding of 2⁻¹⁶ (three bfloat16 products for one) while S has eigenvalues below `SMALL`, in TF32 from then
    on; `condition` should be below 2¹⁶.
    """
    if not matrices_BNN.is_cuda or matrices_BNN.dtype == torch.float64:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
        tiny = torch.finfo(values_BN.dtype).tiny
        roots_BNN: Tensor = (vectors_BNN * values_BN.clamp(min=tiny).pow(-0.25)[:, None, :]) @ vectors_BNN.mT
        return roots_BNN
    return iterated_fourth_root(matrices_BNN, condition, "bf16x3", "tf32")


def iterated_fourth_root(matrices_BNN: Tensor, condition: float, first: Precision, then: Precision) -> Tensor:
    """M^(−1/4) of every matrix of a stack by iteration; nothing waits for the device.

    Products are in the precision `first` while S may have eigenvalues below `SMALL`, and in `then` from there on.
    """
    norm_B11 = torch.linalg.matrix_norm(matrices_BNN, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    S_BNN = matrices_BNN / norm_B11
    identity_NN = torch.eye(S_BNN.shape[-1], dtype=S_BNN.dtype, device=S_BNN.device)
    X_BNN: Tensor = identity_NN * norm_B11**-0.25
    for a, b, smallest in coefficients(1 / condition):
        precision = first if smallest < SMALL else then
        T_BNN = a * identity_NN - b * S_BNN
        by_T = Operand.of(T_BNN, precision, "left")
        X_BNN = by_T.times(X_BNN)
        by_T2 = Operand.of(by_T.times(T_BNN), precision, "left")
        S_BNN = by_T2.times(by_T2.times(S_BNN))
        S_BNN = 0.5 * (S_BNN + S_BNN.mT)  # all of them commute; rounding alone makes a product asymmetric
    return X_BNN.add(X_BNN.mT).mul_(0.5)
