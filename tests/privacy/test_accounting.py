"""Accounting: Opacus' own numbers, held against dp-accounting; steps by the high-water mark."""

import math
import sys
import warnings

import numpy as np
import pytest
from scipy import integrate
from scipy.optimize import brentq
from scipy.stats import norm

from gramian.privacy.accounting import epsilon as accountant
from gramian.privacy.accounting.accountant import Accounting
from gramian.privacy.accounting.noise_search import find_noise_multiplier
from gramian.privacy.noise.element_noise import TAIL_RADIUS, tail_delta
from gramian.privacy.noise.secrets import ReleaseCounter
from tests.kit.fresh import run_fresh
from tests.kit.refusals import refusal

HISTORIES = {
    "one kind": [(1.0, 0.01, 500)],
    "two kinds": [(1.1, 0.02, 100), (0.8, 0.01, 200)],
    "whole batch": [(8.0, 1.0, 20)],
    "one step": [(0.9, 0.05, 1)],
}
DELTA = 1e-5


def full(case):
    """A case of the full run alone."""
    return pytest.param(case, marks=pytest.mark.full)


def account(history, mechanism="prv"):
    """Through record and set_steps, as the engine does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Accounting(mechanism)
    total = 0
    for sigma, rate, steps in history:
        made.record(sigma, rate)
        total += steps
        made.set_steps(total)
    return made


@pytest.mark.parametrize("mechanism", ["prv", "rdp", "gdp"])
@pytest.mark.parametrize("case", HISTORIES)
def test_epsilon_is_the_one_of_opacus_for_the_same_steps(case, mechanism):
    """At a δ that is smaller by the tails of the noise: 1e-10 here, and up to 3e-8 of it for each step."""
    from opacus.accountants import create_accountant

    history = HISTORIES[case]
    if mechanism == "gdp" and len(history) > 1:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = create_accountant(mechanism)
        for sigma, rate, steps in history:
            for _ in range(steps):
                peer.step(noise_multiplier=sigma, sample_rate=rate)
        want = peer.get_epsilon(delta=DELTA)
    assert want <= account(history, mechanism).epsilon(DELTA) <= want * (1 + 1e-4)


@pytest.mark.parametrize("case", ["whole batch", *map(full, ("two kinds", "one kind", "one step"))])
def test_bounds_hold_the_epsilon_of_dp_accounting(case):
    """PLD of dp-accounting is pessimistic by its grid alone, 1e-4 here and 1e-3 in ours; PRV adds its eps_error of 0.01."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    peer = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4)
    for sigma, rate, steps in HISTORIES[case]:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        peer.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    exact = peer.get_epsilon(DELTA)
    assert exact - 0.005 <= account(HISTORIES[case], "prv").epsilon(DELTA) <= exact + 0.025
    assert exact * (1 - 1e-4) <= account(HISTORIES[case], "pld").epsilon(DELTA) <= exact * (1 + 5e-3)
    assert account(HISTORIES[case], "rdp").epsilon(DELTA) >= exact


PUBLISHED = [
    # JAX-Privacy, jax_privacy/accounting/analysis_test.py: batches of 1024 from 50,000 records, 10,000 updates
    ((4.0, 1024 / 50_000, 10_000), "rdp", 2.27535, 1e-3),
    ((4.0, 1024 / 50_000, 10_000), "pld", 2.09245, 2e-3),
    ((4.0, 1024 / 50_000, 10_000), "prv", 2.09245 + 0.01, 2e-3),
]


@pytest.mark.parametrize("run, mechanism, want, tolerance", PUBLISHED)
def test_epsilon_is_the_one_that_was_published(run, mechanism, want, tolerance):
    made = Accounting(mechanism)
    made.load_state_dict({"history": [run]})
    assert made.epsilon(DELTA) == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("mechanism", ["pld", "prv", "rdp"])
def test_the_moments_accountant_of_dp_sgd_is_not_exceeded(mechanism):
    """Abadi et al. 2016, section 3.2: q = 0.01, σ = 4, 10,000 steps, δ = 1e-5 give ε ≈ 1.26."""
    assert 0.94 < account([(4.0, 0.01, 10_000)], mechanism).epsilon(DELTA) < 1.26


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (10.0, 100), pytest.param(100.0, 10_000, marks=pytest.mark.full)])
def test_pld_bounds_the_exact_epsilon_of_the_gaussian_down_to_its_smallest_delta(sigma, steps):
    """Balle and Wang 2018: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = √steps/σ; sample rate 1."""

    def excess(eps, delta, mu):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)) - delta

    for delta in (1e-5, 1e-9, 2e-11 if steps < 1000 else 2e-10):
        exact = brentq(excess, 0, 100, args=(delta, steps**0.5 / sigma))
        assert exact <= account([(sigma, 1.0, steps)], "pld").epsilon(delta) <= exact * 1.01


