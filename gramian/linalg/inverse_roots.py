"""M^(−1/4) of a stack of symmetric positive definite matrices.

By eigenvectors on a CPU. On a GPU, where an eigendecomposition takes as long as a hundred products, by an iteration for
X = M^(−1/4) with S = X⁴ M → I, four products of 2n³ FLOPs each time:

    T = aI − bS,    X ← X T,    S ← T⁴ S.

An eigenvalue s of S becomes s(a − bs)⁴. Newton's iteration has a = 5/4 and b = 1/4, which multiplies small eigenvalues by 2.4.
Here a and b are chosen for the interval [l, 1] in which the eigenvalues lie: so that all of them stay at most 1, and the
smallest becomes as large as possible. Then small ones grow tenfold, and half the iterations do (`coefficients`).
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gramian.linalg.factors.diagonal import Diagonal
from gramian.linalg.factors.factor import Factor
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


STACKED = 2**27
"""Largest number of entries of the matrices whose roots are computed together."""
Roots = dict[tuple[int, int], Tensor]
"""{(id of a factor M, n): (M/mean + δI)^(−1/4) of the first n coordinates of M, [n, n], or [n] for a diagonal M}."""
FIRST: Precision = "bf16x3"
"""Precision of products on a GPU while S may have eigenvalues below `SMALL`: three bfloat16 products for one, to 2⁻¹⁶."""


def root_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of `inverse_fourth_root` of matrices of a dtype on a device: float16 where it iterates, else theirs."""
    return torch.float16 if device.type == "cuda" and dtype != torch.float64 else dtype


def root_products(dtype: torch.dtype, device: torch.device) -> str:
    """Precision of the products of `inverse_fourth_root`, as a text."""
    found = str(root_dtype(dtype, device)).removeprefix("torch.")
    return found if root_dtype(dtype, device) == dtype else f"{FIRST}, then {found}"


def inverse_fourth_root(matrices_BNN: Tensor, condition: float) -> Tensor:
    """M^(−1/4) of every matrix M [n, n] of a stack; `condition` is a bound on the ratio of ‖M‖_F to M's smallest eigenvalue.

    On a GPU in the precision `FIRST` while S has eigenvalues below `SMALL`, in float16 from then on; `condition` should be
    below 2¹⁶.
    """
    then = root_dtype(matrices_BNN.dtype, matrices_BNN.device)
    if then == matrices_BNN.dtype:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
        tiny = torch.finfo(values_BN.dtype).tiny
        roots_BNN: Tensor = (vectors_BNN * values_BN.clamp(min=tiny).pow(-0.25)[:, None, :]) @ vectors_BNN.mT
        return roots_BNN
    return iterated_fourth_root(matrices_BNN, condition, FIRST, then)


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


# ---- of factors ------------------------------------------------------------------------------------------------------


def relative_roots(factors: Mapping[tuple[int, int], Factor], damping: float) -> Roots:
    """The roots of {(id of a factor, n): factor}; those of one width are taken together."""
    found: Roots = {}
    stacks: dict[tuple[int, torch.dtype, torch.device, bool], list[tuple[int, int]]] = {}
    for key, factor in factors.items():
        form = (key[1], factor.dtype, factor.device, isinstance(factor, Diagonal))
        stacks.setdefault(form, []).append(key)
    for (width, _, _, diagonal), keys in stacks.items():
        each = max(1, STACKED // (width if diagonal else width * width))
        for begin in range(0, len(keys), each):
            some = keys[begin : begin + each]
            roots = _diagonal_roots if diagonal else dense_roots
            found |= zip(some, roots([factors[key] for key in some], width, damping), strict=True)
    return found


def _diagonal_roots(factors: Sequence[Factor], width: int, damping: float) -> Tensor:
    values_BN = torch.stack([factor.diagonal()[:width] for factor in factors])
    return (values_BN / unless_zero(values_BN.sum(-1) / width)[:, None] + damping).pow(-0.25)


def dense_roots(factors: Sequence[Factor], width: int, damping: float, dtype: torch.dtype | None = None) -> Tensor:
    """Roots [factors, width, width], computed in `dtype`, or None: in that of the factors."""
    stack_BNN = torch.stack([factor.dense()[:width, :width].to(dtype or factor.dtype) for factor in factors])
    traces_B = stack_BNN.diagonal(dim1=-2, dim2=-1).sum(-1)
    stack_BNN /= unless_zero(traces_B / width)[:, None, None]
    stack_BNN.diagonal(dim1=-2, dim2=-1).add_(damping)
    bound = (width + damping * width**0.5) / damping  # the trace of M/mean is n, so its norm is at most n
    return inverse_fourth_root(stack_BNN, bound)


def unless_zero(means: Tensor) -> Tensor:
    """The means, 1 where one is not positive."""
    return torch.where(means > 0, means, 1.0)
