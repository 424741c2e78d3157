"""Truncated Poisson draws: at most K records over all ranks, a random subset, accounted by "pld" as what they are."""

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import norm

import gramian
from gramian.privacy.accounting.epsilon import epsilon_of
from gramian.privacy.sampling.poisson import PoissonBatchSampler, draw
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import EXPECTED, RECORDS, drawn_steps, flat_of, poisson_run, seeded_engine
from tests.statistics.problems import problem

pytestmark = pytest.mark.few_proofs
KEY = bytes(range(32))
DELTA = 1e-5


def test_a_larger_draw_is_cut_to_a_random_subset_and_a_smaller_one_stays():
    size, draws, rate, most = 60, 3000, 0.2, 10
    taken = np.zeros((draws, size))
    for number in range(draws):
        whole, cut = draw(KEY, number, size, rate), draw(KEY, number, size, rate, most)
        assert len(cut) == min(len(whole), most) and set(cut) <= set(whole) and np.all(np.diff(cut) > 0)
        assert len(whole) > most or np.array_equal(whole, cut)
        taken[number, cut] = len(whole) > most
    rows = taken[taken.any(1)]
    share, pairs = most / size, most * (most - 1) / (size * (size - 1))
    count = len(rows)
    assert abs(rows.mean(0) - share).max() < 6 * (share * (1 - share) / count) ** 0.5, "each record alike"
    together = (rows.T @ rows)[np.triu_indices(size, 1)] / count
    assert abs(together - pairs).max() < 6 * (pairs / count) ** 0.5, "each pair alike"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_together_have_at_most_k_records_and_the_same_for_any_number(world):
    for number in range(40):
        found = []
        for rank in range(world):
            sampler = PoissonBatchSampler(
                KEY, 50, 0.3, 1, rank=rank, world_size=world, max_physical_batch=2, max_draw=12
            )
            found += [index for piece in sampler.pieces_of(number) for index in piece.indices]
        assert sorted(found) == draw(KEY, number, 50, 0.3, 12).tolist() and len(found) <= 12


def exact_delta(values, sigma, rate, most, epsilon):
    """δ(ε) of one step between `values` and the same without the first, both ways, by sums over a grid of the line."""
    line = np.arange(-len(values) - 9 * sigma, len(values) + 9 * sigma, 0.01)

    def density(values):
        total = np.zeros_like(line)
        for chosen in itertools.product([0, 1], repeat=len(values)):
            weight = np.prod([rate if c else 1 - rate for c in chosen])
            picked = [v for v, c in zip(values, chosen, strict=True) if c]
            subsets = list(itertools.combinations(picked, min(most, len(picked))))
            for subset in subsets:
                total += weight / len(subsets) * norm.pdf(line, sum(subset), sigma)
        return total

    one, other = density(values), density(values[1:])
    grown = np.exp(epsilon)
    return 0.01 * max(np.maximum(one - grown * other, 0).sum(), np.maximum(other - grown * one, 0).sum())


@pytest.mark.parametrize(
    "rate, most", [(0.5, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((0.9, 2), (0.3, 1), (1.0, 2)))]
)
def test_epsilon_bounds_the_mechanism_itself_and_that_of_poisson_draws_does_not(rate, most):
    """Four records whose gradients are 1 or -1: the first may take the place of one of opposite sign."""
    sigma, understated = 1.0, False
    for delta in (1e-1, 1e-2, 1e-3):
        bound = epsilon_of("pld", ((sigma, rate, 1, 3, most),), delta)
        plain = epsilon_of("pld", ((sigma, rate, 1),), delta)
        for others in itertools.combinations_with_replacement([1, -1], 3):
            assert exact_delta([1, *others], sigma, rate, most, bound) <= delta
            understated |= exact_delta([1, *others], sigma, rate, most, plain) > delta * 1.01
    assert understated


def test_epsilon_lies_between_those_of_poisson_draws_and_of_fixed_batches():
    """Bounds that JAX-Privacy publishes (analysis_test.py, calibrate_test.py): 1024 expected of 50,000 records."""
    most = {1056: 4.50055, 2048: 2.0955}
    found = [epsilon_of("pld", ((4.0, 1024 / 50_000, 10_000, 49_999, k),), DELTA) for k in most]
    assert 2.09245 < found[1] < found[0] < 4.50055 and found[1] == pytest.approx(2.09245, rel=2e-3)


def test_a_truncated_run_counts_draws_of_its_kind_and_its_state_comes_back():
    p = problem("mlp", RECORDS)
    model, engine = p.model(), seeded_engine(accountant="pld")
    options = {"engine": engine, "noise_multiplier": 1.0, "poisson_sampling": "truncated", "max_draw": EXPECTED}
    with poisson_run(p, model, 1.0, **options, max_physical_batch=4) as run:
        drawn = [len(ids) for ids in drawn_steps(run, p, 6)]
        assert max(drawn) == EXPECTED
        kind = (1.0, EXPECTED / RECORDS, 6, RECORDS, EXPECTED)
        assert engine.accountant.history == (kind,)
        saved, at = copy.deepcopy(engine.state_dict()), copy.deepcopy(model)
        list(drawn_steps(run, p, 2))
    assert engine.get_epsilon(DELTA) > epsilon_of("pld", ((1.0, EXPECTED / RECORDS, 8),), DELTA)
    again = gramian.PrivacyEngine("pld", insecure_reproducible=True, seed=9)
    again.load_state_dict(saved, replay=True)
    with poisson_run(p, at, 1.0, **{**options, "engine": again}, max_physical_batch=4) as run:
        list(drawn_steps(run, p, 2))
    assert torch.equal(flat_of(at), flat_of(model)) and again.accountant.history == engine.accountant.history


@pytest.mark.full
def test_the_noise_for_a_target_is_that_of_truncated_draws():
    p = problem("mlp", RECORDS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*p.batch), batch_size=EXPECTED)
    found = []
    for options in ({}, {"poisson_sampling": "truncated", "max_draw": EXPECTED}):
        engine, model = seeded_engine(accountant="pld"), p.model()
        engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            target_epsilon=2.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0, loss_reduction="sum", **options,
        )  # fmt: skip
        found.append(engine.noise_multiplier)
        engine.detach()
    assert found[1] > 1.2 * found[0]


@pytest.mark.parametrize(
    "message, accountant, options",
    [
        ('poisson_sampling: "truncated" has no bound in prv; expected', "prv", {"max_draw": 3}),
        ("max_draw: is None with poisson_sampling='truncated'; expected", "pld", {}),
        ("max_draw: expected a number of samples or None, got 0", "pld", {"max_draw": 0}),
        ("max_draw: is 3 with poisson_sampling=True; expected", "pld", {"max_draw": 3, "poisson_sampling": True}),
        ('poisson_sampling: expected True, False or "truncated", got', "pld", {"poisson_sampling": "cut"}),
    ],
)
def test_what_does_not_fit_is_refused(message, accountant, options):
    p = problem("mlp", RECORDS)
    given = {"poisson_sampling": "truncated", **options}
    with refusal(f"^{message}"), poisson_run(p, p.model(), 1.0, engine=seeded_engine(accountant=accountant), **given):
        pass
