"""What the tests of factors share: matrices in every representation and written out, and functions of them by eigh."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.linalg import Clip, Dense, Diagonal, DiagonalLowRank, Factor, LowRank

POWERS = (-1.0, -0.5, 0.5, 1.0, 0.0, 2.0, -1.7, 0.3)


@dataclass(frozen=True)
class Case:
    """A factor, and the same matrix in float64."""

    factor: Factor
    matrix: Tensor

    @property
    def approximate(self) -> bool:
        """True if fractional powers are sums of shifted inverses."""
        return isinstance(self.factor, DiagonalLowRank)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positive(n: int, rank: int | None = None, seed: int = 0) -> Tensor:
    """A positive semi-definite matrix of this rank, eigenvalues from 10⁻² to 10."""
    values = torch.zeros(n, dtype=torch.float64)
    kept = n if rank is None else rank
    values[:kept] = torch.logspace(-2, 1, kept, dtype=torch.float64)
    q = torch.linalg.qr(normal(n, n, seed=seed)).Q
    m = q @ torch.diag(values) @ q.mT
    return (m + m.mT) / 2


def probabilities(n: int, tokens: int, sharpness: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p [n, tokens], columns that sum to one, and weights w [tokens]."""
    p = (sharpness * normal(n, tokens, seed=seed)).softmax(0)
    return p, torch.linspace(0.5, 2.0, tokens, dtype=torch.float64)


def softmax_fisher(p_NT: Tensor, w_T: Tensor) -> Tensor:
    """Σ_t w_t (diag(p_t) − p_t p_tᵀ), token by token."""
    total = torch.zeros(len(p_NT), len(p_NT), dtype=torch.float64)
    for p, w in zip(p_NT.mT, w_T, strict=True):
        total += w * (torch.diag(p) - torch.outer(p, p))
    return total


def _low_rank(u: Tensor) -> Case:
    return Case(LowRank.of(u), u @ u.mT)


def _plus(d: Tensor, u: Tensor) -> Case:
    return Case(DiagonalLowRank.of(d, u, +1), torch.diag(d) + u @ u.mT)


def _softmax(n: int, tokens: int, sharpness: float = 1.0) -> Case:
    p, w = probabilities(n, tokens, sharpness)
    return Case(DiagonalLowRank.softmax(p * w.sqrt(), torch.float64), softmax_fisher(p, w))


def _duplicates() -> Case:
    u = normal(11, 3)
    return _low_rank(torch.cat([u, u, 2 * u[:, :1]], dim=1))


def _zero_columns() -> Case:
    u = normal(11, 5)
    u[:, [0, 3]] = 0
    return _low_rank(u)


def _diagonal() -> Case:
    d = torch.tensor([0.0, 3.0, 1e-3, 7.0, 0.0, 0.5], dtype=torch.float64)
    return Case(Diagonal(d), torch.diag(d))


CASES: dict[str, Callable[[], Case]] = {
    "dense": lambda: Case(Dense.of(positive(10)), positive(10)),
    "dense singular": lambda: Case(Dense.of(positive(10, 4)), positive(10, 4)),
    "low rank": lambda: _low_rank(normal(13, 4)),
    "low rank square": lambda: _low_rank(normal(8, 8)),
    "low rank wide": lambda: _low_rank(normal(7, 15)),
    "low rank duplicates": _duplicates,
    "low rank zero columns": _zero_columns,
    "low rank all zero": lambda: _low_rank(torch.zeros(6, 3, dtype=torch.float64)),
    "low rank no columns": lambda: _low_rank(normal(6, 0)),
    "diagonal": _diagonal,
    "plus": lambda: _plus(normal(12).abs(), normal(12, 4)),
    "plus wide": lambda: _plus(normal(6).abs(), normal(6, 9)),
    "plus no columns": lambda: _plus(normal(6).abs(), normal(6, 0)),
    "softmax": lambda: _softmax(12, 5),
    "softmax wide": lambda: _softmax(6, 9),
    "softmax confident": lambda: _softmax(12, 5, sharpness=4.0),
}


def spectrum(matrix: Tensor) -> Tensor:
    """Eigenvalues, ascending, rounding below zero taken as zero."""
    return torch.linalg.eigvalsh(matrix).clamp(min=0)


def damped_power(matrix: Tensor, y: Tensor, p: float, damping: float, max_condition: float | None = None) -> Tensor:
    """(M + λI)^p Y by eigh, with the clip as the contract defines it."""
    values, vectors = torch.linalg.eigh(matrix)
    shifted = values.clamp(min=0) + damping
    if max_condition is not None:
        shifted = shifted.clamp(min=float(shifted.max()) / max_condition)
    return vectors @ (shifted.pow(p)[:, None] * (vectors.mT @ y))


def brute_clip(matrix: Tensor, damping: float, max_condition: float) -> Clip:
    """The clip, eigenvalue by eigenvalue."""
    shifted = [float(v) + damping for v in spectrum(matrix)]
    floor = max(shifted) / max_condition
    low = [v for v in shifted if v < floor]
    return Clip(len(low), len(shifted), sum(floor - v for v in low), floor)


def stored_matrix(factor: Factor) -> Tensor:
    """What a factor stores, written out in float64."""
    if isinstance(factor, Dense):
        return factor.stored.load(dtype=torch.float64)
    if isinstance(factor, Diagonal):
        return torch.diag(factor.values_N.double())
    assert isinstance(factor, LowRank | DiagonalLowRank)
    u = factor.columns.stored.load(dtype=torch.float64)
    if isinstance(factor, LowRank):
        return u @ u.mT
    return torch.diag(factor.values_N.double()) + factor.sign * (u @ u.mT)


def distance(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, and the plain norm where nothing is expected."""
    assert actual.shape == expected.shape, f"{actual.shape} instead of {expected.shape}"
    error, size = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    return error / size if size else error


def assert_positive(matrix: Tensor) -> None:
    """No eigenvalue below zero by more than float64 rounding."""
    values = torch.linalg.eigvalsh(matrix)
    assert float(values.min()) >= -1e-12 * float(values.abs().max()), f"{values.min():.3g} of {values.max():.3g}"
