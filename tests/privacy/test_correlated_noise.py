"""Noise that is correlated over releases: what is added, as a matrix over the releases, against dense matrices in float64."""

import copy
import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import gramian
from gramian.core.byte_amounts import format_bytes
from gramian.integrations.trainer_privacy import TrainerPrivacy
from gramian.kernels import chacha
from gramian.privacy.accounting.accountant import Accounting
from gramian.privacy.accounting.epsilon import epsilon_of, plain_run
from gramian.privacy.noise import noise_strategy
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noise_strategy import NoiseStrategy, kind_of
from gramian.privacy.sampling.cyclic import Groups
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import EXPECTED, RECORDS, drawn_steps, flat_of, poisson_run, seeded_engine
from tests.statistics.problems import problem

pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore:state. steps begun")]
KEY = bytes(range(32))
DELTA = 1e-5
STRATEGIES = [("bandmf", 1), ("bandmf", 2), ("bandmf", 4), ("bisr", 1), ("bisr", 3), ("bisr", 6)]
T = 9
strategies = pytest.mark.parametrize("name, bands", STRATEGIES)


def dense(first_column: np.ndarray) -> np.ndarray:
    """The lower triangular Toeplitz matrix with this first column."""
    size = len(first_column)
    return np.array([[first_column[i - j] if i >= j else 0.0 for j in range(size)] for i in range(size)])


def strategy_matrix(name: str, bands: int, releases: int = T) -> np.ndarray:
    """C of a strategy, as a dense matrix; of "bisr" by inversion of its banded inverse."""
    strategy = NoiseStrategy.of(name, bands, releases)
    band = np.zeros(releases)
    band[: min(bands, releases)] = strategy.coefficients[:releases]
    return dense(band) if name == "bandmf" else np.linalg.inv(dense(band))


# ---- strategies --------------------------------------------------------------------------------------------------------


@strategies
def test_columns_inverses_and_errors_are_those_of_dense_matrices(name: str, bands: int) -> None:
    strategy, c_TT = NoiseStrategy.of(name, bands, T), strategy_matrix(name, bands)
    np.testing.assert_allclose(dense(strategy.column(T)), c_TT, atol=1e-12)
    np.testing.assert_allclose(dense(strategy.inverse(T)), np.linalg.inv(c_TT), atol=1e-12)
    b_TT = np.tril(np.ones((T, T))) @ np.linalg.inv(c_TT)
    assert strategy.error(T) == pytest.approx(math.sqrt(np.square(b_TT).sum() / T), rel=1e-12)
    if name == "bandmf":
        assert np.linalg.norm(c_TT, axis=0).max() == pytest.approx(1, abs=1e-15)


def test_coefficients_and_errors_are_the_published_ones() -> None:
    """Roots of A: 1, 1/2, 3/8, 5/16 and 1, -1/2, -1/8, -1/16, -5/128 (Fichtenberger et al. 2022, Kalinin et al. 2025).

    With all T bands C is the root of A, whose last prefix sum has the published optimum Σ_i r_i² of the largest error over
    one participation, and as much again from the sensitivity (Dvijotham et al. 2024); with two, y = z_t - z_{t-1}/2.
    """
    assert NoiseStrategy.of("bisr", 5).coefficients == (1, -1 / 2, -1 / 8, -1 / 16, -5 / 128)
    root = NoiseStrategy.of("bisr", T)
    np.testing.assert_allclose(root.column(4), [1, 1 / 2, 3 / 8, 5 / 16], rtol=1e-15)
    last = np.square(np.cumsum(root.inverse(T))).sum()
    roots = sum((math.comb(2 * i, i) / 4**i) ** 2 for i in range(T))
    squared = noise_strategy.sensitivity_of_roots(T, T, T)[0] ** 2
    assert last == pytest.approx(roots, rel=1e-12) == pytest.approx(squared, rel=1e-12)
    assert NoiseStrategy.of("bisr", 2).error(T) ** 2 == pytest.approx(1 + (T - 1) / 8, rel=1e-12)
    assert NoiseStrategy.of("bisr", 1).error(T) ** 2 == pytest.approx((T + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("bands", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)])