def test_gdp_says_that_it_is_an_approximation():
    with pytest.warns(UserWarning, match="^accountant: gdp is an approximation .*; expected prv or rdp"):
        made = Accounting("gdp")
    assert made.approximate and not Accounting("prv").approximate and not Accounting("rdp").approximate
    history = HISTORIES["one kind"]
    assert account(history, "gdp").epsilon(DELTA) < account(history, "prv").epsilon(DELTA), "it does understate here"


@pytest.mark.full
@pytest.mark.xdist_group("fresh")
def test_opacus_is_loaded_on_first_use_and_its_other_warnings_are_left_out():
    """In a process of its own, for the import; a small budget hits the largest order of RDP."""
    code = """
import sys, warnings
warnings.simplefilter("error")
from gramian.privacy.accounting.accountant import Accounting
assert "opacus" not in sys.modules
for mechanism in ("prv", "rdp"):
    a = Accounting(mechanism)
    a.record(20.0, 0.01)
    a.set_steps(2)
    assert 0 < a.epsilon(1e-5) < 1
print("quiet")
"""
    done = run_fresh(code)
    assert (done.stdout.strip(), done.stderr) == ("quiet", "")


@pytest.mark.parametrize("mechanism", ["prv", full("pld"), "rdp", "gdp"])
def test_epsilon_grows_with_steps_and_falls_with_noise(mechanism):
    by_steps = [account([(1.0, 0.02, n)], mechanism).epsilon(DELTA) for n in (1, 10, 100, 1000)]
    assert by_steps == sorted(set(by_steps)) and by_steps[0] > 0
    by_noise = [account([(s, 0.02, 100)], mechanism).epsilon(DELTA) for s in (0.6, 1.0, 3.0)]
    assert by_noise == sorted(set(by_noise), reverse=True)


def test_epsilon_is_never_negative():
    assert account([(9.0, 0.1, 1)], "rdp").epsilon(0.5) == 0


def test_nothing_spent_is_zero_and_no_noise_is_infinite():
    made = Accounting()
    assert made.epsilon(DELTA) == 0
    made.record(0.0, 0.1)
    assert made.epsilon(DELTA) == 0, "a kind without steps"
    made.set_steps(1)
    assert made.epsilon(DELTA) == math.inf
    made.record(5.0, 0.1)
    made.set_steps(2)
    assert made.epsilon(DELTA) == math.inf, "also with noise afterwards"


def test_steps_of_one_kind_merge_and_a_kind_without_steps_leaves_no_trace():
    made = Accounting()
    for mark, kind in enumerate([(1.0, 0.1), (1.0, 0.1), (2.0, 0.1), (2.0, 0.2), (2.0, 0.2)], start=1):
        made.record(3.0, 0.5)
        made.record(*kind)
        made.set_steps(mark)
    assert made.history == ((1.0, 0.1, 2), (2.0, 0.1, 1), (2.0, 0.2, 2)) and made.steps == 5


def test_a_replay_counts_once_and_a_lower_mark_refunds_nothing():
    counter, made = ReleaseCounter(), Accounting()
    made.record(1.0, 0.1)

    def run(steps):
        for _ in range(steps):
            counter.begin()
            made.set_steps(counter.spent)

    run(5)
    counter.restore(2, replay=True)
    run(3)
    assert made.steps == 5
    counter.restore(2, replay=False)
    run(1)
    assert made.steps == 6
    made.set_steps(0)
    assert made.steps == 6


def test_releases_begun_after_the_checkpoint_are_of_the_old_kind():
    made = account([(1.0, 0.1, 3)])
    resumed = Accounting()
    resumed.load_state_dict(made.state_dict())
    resumed.set_steps(7)  # the file beside the checkpoint says 7
    resumed.record(4.0, 0.1)
    resumed.set_steps(8)
    assert resumed.history == ((1.0, 0.1, 7), (4.0, 0.1, 1))


def test_a_state_is_plain_and_comes_back(tmp_path):
    import torch

    made = account(HISTORIES["two kinds"])
    made.record(2.0, 0.5)  # in force, no step yet
    torch.save(made.state_dict(), tmp_path / "a.pt")
    again = Accounting("rdp")
    again.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert again.history == made.history and again.mechanism == "rdp"
    again.set_steps(301)
    assert again.history[-1] == (2.0, 0.5, 1)
    assert made.steps == 300, "the state is a copy"


def test_the_divergence_of_a_step_is_computed_once_for_all_numbers_of_them(monkeypatch):
    first, later = (account([(1.234, 0.01, steps)], "rdp") for steps in (10, 30))
    assert first.epsilon(DELTA) > 0
    monkeypatch.delattr("opacus.accountants.analysis.rdp._compute_rdp")
    assert later.epsilon(DELTA) > first.epsilon(DELTA)


