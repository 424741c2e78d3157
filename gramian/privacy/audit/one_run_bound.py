r"""A lower bound on ε from guesses in one run (Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run").

m canaries are each included in the training data with probability ½, independently. Who sees everything that training releases
guesses for r of them, a number chosen beforehand, whether they were included, and v guesses are right. If training is
(ε, δ)-private, then

    P[v or more right] ≤ f(v) + 2mδ · max_{i ≥ 1} (f(v − i) − f(v)) / i,    f(x) = P[Binomial(r, e^ε/(1 + e^ε)) ≥ x]

The first term: with δ = 0 the odds of a single canary, given the release and the other canaries, are at most e^ε, so that
right guesses are no more frequent than heads among r tosses of a coin with that bias. The second: a release may give canaries
away with a probability that adds up to 2mδ over all of them; giving i away at once uses up i times as much. An ε for which the
right-hand side is below 1 − confidence is refuted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STEPS, MOST = (0.2, 0.01), 30.0
"""Spacings of the ε that are tried in turn, coarse and then fine, and the largest ε that is tried."""


def guessing_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Largest probability of `right` or more right guesses if training is (ε, δ)-private: the formula above. Cost: O(right)."""
    from scipy.stats import binom

    bias = 1 / (1 + np.exp(-epsilon))
    above = float(binom.sf(right - 1, guesses, bias))
    if right == 0:
        return min(1.0, above)
    below_V = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, bias))  # f(v − i) − f(v), i = 1 … v
    given_away = float((below_V / np.arange(1, right + 1)).max())
    return min(1.0, above + 2 * canaries * delta * given_away)


def epsilon_lower_bound(canaries: int, guesses: int, right: int, delta: float, significance: float) -> float:
    """Largest ε up to which (ε, δ) is refuted at `significance` (1 − confidence), rounded down to 0.01; 0: none is."""
    refuted = 0.0
    for step in STEPS:
        while refuted < MOST and guessing_p_value(canaries, guesses, right, refuted + step, delta) < significance:
            refuted += step
    return round(refuted, 2)


def best_lower_bound(
    scores_M: NDArray[np.float64],
    included_M: NDArray[np.bool_],
    shares: Sequence[float],
    delta: float,
    significance: float,
) -> tuple[float, int, int]:
    """Lower bound on ε from the scores of m canaries: the best of several numbers of guesses, paid for by a union bound.

    For each of `shares`, the canaries with the highest scores, that share of all, are guessed to be included, and as many with
    the lowest not to be; for the others there is no guess.

    Returns:
        (lower bound on ε, guesses made, right guesses), with confidence 1 − `significance` whichever share is best.
    """
    order, count = np.argsort(scores_M), len(scores_M)
    found = []
    for share in shares:
        k = max(1, int(share * count))
        right = int(included_M[order[-k:]].sum() + (~included_M[order[:k]]).sum())
        bound = epsilon_lower_bound(count, 2 * k, right, delta, significance / len(shares))
        found.append((bound, 2 * k, right))
    return max(found)