def test_the_bands_of_bandmf_are_the_least_error_that_a_search_over_dense_matrices_finds(bands: int) -> None:
    def error(rest: np.ndarray) -> float:
        column = np.zeros(T)
        column[:bands] = (1.0, *rest)
        b_TT = np.tril(np.ones((T, T))) @ np.linalg.inv(dense(column))
        return float(np.square(b_TT).sum() / T * np.square(column).sum())

    found = min((minimize(error, start * np.ones(bands - 1)) for start in (0.1, 0.5)), key=lambda one: one.fun)
    assert NoiseStrategy.of("bandmf", bands, T).error(T) ** 2 == pytest.approx(found.fun, rel=1e-7)
    fewer = NoiseStrategy.of("bandmf", bands - 1, T).error(T)
    assert NoiseStrategy.of("bandmf", bands, T).error(T) < 0.995 * fewer


def patterns(releases: int, separation: int) -> list[tuple[int, ...]]:
    """All sets of releases that are `separation` apart at least."""
    found = []
    for bits in itertools.product([0, 1], repeat=releases):
        chosen = tuple(i for i, bit in enumerate(bits) if bit)
        if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
            found.append(chosen)
    return found


PATTERNS = [
    (name, bands, groups) for name, bands in STRATEGIES for groups in (2, 3, 4) if name == "bisr" or bands <= groups
]


