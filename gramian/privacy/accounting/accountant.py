"""How much privacy was spent: a history of steps, and its ε through Opacus' accountants.

Opacus assumes normal noise, and gramian's noise is bounded. So a part of δ is set aside for the missing tails, and ε is
computed at the δ that is left.

The steps are not counted here: `ReleaseCounter.spent`, the number of releases (noised sums) begun, is passed in, so a replay
counts once and nothing is refunded.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from gramian.core.errors import GramianError
from gramian.privacy.noise.element_noise import MOST_ELEMENTS, TAIL_MASS, tail_delta

MECHANISMS = ("prv", "rdp", "gdp")

PRV_LIMIT = 200.0
"""If ε by "rdp" exceeds this, "prv" is not evaluated: its grid grows with ε, to minutes and then to all memory."""

PRV_LEAST_DELTA, PRV_LEAST_DELTA_OF_A_STEP = 1e-11, 1e-14
"""Smallest δ for which "prv" is evaluated: the larger of the first and of the second times the steps; below it, float64
rounding spoils its Fourier transforms."""

PRV_SEARCH_LIMIT = 50.0
"""Largest target ε of a search for σ with "prv": the bisection also evaluates ε several times as large as the target."""

MOST_NOISE, TOLERANCE = 1e6, 0.01
"""Largest σ that a search for the noise multiplier tries; largest difference by which the ε found may lie below its target."""

History = tuple[tuple[float, float, int], ...]
"""Runs of equal steps, in order: (noise multiplier, sample rate, steps) each."""


class Accounting:
    """Steps of a private run, grouped in runs of equal (noise multiplier, sample rate), and their ε.

    The mechanism "prv" (numerical composition) is an upper bound that is tight to 0.01 in ε; "rdp" is a looser upper bound;
    "gdp" rests on a central limit theorem, can lie below the truth and is for comparison only: `approximate` is then True, with
    a warning. Where the bound of "rdp" exceeds 200, "prv" returns it instead of its own, with a warning. All are for the
    Poisson-subsampled Gaussian mechanism under add/remove of one record. Another mechanism raises a `GramianError`, as does a
    machine without Opacus.
    """

    def __init__(self, mechanism: str = "prv") -> None:
        _check_mechanism(mechanism)
        if importlib.util.find_spec("opacus") is None:  # said before a step is made, not after
            raise GramianError(
                "accountant: opacus, which computes epsilon, is not here; expected gramian[privacy] installed"
            )
        self.mechanism = mechanism
        self._history: list[tuple[float, float, int]] = []
        if self.approximate:
            warnings.warn(
                "accountant: gdp is an approximation that can understate epsilon; expected prv or rdp for a guarantee",
                stacklevel=2,
            )

    @property
    def approximate(self) -> bool:
        """True if ε is an approximation instead of an upper bound."""
        return self.mechanism == "gdp"

    @property
    def history(self) -> History:
        """(noise multiplier, sample rate, steps) of every run of equal steps."""
        return tuple(run for run in self._history if run[2])

    @property
    def steps(self) -> int:
        """Number of steps counted so far."""
        return sum(steps for _, _, steps in self._history)

    def record(self, noise_multiplier: float, sample_rate: float) -> None:
        """Set the noise multiplier σ (0: no privacy) and sample rate, in (0, 1], of the steps that follow.

        After a resume call `set_steps` with the counter's `spent` first: releases begun after the checkpoint had the old
        values.

        Raises:
            GramianError: for values out of range.
        """
        _check_kind(noise_multiplier, sample_rate)
        kind = (float(noise_multiplier), float(sample_rate))
        if self._history and self._history[-1][2] == 0:
            self._history.pop()
        if not self._history or self._history[-1][:2] != kind:
            self._history.append((*kind, 0))

    def set_steps(self, spent: int) -> None:
        """Set the number of steps to `spent`, if it is larger; new steps have the σ and sample rate recorded last.

        Raises:
            GramianError: if there are new steps and no σ and sample rate were recorded.
        """
        new = spent - self.steps
        if new <= 0:
            return
        if not self._history:
            raise GramianError(
                f"accounting: {new} steps of no kind; expected record(noise_multiplier, sample_rate) first"
            )
        noise_multiplier, sample_rate, steps = self._history[-1]
        self._history[-1] = (noise_multiplier, sample_rate, steps + new)

    def epsilon(self, delta: float, steps: int | None = None) -> float:
        """ε at δ in (0, 1) of the first `steps` steps; None: of all steps.

        It is 0 without steps, and infinite if a step had no noise, or too little for its tails to fit into δ. Cost: up to
        seconds for "prv" (an FFT of some 10⁶ points for each run of equal steps); results are cached.

        Raises:
            GramianError: for a δ out of range, or if the mechanism has no answer for it.
        """
        history = self.history if steps is None else _first(self.history, steps)
        return _epsilon(self.mechanism, history, _check_delta("delta", delta))

    def catch_up(self, about: Any) -> None:
        """Replace the history by that of `about`, a `state_dict` from a counter file, unless it has fewer steps.

        `about` None: do nothing.
        """
        if about is None:
            return
        later = Accounting(self.mechanism) if not self.approximate else object.__new__(Accounting)
        later.mechanism, later._history = self.mechanism, []
        later.load_state_dict(about)
        if later.steps >= self.steps:
            self._history = later._history

    def state_dict(self) -> dict[str, Any]:
        """{"mechanism": name, "history": list of (noise multiplier, sample rate, steps)}, in plain values."""
        return {"mechanism": self.mechanism, "history": [list(run) for run in self._history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by that of a state. The mechanism stays: any accountant can read a history.

        Raises:
            GramianError: if the state has no valid history.
        """
        history = state.get("history") if isinstance(state, Mapping) else None
        if not isinstance(history, list | tuple) or not all(map(_is_run, history)):
            raise GramianError(
                "accounting: the state has no history; expected (noise_multiplier, sample_rate, steps) of every run"
            )
        runs = [(float(sigma), float(rate), steps) for sigma, rate, steps in history]
        for sigma, rate, steps in runs:
            _check_kind(sigma, rate)
            if steps < 0:
                raise GramianError(f"accounting: {steps} steps in the history; expected at least 0")
        self._history = runs

    def __repr__(self) -> str:
        return f'Accounting("{self.mechanism}", {self.steps} steps)'


