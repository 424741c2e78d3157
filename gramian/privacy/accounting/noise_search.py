"""The least noise with which a number of steps stays within a target ε."""

import math
import warnings
from collections.abc import Callable

from gramian.core.errors import GramianError
from gramian.privacy.accounting.accountant import Accounting, check_delta
from gramian.privacy.accounting.epsilon import check_resolved

SEARCH_LIMIT = 50.0
"""Largest target ε of a search for σ with "prv" and "pld": evaluations take longer the larger ε is."""

MOST_NOISE, TOLERANCE = 1e6, 0.005
"""Largest σ that a search tries; largest share of the target ε by which the ε found may lie below it."""


def find_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    mechanism: str = "prv",
    rest: tuple[int | str, ...] = (),
) -> float:
    """The noise multiplier σ with ε(σ) in (0.995·target_epsilon, target_epsilon].

    `rest`: (records, largest draw) of truncated Poisson draws, or (name, bands, groups) of correlated noise. A target of
    hundreds may lie above the ε of the smallest σ whose tails fit into δ; the result is then that σ. Cost: 3 to 5 evaluations
    of ε, since log ε is nearly linear in log σ.

    Raises:
        GramianError: for an argument out of range, or if the mechanism reaches the target with no σ up to 10⁶.
    """
    check_delta("target_delta", target_delta)
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise GramianError(f"target_epsilon: {target_epsilon}; expected a finite number of more than 0")
    grid = mechanism in ("prv", "pld")
    if grid and target_epsilon > SEARCH_LIMIT:
        raise GramianError(
            f"target_epsilon: {target_epsilon}; expected at most {SEARCH_LIMIT} with {mechanism}, or rdp"
        )
    if steps < 1:
        raise GramianError(f"steps: {steps}; expected at least 1")
    if grid:
        check_resolved(mechanism, "target_delta", target_delta, target_delta, steps)

    def spent(mechanism: str, *rest: int | str) -> Callable[[float], float]:
        def excess(log_sigma: float) -> float:
            accounting = Accounting(mechanism)
            accounting.record(math.exp(log_sigma), sample_rate, *rest)
            epsilon = accounting.epsilon(target_delta, further=steps)
            return math.log(epsilon / target_epsilon) if epsilon > 0 else -math.inf

        return excess

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the small σ that are tried
        start = math.log(2.0)
        if grid:
            near = rest if len(rest) == 3 else ()  # rdp has no bound for truncated draws
            start = _root(spent("rdp", *near), start, 0.1, "rdp", target_epsilon) - 0.1  # cheap, and near
        return math.exp(_root(spent(mechanism, *rest), start, TOLERANCE, mechanism, target_epsilon))


def _root(excess: Callable[[float], float], start: float, tolerance: float, mechanism: str, target: float) -> float:
    """x with excess(x) in (log(1 - tolerance), 0] of a falling function, by regula falsi (Illinois) from `start`.

    Where an end of the bracket is infinite, or ε jumps, the bracket is halved.
    """
    least = math.log1p(-tolerance)
    low = high = start
    lower = upper = excess(start)
    width = 0.2
    while upper > 0:
        low, lower = high, upper
        high, width = high + width, 2 * width
        if high > math.log(MOST_NOISE):
            raise GramianError(
                f"accountant: {mechanism} has no answer for target_epsilon {target:g} (it is {target * math.exp(lower):.3g} at "
                f"the noise_multiplier {math.exp(low):.0f}); expected a larger target, prv or pld"
            )
        upper = excess(high)
    while lower <= 0:
        if lower > least:
            return low
        high, upper = low, lower
        low, width = low - width, 2 * width
        lower = excess(low)
    found, moved = upper, 0
    lower, upper = lower - least / 2, upper - least / 2  # aimed at the middle of what is accepted
    while found <= least and high - low > 1e-7:
        x = (low + high) / 2
        if math.isfinite(lower) and math.isfinite(upper):
            x = min(
                max((low * upper - high * lower) / (upper - lower), 0.98 * low + 0.02 * high), 0.02 * low + 0.98 * high
            )
        value = excess(x)
        if value > 0:
            low, lower, upper, moved = x, value - least / 2, upper / 2 if moved < 0 else upper, -1
        else:
            high, upper, lower, moved, found = x, value - least / 2, lower / 2 if moved > 0 else lower, 1, value
    return high
