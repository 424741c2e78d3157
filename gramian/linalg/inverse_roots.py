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

CLOSE = 0.01
"""The iteration ends when the smallest eigenvalue of S is at least 1 − this: M^(−1/4) is then right to a quarter of it."""

SMALL = 2.0**-6
"""While S may have eigenvalues below this, products need a rounding finer than float16's 2⁻¹¹, which would destroy them."""


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

    On a GPU with a rounding of 2⁻¹⁶ (three bfloat16 products for one) while S has eigenvalues below `SMALL`, in float16 from
    then on; `condition` should be below 2¹⁶.
    """
    if not matrices_BNN.is_cuda or matrices_BNN.dtype == torch.float64:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
        tiny = torch.finfo(values_BN.dtype).tiny
        roots_BNN: Tensor = (vectors_BNN * values_BN.clamp(min=tiny).pow(-0.25)[:, None, :]) @ vectors_BNN.mT
        return roots_BNN
    return iterated_fourth_root(matrices_BNN, condition, "bf16x3", torch.float16)


def iterated_fourth_root(matrices_BNN: Tensor, condition: float, first: Precision, then: torch.dtype) -> Tensor:
    """M^(−1/4) of every matrix of a stack by iteration, in the dtype `then`; nothing waits for the device.

    Products are in the precision `first` while S may have eigenvalues below `SMALL`, and in the dtype `then` from there on.
    """
    norm_B11 = torch.linalg.matrix_norm(matrices_BNN, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    S_BNN = matrices_BNN / norm_B11
    X_BNN: Tensor | None = None  # over ‖M‖^(−1/4): the product of all T
    chosen = list(coefficients(1 / condition))
    for number, (a, b, smallest) in enumerate(chosen, start=1):
        fine = smallest < SMALL
        S_BNN = S_BNN if fine else S_BNN.to(then)
        T_BNN = S_BNN * -b
        T_BNN.diagonal(dim1=-2, dim2=-1).add_(a)
        T = Operand.of(T_BNN, first, "left") if fine else T_BNN
        X_BNN = T_BNN if X_BNN is None else _product(T, X_BNN)
        if number == len(chosen):
            break
        T2_BNN = _product(T, T_BNN)
        T2 = Operand.of(T2_BNN, first, "left") if fine else T2_BNN
        S_BNN = _product(T2, _product(T2, S_BNN))
        S_BNN = S_BNN.add(S_BNN.mT).mul_(0.5)  # all of them commute; rounding alone makes a product asymmetric
    if X_BNN is None:
        X_BNN = torch.eye(S_BNN.shape[-1], dtype=S_BNN.dtype, device=S_BNN.device)
    root_BNN: Tensor = X_BNN.add(X_BNN.mT).mul_(0.5) * norm_B11**-0.25
    return root_BNN.to(then)


def _product(left: Operand | Tensor, right: Tensor) -> Tensor:
    """The product of two stacks, in the precision of an operand, or in the dtype of a plain left side."""
    return left.times(right) if isinstance(left, Operand) else left @ right.to(left.dtype)