def find_noise_multiplier(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int, mechanism: str = "prv"
) -> float:
    """The noise multiplier σ with ε(σ) in (target_epsilon - 0.01, target_epsilon], by bisection.

    A target of hundreds may lie above the ε of the smallest σ whose tails fit into δ; the result is then that σ. Cost: some 10
    to 20 evaluations of ε.

    Raises:
        GramianError: for an argument out of range, or if the mechanism reaches the target with no σ up to 10⁶.
    """
    _check_mechanism(mechanism)
    _check_delta("target_delta", target_delta)
    _check_kind(1.0, sample_rate)
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise GramianError(f"target_epsilon: {target_epsilon}; expected a finite number of more than 0")
    if mechanism == "prv" and target_epsilon > PRV_SEARCH_LIMIT:
        raise GramianError(f"target_epsilon: {target_epsilon}; expected at most {PRV_SEARCH_LIMIT} with prv, or rdp")
    if steps < 1:
        raise GramianError(f"steps: {steps}; expected at least 1")
    if mechanism == "prv":
        _check_resolved("target_delta", target_delta, target_delta, steps)

    def epsilon(sigma: float) -> float:
        return _epsilon(mechanism, ((sigma, float(sample_rate), steps),), float(target_delta))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the small σ that are tried
        low, high = 0.0, 20.0
        while (spent := epsilon(high)) > target_epsilon:
            low, high = high, 2 * high
            if high > MOST_NOISE:
                raise GramianError(
                    f"accountant: {mechanism} has no answer for target_epsilon {target_epsilon} (it is {spent:.3g} at the "
                    f"noise_multiplier {low:.0f}); expected a larger target, or prv"
                )
        while target_epsilon - spent > TOLERANCE and high - low > 1e-6 * high:  # at the edge of the tails ε jumps
            middle = (low + high) / 2
            if (found := epsilon(middle)) < target_epsilon:
                high, spent = middle, found
            else:
                low = middle
    return high


def _check_resolved(field: str, delta: float, left: float, steps: int) -> None:
    """Raise a `GramianError` if δ is too small for PRV's Fourier transforms, whose ε would be rounding errors.

    `delta` is the user's δ under the name `field`; `left` what remains of it after the tails of the noise, which is compared.
    """
    least = max(PRV_LEAST_DELTA, PRV_LEAST_DELTA_OF_A_STEP * steps)
    if left < least:
        tails = f", and the noise's tails take {delta - left:.0e}" if left < delta else ""
        raise GramianError(
            f"accountant: prv has no answer for {field} {delta} (its digits end at {least:.0e} over {steps} steps{tails}); "
            "expected another delta, or rdp"
        )


