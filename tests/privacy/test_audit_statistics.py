"""The one-run lower bound on ε and the tests on releases, against sums written out and against simulations."""

import math

import numpy as np
import pytest

from gramian.privacy.audit.one_run_bound import best_lower_bound, epsilon_lower_bound, guessing_p_value
from gramian.privacy.audit.release_tests import participation_p_value, reuse_p_value, variance_p_value

pytestmark = pytest.mark.oracle


def tail(n: int, p: float, least: int) -> float:
    """P[Binomial(n, p) ≥ least], term by term."""
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(max(0, least), n + 1))


@pytest.mark.parametrize(("m", "r", "v"), [(50, 40, 31), (30, 30, 30), (20, 10, 0), (60, 7, 7)])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-3])
def test_the_p_value_is_the_sum_of_the_paper(m: int, r: int, v: int, delta: float) -> None:
    for epsilon in (0.0, 0.5, 3.0):
        p = math.exp(epsilon) / (1 + math.exp(epsilon))
        f = [tail(r, p, v - i) for i in range(m + 1)]
        given_away = max((f[i] - f[0]) / i for i in range(1, m + 1))
        wanted = min(1.0, f[0] + 2 * m * delta * given_away)
        assert guessing_p_value(m, r, v, epsilon, delta) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_randomized_response_exceeds_its_own_epsilon_as_rarely_as_the_confidence_says(epsilon: float) -> None:
    """Guesses of ε-private randomized response are right with probability e^ε/(1 + e^ε); every outcome is weighed."""
    r, significance = 60, 0.05
    p = 1 / (1 + math.exp(-epsilon))
    bounds = [epsilon_lower_bound(r, r, v, 0.0, significance) for v in range(r + 1)]
    chance = math.fsum(math.comb(r, v) * p**v * (1 - p) ** (r - v) for v in range(r + 1) if bounds[v] > epsilon)
    assert 0.2 * significance < chance <= significance  # and no bound that is merely careful
    assert bounds == sorted(bounds)


def test_a_mechanism_that_names_a_record_with_probability_delta_costs_delta_and_not_more() -> None:
    """Each canary is shown with probability δ and else nothing is told: (0, δ)-private, and the bound is 0."""
    generator, m, delta = np.random.default_rng(0), 1000, 1e-3
    found = []
    for _ in range(20):
        included = generator.random(m) < 0.5
        scores = np.where(generator.random(m) < delta, 10.0 * (2 * included - 1), generator.standard_normal(m))
        found.append(best_lower_bound(scores, included, (0.01, 0.1), delta, 1e-2)[0])
    assert max(found) == 0.0


def test_shares_pay_for_the_choice_of_the_best() -> None:
    included = np.arange(200) < 100
    scores = included.astype(np.float64)
    one = best_lower_bound(scores, included, (0.5,), 0.0, 1e-4)
    two = best_lower_bound(scores, included, (0.5, 0.1), 0.0, 1e-4)
    assert one == (epsilon_lower_bound(200, 200, 200, 0.0, 1e-4), 200, 200) and two[0] < one[0]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def test_p_values_of_normal_noise_are_uniform_or_larger() -> None:
    generator, variances, reuses = np.random.default_rng(1), [], []
    for _ in range(300):
        noise = generator.standard_normal((4, 3))  # so few places that normal tails would be wrong
        variances.append(variance_p_value(list(noise))[0])
        reuses.append(reuse_p_value(noise)[0])
    for values in (variances, reuses):
        for level in (0.01, 0.1, 0.5):
            assert np.mean(np.array(values) < level) <= level + 3 * math.sqrt(level / 300)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1])
def test_other_variance_in_one_group_of_many_is_seen(factor: float) -> None:
    noise = [normal(3000 + place) for place in range(20)]
    assert variance_p_value(noise)[0] > 1e-4
    p_value, variance = variance_p_value([*noise, factor * normal(4000)])
    assert p_value < 1e-4 and variance == pytest.approx(factor**2, rel=0.1)


def test_noise_used_again_is_seen_also_scaled_and_in_part() -> None:
    noise = normal(8, 400)
    assert reuse_p_value(noise)[0] > 1e-4
    assert reuse_p_value(np.vstack([noise, -2 * noise[3]])) == pytest.approx((0.0, -1.0), abs=1e-9)
    short = np.full((1, 400), np.nan)
    short[0, :100] = noise[5, :100]
    p_value, r = reuse_p_value(np.vstack([noise, short]))
    assert p_value < 1e-4 and r == pytest.approx(1.0)


def test_participation_is_exact_for_the_total_and_sees_other_samplers() -> None:
    generator, records, rate = np.random.default_rng(2), 500, 0.02

    def draws(rate: float) -> list[list[int]]:
        return [np.flatnonzero(generator.random(records) < rate).tolist() for _ in range(20)]

    assert min(participation_p_value(draws(rate), records, rate) for _ in range(50)) > 1e-4
    assert participation_p_value(draws(2 * rate), records, rate) < 1e-4
    assert (
        participation_p_value([generator.permutation(records)[:10].tolist() for _ in range(20)], records, rate) < 1e-4
    )
    one = draws(rate)[0]
    assert participation_p_value([one] * 20, records, rate) < 1e-4
    assert participation_p_value([[*draw, 7] if 7 not in draw else draw for draw in draws(rate)], records, rate) < 1e-4
    few = [list(range(5)), [5]]  # the total alone is unusual
    assert participation_p_value(few, 500, rate) == pytest.approx(4 * 2 * (1 - tail(1000, rate, 7)), rel=1e-6)
