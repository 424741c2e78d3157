"""Reliability weights of observations: what is known of them, and which are taken."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError

LEAST, MOST = 1e-100, 1e100
"""Of weights other than 0: their squares are numbers, too."""


@dataclass(frozen=True)
class Weights:
    """Sums over the weights of some observations, all of which add up without cancellation over any spread of weights."""

    total: float = 0.0
    """W."""
    squares: float = 0.0
    """W₂."""
    pairs: float = 0.0
    """C, by which W² = W₂ + 2C."""
    observations: int = 0

    @classmethod
    def equal(cls, n: int) -> "Weights":
        """Of n observations of weight 1."""
        return cls(float(n), float(n), n * (n - 1) / 2, n)

    @classmethod
    def of(cls, weights_N: Tensor) -> "Weights":
        """Of some weights, float64 and above 0."""
        pairs = weights_N[1:] @ weights_N.cumsum(0)[:-1]
        return cls(float(weights_N.sum()), float(weights_N.square().sum()), float(pairs), len(weights_N))

    def __add__(self, other: "Weights") -> "Weights":
        """Of the observations of both."""
        return Weights(
            self.total + other.total,
            self.squares + other.squares,
            self.pairs + other.pairs + self.total * other.total,
            self.observations + other.observations,
        )

    @property
    def effective(self) -> float:
        """n_eff, as many observations of equal weight as would tell the mean as well."""
        return self.total**2 / self.squares

    @property
    def freedom(self) -> float:
        """n_eff − 1."""
        return 2 * self.pairs / self.squares

    @property
    def divisor(self) -> float:
        """W − W₂/W, by which deviations become a variance; 0 for one observation."""
        return 2 * self.pairs / self.total

    def possible(self) -> bool:
        """True if some observations have such sums."""
        n, squared = float(self.observations), self.squares + 2 * self.pairs
        counted = n >= 1 and n.is_integer() and self.pairs >= 0 and (self.pairs > 0) == (n > 1)
        summed = self.total > 0 and self.squares > 0 and squared < math.inf
        return counted and summed and math.isclose(self.total * self.total, squared, rel_tol=1e-6)


def check_weight(weight: Any) -> float:
    """A weight as a float.

    Raises:
        GramianError: unless it is 0, or a number whose square is one.
    """
    try:
        found = float(weight)
    except (TypeError, ValueError):
        found = float("nan")
    if not (found == 0 or LEAST <= found <= MOST):
        raise GramianError(f"weight: got {weight!r}; expected 0, or a number from {LEAST:g} to {MOST:g}")
    return found


def check_weights(weights_N: Any, n: int) -> None:
    """Refuse what are no n weights.

    Raises:
        GramianError: unless each is 0, or a number whose square is one.
    """
    if not isinstance(weights_N, Tensor) or weights_N.shape != (n,):
        got = list(weights_N.shape) if isinstance(weights_N, Tensor) else type(weights_N).__name__
        raise GramianError(f"weights: got {got}; expected a tensor [{n}], one for each row")
    w = weights_N.double()
    if not bool(((w == 0) | (w >= LEAST) & (w <= MOST)).all()):
        raise GramianError(f"weights: hold another number; expected 0, or from {LEAST:g} to {MOST:g}")
