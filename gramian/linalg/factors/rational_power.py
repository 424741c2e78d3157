"""x^q for -1 < q < 0 as a sum of shifted inverses 1/(x + t), and its largest relative error on an interval."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

POLES = 40
MARGIN = 3.0
"""Distance in ln t by which the shifts t of the fit extend beyond the interval on either side."""


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

    The integrand of x^q = (sin πs/π) ∫ t^(-s)/(x+t) dt, s = -q, is smooth in log t, so shifts t that are evenly spaced in log t
    fit every x of the interval. The constant stands for larger shifts, and the shift 0 for smaller ones. The weights minimise
    the squared relative error on a grid.
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
