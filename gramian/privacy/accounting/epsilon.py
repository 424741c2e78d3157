"""ε of a history of steps, through the accountants of Opacus and dp-accounting.

Both libraries assume normal noise, and gramian's noise is bounded. So a part of δ is set aside for the missing tails, and ε is
computed at the δ that is left. All bounds are for data sets that differ by one record that is added or removed.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gramian.core.errors import GramianError
from gramian.privacy.noise.element_noise import MOST_ELEMENTS, TAIL_MASS, tail_delta
from gramian.privacy.noise.noise_strategy import sensitivity_of_roots

MECHANISMS = ("prv", "pld", "rdp", "gdp")

Run = tuple[float, float, int] | tuple[float, float, int, int, int] | tuple[float, float, int, str, int, int]
"""Equal steps: (noise multiplier, sample rate, steps), and for truncated Poisson draws also (records, largest draw), for
correlated noise (its name, bands, groups)."""

History = tuple[Run, ...]
"""Runs of equal steps, in order."""

GRID_LIMIT = 200.0
"""If ε by "rdp" exceeds this, "prv" and "pld" are not evaluated: their grids grow with ε, to minutes and then to all memory."""

LEAST_DELTA, LEAST_DELTA_OF_A_STEP = 1e-11, 1e-14
"""Smallest δ for which "prv" and "pld" are evaluated: the larger of the first and of the second times the steps; below it,
float64 rounding spoils their Fourier transforms."""

PRV_ERROR, PRV_LEAST_ERROR, PRV_ERROR_OF_A_ROOT = 0.01, 5e-4, 1.1e-5
"""Error that "prv" adds to ε: the first for ε of 1 or more, else a hundredth of ε, but at least the second and the third times
√steps, with which an evaluation takes seconds."""

PLD_COARSEST, PLD_SHARE = 1e-3, 0.1
"""Grid of "pld" on the axis of privacy losses: the second times the root mean square loss of a step, at most the first."""

LARGE_ORDERS, LARGE_ORDERS_BELOW = (80, 96, 128, 192, 256, 384, 512, 768, 1024), 0.5
"""Rényi orders that are tried beside those of Opacus where these give an ε below the second, and none below about 0.1."""


def check_installed(mechanism: str) -> None:
    """Raise a `GramianError` if a library that computes ε is missing."""
    for package in ("opacus", "dp_accounting") if mechanism == "pld" else ("opacus",):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise GramianError(
                f"accountant: {name}, which computes epsilon, is not here; expected gramian[privacy] installed"
            )


@lru_cache(maxsize=256)
def epsilon_of(mechanism: str, history: History, delta: float) -> float:
    """ε at `delta` of the steps of a history; 0 without steps, infinite where a step had no noise, or too little for δ.

    Cost: up to seconds for "prv" and "pld" (an FFT of up to some 10⁶ points for each run of equal steps); cached.

    Raises:
        GramianError: if the mechanism has no answer.
    """
    if not history:
        return 0.0
    if any(run[0] == 0 for run in history):
        return math.inf
    if mechanism == "gdp" and any(len(run) == 6 for run in history):
        raise GramianError("accountant: gdp is a limit for releases of independent noise; expected prv, pld or rdp")
    if mechanism == "gdp" and len(history) > 1:
        raise GramianError(f"accountant: gdp over {len(history)} kinds of steps; expected one, or prv, pld or rdp")
    if mechanism != "pld" and any(len(run) == 5 for run in history):
        raise GramianError(f'accountant: {mechanism} has no bound for truncated Poisson draws; expected "pld"')
    left = left_for_normal_noise(history, delta)
    given, history = history, tuple(plain_run(run) for run in history)
    if mechanism in ("prv", "pld"):
        check_resolved(mechanism, "delta", delta, left if left > 0 else delta, sum(run[2] for run in history))
    if left <= 0:
        warnings.warn(
            f"accountant: the noise's tails alone take more than delta {delta}; expected a larger noise_multiplier",
            stacklevel=3,
        )
        return math.inf
    if mechanism in ("prv", "pld"):
        bound = epsilon_of("rdp", tuple(run if len(run) == 6 else (run[0], run[1], run[2]) for run in given), delta)
        if bound > GRID_LIMIT:
            if any(len(run) == 5 for run in history):
                raise GramianError(
                    f"accountant: pld has no answer for an epsilon of hundreds ({bound:.0f}); expected more noise"
                )
            warnings.warn(
                f"accountant: epsilon {bound:.0f} is the bound of rdp; expected less for {mechanism}", stacklevel=3
            )
            return bound
    compute = {"prv": _prv, "pld": _pld, "rdp": _rdp, "gdp": _gdp}[mechanism]
    value = _quietly(mechanism, delta, lambda: compute(history, left))
    return max(0.0, value)  # a δ near 1 would make it negative


def _prv(history: History, delta: float) -> float:
    """Opacus' numerical composition; once more with a smaller error where 0.01 would be more than a hundredth of ε."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(history)
    coarse = float(accountant.get_epsilon(delta, eps_error=PRV_ERROR))
    steps = sum(run[2] for run in history)
    error = max(PRV_LEAST_ERROR, PRV_ERROR_OF_A_ROOT * math.sqrt(steps), (coarse - PRV_ERROR) / 100)
    if coarse >= 1 or error > PRV_ERROR / 2:
        return coarse
    return min(coarse, float(accountant.get_epsilon(delta, eps_error=error)))