def searched(mechanism, target, rate, steps):
    """The noise found, and ε of the target that it reaches by the accountant itself."""
    sigma = find_noise_multiplier(target, DELTA, rate, steps, mechanism)
    return sigma, account([(sigma, rate, steps)], mechanism).epsilon(DELTA) / target


@pytest.mark.parametrize("target", [0.05, *map(full, (0.1, 0.2, 0.5, 1.0, 3.0, 8.0, 20.0))])
@pytest.mark.parametrize("rate, steps", [(0.02, 200), pytest.param(0.001, 10_000, marks=pytest.mark.full)])
def test_the_noise_found_spends_the_target_whether_small_or_large(target, rate, steps):
    """By its own measure each accountant reaches 0.995 of it; by an independent fine grid "prv" and "pld" reach 0.975."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    for mechanism in ("prv", "pld", "rdp"):
        sigma, reached = searched(mechanism, target, rate, steps)
        assert 0.98 <= reached <= 1
        if mechanism == "rdp":
            continue
        grid = min(3e-4, 0.05 * rate * math.sqrt(math.expm1(sigma**-2)))
        peer = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        peer.compose(dp_accounting.SelfComposedDpEvent(event, steps))
        assert 0.975 * target <= peer.get_epsilon(DELTA) <= target


@pytest.mark.parametrize(
    "mechanism, target", [("prv", 1.0), ("rdp", 3.0), pytest.param("gdp", 1.0, marks=pytest.mark.full)]
)
def test_no_more_noise_is_found_than_by_opacus(mechanism, target):
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sigma, reached = searched(mechanism, target, 0.02, 200)
        want = get_noise_multiplier(
            target_epsilon=target,
            target_delta=DELTA,
            sample_rate=0.02,
            steps=200,
            accountant=mechanism,
            epsilon_tolerance=0.005 * target,
        )
    assert 0.995 <= reached <= 1 and sigma == pytest.approx(want, rel=0.005)


def test_no_privacy_to_speak_of_is_answered_by_the_bound_of_rdp():
    """The grid of PRV would take all memory."""
    history = [(0.3, 1.0, 100)]
    with pytest.warns(UserWarning, match="is the bound of rdp; expected"):
        got = account(history).epsilon(3e-5)
    assert got == account(history, "rdp").epsilon(3e-5) > accountant.GRID_LIMIT


def crescent(shift, radius):
    """P(|z| ≤ R, |z + a| > R) of a pair of normal numbers, by quadrature over the circle of directions and the radius."""

    def outside(r):
        edge = np.clip((radius**2 - r**2 - shift**2) / (2 * r * shift), -1, 1)
        return r * np.exp(-(r**2) / 2) * np.arccos(edge) / np.pi

    low = max(0.0, radius - shift)
    return integrate.quad(outside, low, radius, epsabs=0, epsrel=1e-6)[0]


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 4.0])
def test_the_tails_bound_the_mass_that_a_record_pushes_out_of_the_noise(sigma):
    """However its shift is spread over pairs: all in one, evenly over n of them, or half in one and half over n."""
    masses = []
    for n in (1, 2, 100, 10**6, 2**39):
        for first in (0.0, 0.5, 0.9) if n > 1 else (1.0,):
            rest = ((1 - first**2) / max(n - 1, 1)) ** 0.5 / sigma
            parts = [(1, first / sigma), (n - 1, rest)]
            masses.append(sum(count * crescent(a, TAIL_RADIUS) for count, a in parts if count and a))
    assert 0 < max(masses) <= tail_delta(sigma) < 30 * max(masses)


def bounded_delta(sigma, rate, epsilon, radius):
    """δ(ε) of one step on one pair with noise cut off at `radius`, both ways, by sums over a fine grid of the plane."""
    shift = 1 / sigma
    axis = np.arange(-radius - shift, radius + shift, 0.02) + 0.01
    x, y = axis[:, None], axis[None, :]

    def density(centre):
        square = (x - centre) ** 2 + y**2
        return np.where(square <= radius**2, np.exp(-square / 2), 0.0)

    without, present = density(0.0), density(shift)
    without, present = without / without.sum(), present / present.sum()
    with_record = (1 - rate) * without + rate * present
    grown = np.exp(epsilon)
    return max(np.maximum(with_record - grown * without, 0).sum(), np.maximum(without - grown * with_record, 0).sum())


@pytest.mark.parametrize("sigma, rate", [(1.0, 1.0), (1.0, 0.1), (0.7, 0.6), (3.0, 0.9)])
def test_delta_with_the_tails_is_valid_for_noise_that_is_cut_off(sigma, rate, monkeypatch):
    """Against the noise itself on a grid, with a radius of 4 that makes the tails large; without them ε would be too small."""
    from gramian.privacy.noise import element_noise

    monkeypatch.setattr(element_noise, "TAIL_RADIUS", 4.0)
    monkeypatch.setattr(element_noise, "TAIL_MASS", math.exp(-8.0))
    monkeypatch.setattr(element_noise, "MOST_ELEMENTS", 2)
    monkeypatch.setattr(accountant, "TAIL_MASS", math.exp(-8.0))
    monkeypatch.setattr(accountant, "MOST_ELEMENTS", 2)
    too_small = False
    for epsilon in (0.5, 1.0, 2.0, 4.0):
        exact = bounded_delta(sigma, rate, epsilon, 4.0)
        normal = bounded_delta(sigma, rate, epsilon, 9.0)
        allowed = brentq(lambda d: accountant.left_for_normal_noise(((sigma, rate, 1),), d) - normal, 0, 1)  # noqa: B023
        assert exact <= allowed
        too_small |= exact > normal * 1.01
    assert too_small


def test_noise_whose_tails_do_not_fit_into_delta_has_no_epsilon():
    """The radius of 32 bits had a floor of 1.9e-5 here."""
    assert math.isfinite(account([(0.5, 0.01, 2000)], "rdp").epsilon(1e-5))
    for sigma in (0.05, 0.2):
        with pytest.warns(UserWarning, match="^accountant: the noise's tails alone take more than delta .*; expected"):
            assert account([(sigma, 0.5, 100)], "rdp").epsilon(3e-5) == math.inf


def test_a_search_stops_where_the_tails_still_fit_into_delta():
    sigma = find_noise_multiplier(2000.0, 1e-9, 1.0, 1, "rdp")
    assert account([(sigma, 1.0, 1)], "rdp").epsilon(1e-9) <= 2000
    assert tail_delta(sigma) < 1e-9


def test_the_same_question_is_answered_once(monkeypatch):
    import opacus.accountants

    account([(1.0, 0.01, 77)], "rdp").epsilon(DELTA)
    monkeypatch.setattr(opacus.accountants, "RDPAccountant", None)
    assert account([(1.0, 0.01, 77)], "rdp").epsilon(DELTA) > 0


def two_kinds_of_gdp():
    account(HISTORIES["two kinds"], "gdp").epsilon(DELTA)


@pytest.mark.parametrize(
    "message, call",
    [
        ('accountant: "moments"; expected one of prv, pld, rdp, gdp', lambda: Accounting("moments")),
        ("accountant: gdp over 2 kinds of steps; expected", two_kinds_of_gdp),
        ("noise_multiplier: -1; expected", lambda: Accounting().record(-1, 0.1)),
        ("noise_multiplier: nan; expected", lambda: Accounting().record(math.nan, 0.1)),
        ("noise_multiplier: inf; expected", lambda: Accounting().record(math.inf, 0.1)),
        ("sample_rate: 0; expected", lambda: Accounting().record(1, 0)),
        ("sample_rate: 1.5; expected", lambda: Accounting().record(1, 1.5)),
        ("accounting: 3 steps of no kind; expected", lambda: Accounting().set_steps(3)),
        ("delta: 0; expected", lambda: Accounting().epsilon(0)),
        ("delta: 1; expected", lambda: Accounting().epsilon(1)),
        ("accounting: .*; expected", lambda: Accounting().load_state_dict({})),
        ("accounting: .*; expected", lambda: Accounting().load_state_dict({"history": [[1.0, 0.1]]})),
        ("accounting: -1 steps .*; expected", lambda: Accounting().load_state_dict({"history": [[1.0, 0.1, -1]]})),
        ("sample_rate: 7.0; expected", lambda: Accounting().load_state_dict({"history": [[1.0, 7, 1]]})),
        (
            "accountant: prv has no answer for delta 1e-15 .*; expected",
            lambda: account([(1.0, 0.01, 500)]).epsilon(1e-15),
        ),
        ("target_epsilon: 0; expected", lambda: find_noise_multiplier(0, DELTA, 0.1, 10)),
        ("target_epsilon: 60; expected at most 50.0 with prv", lambda: find_noise_multiplier(60, DELTA, 0.1, 10)),
        ("target_delta: 2; expected", lambda: find_noise_multiplier(1, 2, 0.1, 10)),
        ("sample_rate: 0; expected", lambda: find_noise_multiplier(1, DELTA, 0, 10)),
        ("steps: 0; expected", lambda: find_noise_multiplier(1, DELTA, 0.1, 0)),
        (
            "accountant: rdp has no answer for target_epsilon 0.001 .*; expected a larger target, prv or pld",
            lambda: find_noise_multiplier(0.001, DELTA, 0.1, 10, "rdp"),
        ),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(message, call):
    with refusal(f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)


def test_without_opacus_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with refusal("^accountant: .*; expected opacus installed"):
        account([(1.0, 0.01, 78)], "rdp").epsilon(DELTA)
