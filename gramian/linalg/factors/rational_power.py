"""x^q for -1 < q < 0 as a sum of shifted inverses, with the largest relative error it makes on an interval."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

POLES = 40
MARGIN = 3.0
"""Nats by which the poles of the fit extend beyond the interval on either side."""


@dataclass(frozen=True)
class Rational:
    """The rational approximation x^q ≈ constant + Σ_j weights_j / (x + shifts_j)."""

    constant: float
    weights: tuple[float, ...]
    shifts: tuple[float, ...]
    error: float
    """Largest relative error on a fine grid of the interval."""


@lru_cache(maxsize=64)
def rational_power(q: float, low: float, high: float) -> Rational:
    """Fit x^q, -1 < q < 0, on [low, high], low > 0, by a constant and a sum of shifted inverses 1/(x + t).

    The integral x^q = (sin πs/π) ∫ t^(-s)/(x+t) dt, s = -q, is smooth in log t, so poles spread evenly there serve every x
    of the interval; the constant stands for the poles beyond them and a pole at 0 for those before. The weights are the
    least-squares solution of the relative error on a grid, every term scaled to 1.
    """
    bottom, top = np.log(low), np.log(max(high, low * 1.0001))
    shifts = np.concatenate([[0.0], np.exp(np.linspace(bottom - MARGIN, top + MARGIN, POLES))])

    def terms(points: int) -> np.ndarray:
        x = np.exp(np.linspace(bottom, top, points))[:, None]
        return np.concatenate([np.ones_like(x), 1 / (x + shifts)], axis=1) * x**-q

    coarse, fine = terms(12 * POLES), terms(97 * POLES)
    size = coarse.max(0)
    weights = np.linalg.lstsq(coarse / size, np.ones(len(coarse)), rcond=1e-13)[0] / size
    error = float(np.abs(fine @ weights - 1).max())
    return Rational(float(weights[0]), tuple(weights[1:].tolist()), tuple(shifts.tolist()), error)