def _rdp(history: History, delta: float) -> float:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    def bound(orders: tuple[float, ...]) -> float:
        total = sum(run[2] * _divergences(run[0], run[1], orders) for run in history)
        return float(get_privacy_spent(orders=list(orders), rdp=total, delta=delta)[0])

    usual = bound(tuple(RDPAccountant.DEFAULT_ALPHAS))
    return usual if usual > LARGE_ORDERS_BELOW else min(usual, bound(LARGE_ORDERS))


@lru_cache(maxsize=1024)
def _divergences(sigma: float, rate: float, orders: tuple[float, ...]) -> Any:
    """Rényi divergence of one step at each order; that of n steps is n times as large. Cost: some 20 ms; cached."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders))


def _gdp(history: History, delta: float) -> float:
    from opacus.accountants import create_accountant

    accountant = create_accountant("gdp")
    accountant.history = list(history)
    return float(accountant.get_epsilon(delta=delta))


def _pld(history: History, delta: float) -> float:
    """Privacy loss distributions of dp-accounting on a grid that rounds ε up by some thousandths at most."""
    from dp_accounting import NeighboringRelation, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    square = sum(run[2] * run[1] ** 2 * math.expm1(min(50.0, run[0] ** -2)) for run in history)
    grid = min(PLD_COARSEST, PLD_SHARE * math.sqrt(square / sum(run[2] for run in history)))
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid)
    for run in history:
        accountant.compose(SelfComposedDpEvent(event_of(run), run[2]))
    return float(accountant.get_epsilon(delta))


def event_of(run: Run) -> Any:
    """The dp-accounting event of one step of a run of independent noise (`plain_run`).

    For truncated draws of at most K records from N, the data set and its neighbour have at most N + 1 records.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

    if len(run) == 3:
        return PoissonSampledDpEvent(run[1], GaussianDpEvent(run[0]))
    assert len(run) == 5
    return TruncatedSubsampledGaussianDpEvent(run[3] + 1, run[1], run[4], run[0])


def check_resolved(mechanism: str, field: str, delta: float, left: float, steps: int) -> None:
    """Raise a `GramianError` if δ is too small for Fourier transforms in float64, whose ε would be rounding errors.

    `delta` is the user's δ under the name `field`; `left` what remains of it after the tails of the noise, which is compared.
    """
    least = max(LEAST_DELTA, LEAST_DELTA_OF_A_STEP * steps)
    if left < least:
        tails = f", and the noise's tails take {delta - left:.0e}" if left < delta else ""
        raise GramianError(
            f"accountant: {mechanism} has no answer for {field} {delta} (its digits end at {least:.0e} over {steps} "
            f"steps{tails}); expected another delta, or rdp"
        )