def _left_for_normal_noise(history: History, delta: float) -> float:
    """The δ' at which the ε of normal noise equals, at δ, that of the bounded noise: δ = δ'/z + Σ_steps min(1, 2q)·δ₀(σ).

    A record takes part in a step with probability q, and δ₀ is what that costs (`tail_delta`) if the data set with the record
    is observed. If the data set without it is observed, its noise may lie where that of the other cannot: this has probability
    δ₀ in every step, and the ratio there is 1/(1 - q) at most, so that the excess is below min(1, q/(1 - q))·δ₀ ≤ 2q·δ₀. All
    densities inside the bound are divided by their mass z = (1 - 2⁻⁶⁴)^(pairs·steps).
    """
    tails = sum(min(1.0, 2 * rate) * steps * tail_delta(sigma) for sigma, rate, steps in history)
    return (delta - tails) * (1 - sum(steps for _, _, steps in history) * (MOST_ELEMENTS / 2) * TAIL_MASS)


def _is_run(run: Any) -> bool:
    """True for a run of the history: two numbers and an integer, none of them True or False."""
    if not isinstance(run, list | tuple) or len(run) != 3 or any(isinstance(value, bool) for value in run):
        return False
    return all(isinstance(value, int | float) for value in run[:2]) and isinstance(run[2], int)


def _first(history: History, steps: int) -> History:
    """The history cut to its first `steps` steps."""
    found: list[tuple[float, float, int]] = []
    for sigma, rate, count in history:
        if steps > 0:
            found.append((sigma, rate, min(count, steps)))
        steps -= count
    return tuple(found)


@lru_cache(maxsize=256)
def _epsilon(mechanism: str, history: History, delta: float) -> float:
    if not history:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in history):
        return math.inf
    if mechanism == "gdp" and len(history) > 1:
        raise GramianError(f"accountant: gdp over {len(history)} kinds of steps; expected one, or prv or rdp")
    left = _left_for_normal_noise(history, delta)
    if mechanism == "prv":
        _check_resolved("delta", delta, left if left > 0 else delta, sum(steps for _, _, steps in history))
    if left <= 0:
        warnings.warn(
            f"accountant: the noise's tails alone take more than delta {delta}; expected a larger noise_multiplier",
            stacklevel=3,
        )
        return math.inf
    if mechanism == "prv" and (bound := _epsilon("rdp", history, delta)) > PRV_LIMIT:
        warnings.warn(f"accountant: epsilon {bound:.0f} is the bound of rdp; expected less for prv", stacklevel=3)
        return bound

    def evaluate() -> float:
        from opacus.accountants import create_accountant

        accountant = create_accountant(mechanism)
        accountant.history = list(history)
        return max(0.0, float(accountant.get_epsilon(delta=left)))  # a δ near 1 would make it negative

    return _through_opacus(mechanism, f"delta {delta}", "another delta, or rdp", evaluate)


def _through_opacus(mechanism: str, what: str, instead: str, compute: Callable[[], float]) -> float:
    """The number that `compute()` gets from Opacus, without its warnings.

    The warnings of the import concern other parts of Opacus, that of the RDP orders says that the bound could be tighter, and
    that of GDP is given once, by `Accounting`.

    Raises:
        GramianError: if Opacus is missing, fails, or returns no finite number; in one line that names `what` and `instead`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = compute()
    except ImportError as reason:
        raise GramianError(f"accountant: {reason}; expected opacus installed") from None
    except (ArithmeticError, ValueError, RuntimeError, MemoryError) as reason:
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0].rstrip(".")
        raise GramianError(f"accountant: {mechanism} has no answer for {what} ({first}); expected {instead}") from None
    if not math.isfinite(value):
        raise GramianError(f"accountant: {mechanism} gives {value} for {what}; expected {instead}")
    return value


def _check_mechanism(mechanism: str) -> None:
    if mechanism not in MECHANISMS:
        raise GramianError(f'accountant: "{mechanism}"; expected one of {", ".join(MECHANISMS)}')


def _check_kind(noise_multiplier: float, sample_rate: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise GramianError(f"noise_multiplier: {noise_multiplier}; expected a finite number of at least 0")
    if not 0 < sample_rate <= 1:
        raise GramianError(f"sample_rate: {sample_rate}; expected a probability in (0, 1]")


def _check_delta(field: str, delta: float) -> float:
    if not isinstance(delta, int | float) or not 0 < delta < 1:
        raise GramianError(f"{field}: {delta}; expected a probability in (0, 1)")
    return float(delta)