@pytest.mark.parametrize("name, bands, groups", PATTERNS)
def test_sensitivity_is_the_largest_over_all_participations_and_directions(name: str, bands: int, groups: int) -> None:
    """Brute force over patterns and signs; what is accounted for "bandmf" is the root of the number of participations."""
    c_TT, chosen = strategy_matrix(name, bands), patterns(T, groups)
    shifts_PT = np.array([
        c_TT[:, one] @ np.array(signs) for one in chosen for signs in itertools.product([1, -1], repeat=len(one))
    ])  # fmt: skip
    worst, largest = np.linalg.norm(shifts_PT, axis=1).max(), np.abs(shifts_PT).max()
    if name == "bisr":
        assert noise_strategy.sensitivity_of_roots(bands, groups, T) == (
            pytest.approx(worst, rel=1e-12),
            pytest.approx(largest, rel=1e-12),
        )
        return
    columns = max(np.square(c_TT[:, one]).sum() for one in chosen)
    participations = max(map(len, chosen))
    assert worst == pytest.approx(math.sqrt(columns), rel=1e-12), "columns that are apart are orthogonal"
    assert participations == -(-T // groups) and participations - 1 < worst**2 <= participations + 1e-12


# ---- noise -------------------------------------------------------------------------------------------------------------


SHAPES = {"w": (3, 5), "b": (4,), "table": (6, 2)}


def noise_of(name: str, bands: int, key: bytes = KEY) -> CorrelatedNoise:
    return CorrelatedNoise(NoisePlan(key, SHAPES.items()), NoiseStrategy.of(name, bands, T))


def added(
    noise: CorrelatedNoise, release: int, dtype: torch.dtype = torch.float64, std: float | torch.Tensor = 0.5
) -> torch.Tensor:
    """The noise of a release on sums of three parameters, in units of std, flat."""
    sums = [torch.full(shape, 7.0, dtype=dtype) for shape in SHAPES.values()]
    targets = [torch.empty_like(t) for t in sums]
    places = [noise.place(parameter, shape) for parameter, shape in SHAPES.items()]
    noise.add_noise_to(targets, sums, places, std, release, 0.25)
    return torch.cat([(t.double().flatten() / 0.25 - 7.0) / std for t in targets])


def draws(releases: range, key: bytes = KEY) -> np.ndarray:
    """The independent noise z of releases, from the key stream: [releases, elements]."""
    plan = NoisePlan(key, SHAPES.items())
    return np.stack([
        np.concatenate([chacha.normals(key, t, plan.offsets[n], math.prod(s)).double().numpy() for n, s in SHAPES.items()])
        for t in releases
    ])  # fmt: skip


@strategies
def test_over_t_releases_the_noise_is_c_inverse_times_the_draws_of_the_key_stream(name: str, bands: int) -> None:
    """So its covariance is σ² C⁻¹C⁻ᵀ, and C times the noise is independent again."""
    noise, z_TN = noise_of(name, bands), draws(range(5, 5 + T))
    y_TN = np.stack([added(noise, t).numpy() for t in range(5, 5 + T)])
    np.testing.assert_allclose(y_TN, np.linalg.inv(strategy_matrix(name, bands)) @ z_TN, atol=2e-6)
    np.testing.assert_allclose(strategy_matrix(name, bands) @ y_TN, z_TN, atol=5e-6)


@pytest.mark.parametrize("name, bands", [("bandmf", 4), ("bisr", 6)])
def test_after_a_gap_or_with_a_new_key_the_correlation_begins_anew(name: str, bands: int) -> None:
    """The matrix is that of two strategies beside each other: no column of it is longer, none of another sign."""
    noise = noise_of(name, bands)
    before = np.stack([added(noise, t).numpy() for t in range(3)])
    after = np.stack([added(noise, t).numpy() for t in range(5, 9)])
    c_TT = strategy_matrix(name, bands)
    np.testing.assert_allclose(c_TT[:3, :3] @ before, draws(range(3)), atol=5e-6)
    np.testing.assert_allclose(c_TT[:4, :4] @ after, draws(range(5, 9)), atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, bands", [("bandmf", 4), ("bisr", 6)])
def test_sums_of_narrow_numbers_are_rounded_once(name: str, bands: int, dtype: torch.dtype) -> None:
    exact, narrow = noise_of(name, bands), noise_of(name, bands)
    for t in range(T):
        wanted = ((added(exact, t) * 0.5 + 7.0) * 0.25).to(dtype)
        found = ((added(narrow, t, dtype) * 0.5 + 7.0) * 0.25).to(dtype)
        assert (wanted.double() - found.double()).abs().max() <= 2 * torch.finfo(
            dtype
        ).eps * wanted.double().abs().max()


@pytest.mark.parametrize("name, bands", [("bandmf", 4), ("bisr", 3)])
def test_the_scale_may_be_a_number_or_a_tensor_as_a_loss_scaler_gives(name: str, bands: int) -> None:
    one, other = noise_of(name, bands), noise_of(name, bands)
    for t in range(4):
        assert torch.equal(added(one, t), added(other, t, std=torch.tensor(0.5)))


# ---- sampling ----------------------------------------------------------------------------------------------------------


def test_a_record_is_drawn_from_its_own_group_at_the_rate_of_the_group() -> None:
    size, rate, count, rounds = 400, 0.05, 4, 3000
    groups, taken = Groups(KEY, count), np.zeros((rounds, size))
    of = groups.of(size)
    for number in range(rounds):
        drawn = groups.cyclic_draw(KEY, number, size, rate)
        assert np.all(np.diff(drawn) > 0) and np.all(of[drawn] == number % count)
        taken[number, drawn] = 1
    turns = rounds / count
    share = taken.sum(0) / turns
    assert abs(share.mean() - 0.2) < 6 * (0.2 * 0.8 / turns / size) ** 0.5
    assert abs(share - 0.2).max() < 6 * (0.2 * 0.8 / turns) ** 0.5
    assert np.bincount(of.astype(int), minlength=count).min() > size / count * 0.6


def test_groups_do_not_change_with_another_record_and_whole_groups_are_drawn_at_rate_one() -> None:
    assert np.array_equal(Groups(KEY, 7).of(50), Groups(KEY, 7).of(51)[:50])
    assert not np.array_equal(Groups(KEY, 7).of(50), Groups(bytes(32), 7).of(50))
    whole = [Groups(KEY, 5).cyclic_draw(KEY, number, 40, 0.2) for number in range(10)]
    assert np.array_equal(np.sort(np.concatenate(whole[:5])), np.arange(40)) and np.array_equal(whole[3], whole[8])


# ---- accounting --------------------------------------------------------------------------------------------------------


def test_epsilon_of_banded_noise_is_the_published_one_of_amplification() -> None:
    """JAX-Privacy, analysis_test.py: cycles of 64, 1024 of 64 · 50,000 records, σ = 4, 640,000 updates, δ = 1e-5."""
    run = (4.0, 1024 / 50_000 / 64, 10_000 * 64, "bandmf", 64, 64)
    assert epsilon_of("rdp", (run,), 1e-5) == pytest.approx(2.27535, rel=1e-3)
    assert epsilon_of("pld", (run,), 1e-5) == pytest.approx(2.09245, rel=3e-3)


@pytest.mark.parametrize("accountant", ["pld", pytest.param("prv", marks=pytest.mark.full), "rdp"])
@pytest.mark.parametrize("name, bands", [("bandmf", 4), ("bisr", 3)])
def test_epsilon_is_that_of_a_gaussian_with_the_dense_sensitivity(accountant: str, name: str, bands: int) -> None:
    """dp-accounting's Gaussian event over the brute-force sensitivity; with in-group sampling, its Poisson-sampled event."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    sigma, rate = 3.0, 0.2
    kind = kind_of(name, bands, rate)
    assert kind == (name, bands, 5 if name == "bisr" else 4)
    c_TT = strategy_matrix(name, bands)
    if name == "bisr":
        worst = max(np.linalg.norm(c_TT[:, one].sum(1)) for one in patterns(T, 5))
        event = GaussianDpEvent(sigma / worst)
    else:
        rounds = max(map(len, patterns(T, 4)))
        event = SelfComposedDpEvent(PoissonSampledDpEvent(0.8, GaussianDpEvent(sigma)), rounds)
    oracle = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    oracle.compose(event)
    wanted = oracle.get_epsilon(DELTA)
    found = epsilon_of(accountant, ((sigma, rate, T, *kind),), DELTA)
    assert wanted * (1 - 2e-3) <= found <= wanted * {"pld": 1.01, "prv": 1.05, "rdp": 1.6}[accountant]


def test_amplification_is_less_than_of_draws_from_all_records_and_no_more_than_none() -> None:
    """As much noise costs more with groups; a run of several kinds pays for each."""
    plain = epsilon_of("rdp", ((2.0, 0.02, 1000),), DELTA)
    grouped = [epsilon_of("rdp", ((2.0, 0.02, 1000, "bandmf", b, b),), DELTA) for b in (1, 2, 8, 50)]
    assert grouped[0] == pytest.approx(plain) and grouped == sorted(grouped)
    assert plain_run((2.0, 0.02, 1000, "bandmf", 50, 50)) == (2.0, 1.0, 20)
    both = ((2.0, 0.02, 1000, "bandmf", 8, 8), (2.0, 0.02, 1, "bandmf", 8, 8))
    assert epsilon_of("rdp", both, DELTA) > grouped[2]


# ---- the engine --------------------------------------------------------------------------------------------------------


CORRELATED = {
    "bandmf": {"noise": "bandmf", "bands": 3, "releases": 8},
    "bisr": {"noise": "bisr", "bands": 4},
}
either = pytest.mark.parametrize("options", CORRELATED.values(), ids=CORRELATED)


class Recorded:
    """What the hook adds to the clipped sums of a private run, release by release, in units of σC."""

    def __init__(self, run: object, std: float) -> None:
        self.run, self.std, self.noise, self._sum = run, std, [], None
        hooks = run.optimizer._optimizer_step_pre_hooks
        before = run.optimizer.register_step_pre_hook(self._before)
        hooks.move_to_end(before.id, last=False)
        run.optimizer.register_step_pre_hook(self._after)

    def _gradient(self) -> torch.Tensor:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.run.model.parameters()]
        return torch.cat([g.detach().double().flatten() for g in grads])

    def _before(self, *_: object) -> None:
        mine = self._gradient()
        self._sum = mine if self._sum is None else self._sum + mine

    def _after(self, *_: object) -> None:
        if self.run.engine.stepped:
            self.noise.append((self._gradient() * self.run.engine.expected_batch - self._sum) / self.std)
            self._sum = None


@either
@pytest.mark.parametrize("pieces", [2, *(pytest.param(most, marks=pytest.mark.full) for most in (None, 1))])
def test_a_run_adds_correlated_noise_to_its_sums_and_draws_from_groups_in_turn(
    options: dict, pieces: int | None
) -> None:
    p = problem("mlp", RECORDS)
    with poisson_run(p, p.model(), 1.0, noise_multiplier=1.5, max_physical_batch=pieces, **options) as run:
        recorded = Recorded(run, 1.5)
        drawn = list(drawn_steps(run, p, 8))
        engine, plan, state = run.engine, run.engine.plan, run.engine.state_dict()["noise"]
    c_TT = strategy_matrix(options["noise"], options["bands"], 8)
    if options["noise"] == "bandmf":
        c_TT = dense(NoiseStrategy.of("bandmf", 3, 8).column(8))
    z_TN = c_TT @ torch.stack(recorded.noise).numpy()
    assert 0.8 < z_TN.var() < 1.2 and abs(np.corrcoef(z_TN) - np.eye(8)).max() < 0.6
    y_RR = np.corrcoef(torch.stack(recorded.noise).numpy())
    assert np.mean([y_RR[i, i + 1] for i in range(7)]) < -0.2, "the noise takes itself away again"
    groups = 3 if options["noise"] == "bandmf" else 4
    for first, later in itertools.combinations(range(8), 2):
        if (later - first) % groups:
            assert not set(drawn[first]) & set(drawn[later])
    stored, says = sum(t.nbytes for entry in state.values() for t in entry["buffers"]), engine.noise_record(8)["bytes"]
    assert stored == says == (2 * sum(q.nbytes for q in run.model.parameters()) if groups == 3 else 0)
    assert pieces == 1 or f"{options['bands']} bands, {format_bytes(stored)} of buffers" in str(plan)
    (kind,) = engine.accountant.history
    assert kind == (1.5, EXPECTED / RECORDS, 8, options["noise"], options["bands"], groups)
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon_of("prv", (plain_run(kind),), DELTA), rel=1e-6)
    facts, count = engine._ledger.chain.runs[0]
    assert count == 8 and (facts["noise"], facts["bands"], facts["groups"]) == (
        options["noise"],
        options["bands"],
        groups,
    )


@either
def test_a_replay_goes_on_with_the_same_noise_and_a_resume_without_begins_anew(options: dict) -> None:
    p = problem("mlp", RECORDS)
    given = {"noise_multiplier": 1.0, "max_physical_batch": 4, **options}
    model, engine = p.model(), seeded_engine()
    with poisson_run(p, model, 1.0, engine=engine, **given) as run:
        list(drawn_steps(run, p, 3))
        saved, at = copy.deepcopy(engine.state_dict()), copy.deepcopy(model)
        other = copy.deepcopy(at)
        list(drawn_steps(run, p, 3))
    again = seeded_engine(seed=9)
    again.load_state_dict(saved, replay=True)
    with poisson_run(p, at, 1.0, engine=again, **given) as run:
        list(drawn_steps(run, p, 3))
        assert torch.equal(flat_of(at), flat_of(model)) and again.steps == 6
        with refusal("state: its noise is damaged"):
            again.load_state_dict({**saved, "noise": None}, replay=True)
    anew = gramian.PrivacyEngine()
    anew.load_state_dict({**saved, "secrets": {**saved["secrets"], "insecure_reproducible": False}})
    with poisson_run(p, other, 1.0, engine=anew, **given) as run:
        recorded = Recorded(run, 1.0)
        first, second = list(drawn_steps(run, p, 2))
        c_TT = NoiseStrategy.of(options["noise"], options["bands"], 8).column(2)
        z_TN = dense(c_TT) @ torch.stack(recorded.noise).numpy()
        assert abs(z_TN.var(1) - 1).max() < 0.3
        assert not set(first) & set(second)


@either
def test_a_state_saved_after_detach_goes_on_without_a_replay(options: dict) -> None:
    """The noise of a model goes with it, so such a state cannot be replayed, and says so."""
    p, engine = problem("mlp", RECORDS), gramian.PrivacyEngine("rdp")
    with poisson_run(p, p.model(), 1.0, engine=engine, noise_multiplier=1.0, **options) as run:
        list(drawn_steps(run, p, 2))
    after = gramian.PrivacyEngine("rdp")
    with refusal("state: its noise is damaged"):
        after.load_state_dict(engine.state_dict(), replay=True)
    after.load_state_dict(engine.state_dict())
    with pytest.warns(UserWarning, match="steps begun after it was saved"):
        run = poisson_run(p, p.model(), 1.0, engine=after, noise_multiplier=1.0, **options)
        with run as again:
            list(drawn_steps(again, p, 1))
    assert after.accountant.history == ((1.0, 0.25, 3, *engine.accountant.history[0][3:]),)


def test_lost_releases_use_up_the_fixed_number_and_past_it_a_step_is_refused(tmp_path: object) -> None:
    p, options = problem("mlp", RECORDS), {"noise_multiplier": 1.0, "noise": "bandmf", "bands": 2, "releases": 5}
    engine = seeded_engine()
    with poisson_run(p, p.model(), 1.0, engine=engine, **options) as run:
        engine.bind_counter(tmp_path / "releases.json")
        list(drawn_steps(run, p, 1))
        saved = copy.deepcopy(engine.state_dict())
        list(drawn_steps(run, p, 2))
    after = gramian.PrivacyEngine(insecure_reproducible=True)
    after.load_state_dict(saved)
    after.bind_counter(tmp_path / "releases.json", must_exist=True)
    with poisson_run(p, p.model(), 1.0, engine=after, **options) as run:
        list(drawn_steps(run, p, 2))
        assert after.steps == 5
        with refusal("releases: all 5 are spent"):
            list(drawn_steps(run, p, 1))
        assert after.steps == 5


def test_the_noise_for_a_target_is_that_of_the_mechanism() -> None:
    p = problem("mlp", RECORDS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*p.batch), batch_size=EXPECTED)
    found = {}
    for name, options in {"gaussian": {}, **CORRELATED}.items():
        engine, model = seeded_engine(accountant="rdp"), p.model()
        options = {key: value for key, value in options.items() if key != "releases"}
        engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, target_epsilon=3.0,
            target_delta=1e-3, epochs=3, max_grad_norm=1.0, loss_reduction="sum", **options,
        )  # fmt: skip
        found[name] = engine.noise_multiplier
        kind = kind_of(name, options.get("bands"), 0.25)
        assert 0.99 * 3 < epsilon_of("rdp", ((found[name], 0.25, 12, *kind),), 1e-3) <= 3.0
        engine.detach()
    assert found["gaussian"] < found["bandmf"] < found["bisr"]


REFUSED = [
    ({"noise": "mf"}, 'noise: expected one of "gaussian", "bandmf", "bisr"'),
    ({"noise": "bisr"}, "bands: none given"),
    ({"bands": 3}, "bands: is of correlated noise"),
    ({"releases": 3}, "releases: is of correlated noise"),
    ({"noise": "bandmf", "bands": 3}, "releases: is None; expected the number of releases of the whole run"),
    ({"noise": "bandmf", "bands": 3, "releases": 2}, "releases: is 2"),
    ({"noise": "bandmf", "bands": 0, "releases": 2}, "bands: expected a number from 1"),
    ({"noise": "bandmf", "bands": 5, "releases": 9}, "bands: a batch is 0.25 of all records"),
    ({"noise": "bisr", "bands": 3, "poisson_sampling": False}, "poisson_sampling: is False"),
    ({"noise": "bisr", "bands": 3, "poisson_sampling": "truncated", "max_draw": 9}, "poisson_sampling: is 'truncated'"),
    ({"noise": "bisr", "bands": 3, "clip_function": "adaptive"}, 'clip_function: "adaptive" changes the scale'),
]


@pytest.mark.parametrize("options, line", REFUSED, ids=range(len(REFUSED)))
def test_options_that_do_not_go_together_are_refused_by_name(options: dict, line: str) -> None:
    p = problem("mlp", RECORDS)
    with refusal(re.escape(line)), poisson_run(p, p.model(), 1.0, noise_multiplier=1.0, **options):
        pass


def test_gdp_has_no_number_for_correlated_noise() -> None:
    with refusal("accountant: gdp is a limit for releases of independent noise"):
        epsilon_of("gdp", ((1.0, 0.1, 10, "bandmf", 2, 2),), DELTA)


def test_runs_of_correlated_noise_pay_for_participations_of_their_own() -> None:
    """Two runs of one kind with another between them: ⌈n/groups⌉ participations in each, not in both together."""
    account = Accounting("rdp")
    for spent, kind in ((1, (2.0, 0.2, "bandmf", 4, 4)), (2, (2.0, 0.2)), (3, (2.0, 0.2, "bandmf", 4, 4))):
        account.record(*kind)
        account.set_steps(spent)
    wanted = epsilon_of("rdp", ((2.0, 0.8, 2), (2.0, 0.2, 1)), DELTA)
    assert account.epsilon(DELTA) == pytest.approx(wanted, rel=1e-6)
    again = Accounting("rdp")
    again.load_state_dict(account.state_dict())
    assert again.history == account.history and again.kind == (2.0, 0.2, "bandmf", 4, 4)


def test_the_group_of_a_record_outlives_the_key_of_the_draws() -> None:
    """A resume that is no replay has new keys for noise and draws; with new groups a record could come twice in a row."""
    p, options = problem("mlp", RECORDS), {"noise_multiplier": 1.0, "noise": "bandmf", "bands": 4, "releases": 9}
    engine = gramian.PrivacyEngine()
    with poisson_run(p, p.model(), 1.0, engine=engine, **options) as run:
        before, saved = run.loader.groups.of(RECORDS).copy(), copy.deepcopy(engine.state_dict())
    after = gramian.PrivacyEngine()
    with poisson_run(p, p.model(), 1.0, engine=after, **options) as run:
        assert not np.array_equal(run.loader.groups.of(RECORDS), before)
        with pytest.warns(UserWarning, match="steps begun after it was saved"):
            after.load_state_dict(saved)
        assert np.array_equal(run.loader.groups.of(RECORDS), before)
        assert after._ledger.secrets.sampling_key != engine._ledger.secrets.sampling_key


@pytest.mark.full
def test_the_trainers_find_the_noise_of_the_mechanism() -> None:
    given = {"target_delta": 1e-3, "target_epsilon": 3.0, "accountant": "rdp"}
    found = {
        name: TrainerPrivacy.of({**given, **options}).noise_for(8, 0.25, 32)
        for name, options in {"gaussian": {}, **CORRELATED}.items()
    }
    assert found["gaussian"] < found["bandmf"] < found["bisr"]
    assert 2.97 < epsilon_of("rdp", ((found["bandmf"], 0.25, 8, "bandmf", 3, 3),), 1e-3) <= 3.0
    with refusal("releases: is None"):
        TrainerPrivacy.of({**given, "noise": "bandmf", "bands": 3}).noise_for(8, 0.25, 32)
