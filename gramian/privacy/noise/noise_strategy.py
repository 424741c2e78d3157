"""Matrix factorisation noise: strategies C that correlate the noise of releases, their error and their sensitivity.

Over T releases the noise is y = C⁻¹z, with a row of independent normal numbers z for each release. C is a lower triangular
Toeplitz matrix, c(x) its power series. What is added to release t is partly taken away again by the releases after it, so that
the sum of the noise of releases 1 … t, which is what weights contain, grows slower than that of independent noise:

    B = A C⁻¹, A the lower triangular matrix of ones
    mean square error = ‖B‖²_F / T = Σ_i (1 - i/T) e_i²,    e(x) = 1/((1 - x) c(x))

For independent noise, C = 1, that is (T + 1)/2. Records pay by the columns of C: who takes part in releases t₁, t₂, … shifts
z by Σ_i C_{·,t_i} x_i, and the norm of that is the sensitivity of all releases together.

- "bandmf": C has b bands and unit columns, and is optimised for the error over T releases. Columns b apart are orthogonal, so a
  record that takes part at most once in b releases pays for each participation what it pays for a release of independent noise
  (Choquette-Choo et al. 2023, arXiv 2306.08153, theorem 4; Toeplitz: McKenna 2024, arXiv 2405.15913).
- "bisr": C⁻¹ is the square root (1 - x)^½ of the inverse of A, cut to b bands (Kalinin et al. 2025, arXiv 2505.12128).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gramian.core.errors import GramianError

NoiseName = Literal["gaussian", "bandmf", "bisr"]
Numbers = NDArray[np.float64]

CORRELATED = ("bandmf", "bisr")
"""Names of noise that is correlated over releases."""
DIGITS = 5
"""Decimal digits of the optimised coefficients c_i/c_0: the same on machines whose optimisers differ in the last bits."""
LONGEST = 2**20
"""Largest number of releases of a strategy."""


@dataclass(frozen=True)
class NoiseStrategy:
    """A strategy C of correlated noise: its first column, or that of its inverse.

    Example:
        >>> NoiseStrategy.of("bisr", 3).coefficients
        (1.0, -0.5, -0.125)
    """

    name: NoiseName
    coefficients: tuple[float, ...]
    """The b numbers that are not 0 of the first column of C ("bandmf", norm 1), or of C⁻¹ ("bisr", beginning with 1)."""

    @classmethod
    def of(cls, name: NoiseName, bands: int, releases: int | None = None) -> "NoiseStrategy":
        """The strategy of this name with `bands` bands; "bandmf" is optimised for the number of `releases`."""
        if name == "bisr":
            return cls(name, tuple(inverse_root(bands).tolist()))
        assert releases is not None
        return cls(name, optimised_bands(releases, bands))

    @property
    def bands(self) -> int:
        """b, the number of bands."""
        return len(self.coefficients)

    def column(self, releases: int) -> Numbers:
        """The first column of C over so many releases: [releases]."""
        return _cut(self.coefficients, releases) if self.name == "bandmf" else _reciprocal(self.coefficients, releases)

    def inverse(self, releases: int) -> Numbers:
        """The first column of C⁻¹ over so many releases: [releases]."""
        return _cut(self.coefficients, releases) if self.name == "bisr" else _reciprocal(self.coefficients, releases)

    def error(self, releases: int) -> float:
        """Root mean square of the noise in the prefix sums of `releases` releases, for normal numbers z of variance 1.

        Independent noise has √((releases + 1)/2).
        """
        e_T = np.cumsum(self.inverse(releases))
        return math.sqrt(float(np.square(e_T) @ _weights(releases)))


def is_correlated(name: str) -> bool:
    """True for the name of noise that is correlated over releases."""
    return name in CORRELATED


def buffers_of(name: str, bands: int | None) -> int:
    """Number of buffers as large as the gradients, in float32 or float64, that the noise needs: b - 1 for "bandmf", else 0."""
    return (bands or 1) - 1 if name == "bandmf" else 0


def kind_of(name: NoiseName, bands: int | None, sample_rate: float) -> tuple[()] | tuple[str, int, int]:
    """What an account has of the noise beside σ and rate: (name, bands, groups); () for independent noise.

    Records are in `groups` groups, of which release t draws from number t mod groups with probability groups · sample_rate.
    "bandmf" has as many groups as bands; "bisr" as many as there are.

    Raises:
        GramianError: for "bandmf" with more bands than groups can be drawn from.
    """
    if not is_correlated(name):
        return ()
    assert bands is not None
    most = max(1, math.floor(1 / sample_rate * (1 + 1e-12)))
    if name == "bandmf" and bands > most:
        raise GramianError(
            f"bands: a batch is {sample_rate:.4g} of all records, and one of {bands} groups has fewer; expected at most "
            f"{most}, or smaller batches"
        )
    return name, bands, bands if name == "bandmf" else most


def check_noise(name: Any, bands: Any, releases: Any) -> None:
    """Raise a `GramianError` unless the options `noise`, `bands` and `releases` are valid, and go together."""
    if name not in get_args(NoiseName):
        raise GramianError(f'noise: expected one of "gaussian", "bandmf", "bisr", got {name!r}')
    for field, value in (("bands", bands), ("releases", releases)):
        count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST
        if value is not None and not count:
            raise GramianError(f"{field}: expected a number from 1 to 2^20 or None, got {value!r}")
        if value is not None and not is_correlated(name):
            raise GramianError(f'{field}: is of correlated noise; expected noise="bandmf" or "bisr", or None')
    if is_correlated(name) and bands is None:
        raise GramianError(f'bands: none given; expected the number of bands of noise="{name}", such as 8')
    if name == "bandmf" and (releases is None or releases < bands):
        raise GramianError(
            f"releases: is {releases}; expected the number of releases of the whole run, at least bands ({bands}): it is fixed "
            'for noise="bandmf"'
        )


# ---- coefficients ----------------------------------------------------------------------------------------------------


def inverse_root(bands: int) -> Numbers:
    """The first `bands` coefficients of (1 - x)^½: 1, -1/2, -1/8, -1/16 and so on."""
    found = [1.0]
    for i in range(1, bands):
        found.append(found[-1] * (2 * i - 3) / (2 * i))
    return np.array(found)


@lru_cache(maxsize=16)
def optimised_bands(releases: int, bands: int) -> tuple[float, ...]:
    """c_0 … c_{b-1} with norm 1 that minimise ‖c‖² · Σ_i (1 - i/T) e_i², e(x) = 1/((1 - x) c(x)), for T releases.

    By L-BFGS over the ratios r_i = c_i/c_{i-1} in (0, 1], from those of (1 - x)^(-½), with ∂e/∂c_k = -x^k e(x)/c(x). For
    coefficients that fall, c has no root inside of the unit circle, so that 1/c does not grow. Cost: O(T·b) for each of some
    tens of evaluations; a second for T·b = 10⁶.
    """
    from scipy.optimize import minimize

    weights_T = _weights(releases)

    def objective(ratios: Numbers) -> tuple[float, Numbers]:
        rest = np.cumprod(ratios)
        c = (1.0, *rest.tolist())
        e_T = np.cumsum(_reciprocal(c, releases))
        f_T, pulled_T = _over(e_T, c), weights_T * e_T
        square, error = 1 + float(rest @ rest), float(e_T @ pulled_T)
        slope = np.array([-2 * float(pulled_T[k:] @ f_T[: releases - k]) for k in range(1, bands)])
        by_c = 2 * rest / square + slope / error
        return math.log(square * error), np.cumsum((by_c * rest)[::-1])[::-1] / ratios

    start = np.array([(2 * i - 1) / (2 * i) for i in range(1, bands)])
    options = {"maxiter": 300, "ftol": 1e-15, "gtol": 1e-10}
    rest: list[float] = []
    if bands > 1:
        found = minimize(
            objective, start, jac=True, method="L-BFGS-B", bounds=[(1e-4, 1.0)] * (bands - 1), options=options
        )
        rest = [round(float(value), DIGITS) for value in np.cumprod(found.x)]
    length = math.sqrt(math.fsum(value * value for value in (1.0, *rest)))
    return tuple(value / length for value in (1.0, *rest))


def _weights(releases: int) -> Numbers:
    """1 - i/T: the share of the T prefix sums that have the draw of i releases before."""
    return 1 - np.arange(releases) / releases


def _cut(coefficients: tuple[float, ...], length: int) -> Numbers:
    found = np.zeros(length)
    count = min(length, len(coefficients))
    found[:count] = coefficients[:count]
    return found


def _reciprocal(coefficients: tuple[float, ...], length: int) -> Numbers:
    """The first `length` coefficients of 1/p(x), p the polynomial with these coefficients."""
    return _over(_cut((1.0,), length), coefficients)


def _over(series_T: Numbers, coefficients: tuple[float, ...]) -> Numbers:
    """The coefficients of s(x)/p(x), as many as those of the series s."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], coefficients, series_T), np.float64)


# ---- sensitivity -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sensitivity_of_roots(bands: int, groups: int, releases: int) -> tuple[float, float]:
    """Sensitivity of `releases` releases of "bisr" to a record that takes part at most once in `groups` releases.

    For coefficients of C that fall and are not negative, the worst are participations at 1, 1 + s, 1 + 2s, …, all in one
    direction (Kalinin and Lampert 2024, arXiv 2405.13763, theorem 2); that C is such a matrix is checked.

        ‖Σ_j C_{·, 1+js}‖,   v_t = Σ_j c_{t - js}

    Returns:
        (the norm of v; its largest entry, by which one release's draw is shifted at most).

    Raises:
        GramianError: if the coefficients rise, or are negative.
    """
    c_T = NoiseStrategy.of("bisr", bands).column(releases)
    if np.any(c_T < 0) or np.any(np.diff(c_T) > 1e-15):
        raise GramianError(f"bands: the coefficients of bisr with {bands} bands rise; expected another number of bands")
    rows = -(-releases // groups)
    v_T = np.cumsum(np.pad(c_T, (0, rows * groups - releases)).reshape(rows, groups), 0).reshape(-1)[:releases]
    return float(np.linalg.norm(v_T)), float(v_T.max())