def left_for_normal_noise(history: History, delta: float) -> float:
    """The δ' at which the ε of normal noise equals, at δ, that of the bounded noise: δ = δ'/z + Σ_steps min(1, 2q)·δ₀(σ).

    A record takes part in a step with probability q, and δ₀ is what that costs (`tail_delta`) if the data set with the record
    is observed. If the data set without it is observed, its noise may lie where that of the other cannot: this has probability
    δ₀ in every step, and the ratio there is 1/(1 - q) at most, so that the excess is below min(1, q/(1 - q))·δ₀ ≤ 2q·δ₀. All
    densities inside the bound are divided by their mass z = (1 - 2⁻⁶⁴)^(pairs·steps). In a truncated draw the record may take
    the place of another, and shifts the sum by up to 2C: δ₀(σ/2). Correlated noise: `correlated_tails`.
    """
    tails = sum(correlated_tails(run) if len(run) == 6 else _tails(run) for run in history)
    return (delta - tails) * (1 - sum(run[2] for run in history) * (MOST_ELEMENTS / 2) * TAIL_MASS)


def _tails(run: Run) -> float:
    return min(1.0, 2 * run[1]) * run[2] * tail_delta(run[0] / (2 if len(run) == 5 else 1))


# ---- correlated noise ------------------------------------------------------------------------------------------------


def plain_run(run: Run) -> Run:
    """Steps of plain noise that cost as much as a run with correlated noise; any other run itself.

    Of n releases a record can take part in k = ⌈n/groups⌉. "bandmf": k releases with the σ of the run and the rate within the
    record's group, groups · rate, since columns of C are orthogonal and have norm 1 (Choquette-Choo et al. 2023, theorem 4).
    "bisr": one release with the σ of the run over the sensitivity, in which the record takes part surely.
    """
    if len(run) != 6:
        return run
    sigma, rate, steps, name, bands, groups = run
    if name == "bandmf":
        return sigma, min(1.0, rate * groups), -(-steps // groups)
    return sigma / sensitivity_of_roots(bands, groups, steps)[0], 1.0, 1


def correlated_tails(run: tuple[float, float, int, str, int, int]) -> float:
    """The part of δ for the missing tails of a run with correlated noise.

    "bandmf": a participation shifts the draws of b releases, by a column of norm 1: `tail_delta` over b times as many elements.
    "bisr": each of n releases may be shifted, by the largest row of the sum of columns at most: n·δ₀(σ/largest row).
    """
    sigma, rate, steps, name, bands, groups = run
    if name == "bandmf":
        return min(1.0, 2 * rate * groups) * -(-steps // groups) * tail_delta(sigma, bands)
    return steps * tail_delta(sigma / sensitivity_of_roots(bands, groups, steps)[1])


def _quietly(mechanism: str, delta: float, compute: Callable[[], float]) -> float:
    """The number that `compute()` gets from a library, without its warnings.

    The warnings of the import concern other parts of Opacus, that of the RDP orders says that the bound could be tighter, and
    that of GDP is given once, by `Accounting`.

    Raises:
        GramianError: if the library is missing, fails, or returns no finite number at `delta`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = compute()
    except ImportError as reason:
        package = "dp-accounting" if "dp_accounting" in str(reason) else "opacus"
        raise GramianError(f"accountant: {reason}; expected {package} installed") from None
    except (ArithmeticError, ValueError, RuntimeError, MemoryError) as reason:
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0].rstrip(".")
        raise GramianError(
            f"accountant: {mechanism} has no answer for delta {delta} ({first}); expected another delta, or rdp"
        ) from None
    if not math.isfinite(value):
        raise GramianError(f"accountant: {mechanism} gives {value} for delta {delta}; expected another delta, or rdp")
    return value
