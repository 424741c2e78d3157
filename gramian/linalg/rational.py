"""x^q for -1 < q < 0 as a sum of shifted inverses, with the largest relative error it makes on an interval."""

from dataclasses import dataclass

import numpy as np

POLES = 40
MARGIN = 8.0
"""Nats by which the poles reach beyond the interval on either side."""


@dataclass(frozen=True)
class Rational:
    """x^q ≈ constant + Σ_j weights_j / (x + shifts_j)."""

    constant: float
    weights: tuple[float, ...]
    shifts: tuple[float, ...]
    error: float
    """Largest relative error seen on a fine grid of the interval."""


def rational_power(q: float, low: float, high: float) -> Rational:
    """Fit x^q on [low, high].

    The integral x^q = (sin πs/π) ∫ t^(-s)/(x+t) dt, s = -q, is smooth in log t, so poles spread evenly there serve every x
    of the interval; their weights are the least-squares solution of the relative error on a grid.

    Args:
        q: exponent, -1 < q < 0.
        low: lower end, positive.
        high: upper end.

    Returns:
        The approximation and its error.
    """
    bottom, top = np.log(low), np.log(max(high, low * 1.0001))
    shifts = np.exp(np.linspace(bottom - MARGIN, top + MARGIN, POLES))
    grid = np.exp(np.linspace(bottom, top, 12 * POLES))
    scale = grid**-q

    def terms(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones((len(x), 1)), shifts[None, :] / (x[:, None] + shifts[None, :])], axis=1)

    weights = np.linalg.lstsq(terms(grid) * scale[:, None], np.ones(len(grid)), rcond=1e-13)[0]
    fine = np.exp(np.linspace(bottom, top, 97 * POLES))
    error = float(np.abs((terms(fine) @ weights) * fine**-q - 1).max())
    return Rational(float(weights[0]), tuple(weights[1:] * shifts), tuple(shifts), error)
