"""Reliability weights of observations: the sums from which variances and standard errors are formed, and checks of weights."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError

LEAST, MOST = 1e-100, 1e100
"""Range of weights other than 0, in which the square of a weight is finite and not 0."""


@dataclass(frozen=True)
class Weights:
    """Sums over the weights w_i of some observations, formed so that nothing cancels, however much the weights differ."""

    total: float = 0.0
    """W = Σ w_i, the sum of the weights."""
    squares: float = 0.0
    """W₂ = Σ w_i², the sum of the squared weights."""
    pairs: float = 0.0
    """C = Σ_{i<j} w_i w_j over pairs of weights, so that (Σ w_i)² = Σ w_i² + 2C."""
    observations: int = 0

    @classmethod
    def equal(cls, n: int) -> "Weights":
        """The `Weights` of n observations of weight 1."""
        return cls(float(n), float(n), n * (n - 1) / 2, n)

    @classmethod
    def of(cls, weights_N: Tensor) -> "Weights":
        """The `Weights` of observations with the weights `weights_N` [N], float64 and all above 0."""
        pairs = weights_N[1:] @ weights_N.cumsum(0)[:-1]
        return cls(float(weights_N.sum()), float(weights_N.square().sum()), float(pairs), len(weights_N))

    def __add__(self, other: "Weights") -> "Weights":
        """The `Weights` of the observations of both together."""
        return Weights(
            self.total + other.total,
            self.squares + other.squares,
            self.pairs + other.pairs + self.total * other.total,
            self.observations + other.observations,
        )

    @property
    def effective(self) -> float:
        """n_eff = (Σ w)²/Σ w², the number of observations of equal weight whose mean has the same variance."""
        return self.total**2 / self.squares

    @property
    def freedom(self) -> float:
        """n_eff − 1 degrees of freedom, n_eff = (Σ w)²/Σ w²."""
        return 2 * self.pairs / self.squares

    @property
    def divisor(self) -> float:
        """W − W₂/W, W = Σ w, W₂ = Σ w²: divides summed squared deviations to give a variance; 0 for one observation."""
        return 2 * self.pairs / self.total

    def possible(self) -> bool:
        """True if there are observations whose weights have these sums; used to check loaded states."""
        n, squared = float(self.observations), self.squares + 2 * self.pairs
        counted = n >= 1 and n.is_integer() and self.pairs >= 0 and (self.pairs > 0) == (n > 1)
        summed = self.total > 0 and self.squares > 0 and squared < math.inf
        return counted and summed and math.isclose(self.total * self.total, squared, rel_tol=1e-6)


def check_weight(weight: Any) -> float:
    """The weight as a float; a GramianError unless it is 0 or in the range [LEAST, MOST]."""
    try:
        found = float(weight)
    except (TypeError, ValueError):
        found = float("nan")
    if not (found == 0 or LEAST <= found <= MOST):
        raise GramianError(f"weight: got {weight!r}; expected 0, or a number from {LEAST:g} to {MOST:g}")
    return found


def check_weights(weights_N: Any, n: int) -> None:
    """Raise GramianError unless `weights_N` is a tensor [n] of weights, each 0 or in the range [LEAST, MOST]."""
    if not isinstance(weights_N, Tensor) or weights_N.shape != (n,):
        got = list(weights_N.shape) if isinstance(weights_N, Tensor) else type(weights_N).__name__
        raise GramianError(f"weights: got {got}; expected a tensor [{n}], one for each row")
    w = weights_N.double()
    if not bool(((w == 0) | (w >= LEAST) & (w <= MOST)).all()):
        raise GramianError(f"weights: hold another number; expected 0, or from {LEAST:g} to {MOST:g}")
