"""Every representation of a matrix answers as the matrix written out does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, LowRankRootLinearOperator

import gramian
from gramian.linalg import BlockDiagonal, Dense, Diagonal, DiagonalLowRank, LowRank, Spectral
from gramian.linalg.factors.factor import fetch_bounds, fetch_traces
from tests.kit.matrix import FULL
from tests.linalg.matrices import (
    CASES,
    POWERS,
    Case,
    damped_power,
    distance,
    normal,
    positive,
    probabilities,
    softmax_fisher,
    spectrum,
)

pytestmark = pytest.mark.oracle

DAMPING = 0.03
quick = settings(max_examples=100 if FULL else 15)


def _allowed(case: Case, p: float, clipped: bool = False) -> float:
    """1e-10, and the bound that an approximate power reports, itself below 1e-6."""
    approximate = case.approximate and p != int(p) and not clipped
    if not approximate:
        assert case.factor.work.error_bound == 0
        return 1e-10
    assert 0 < case.factor.work.error_bound < 1e-6
    return 1e-10 + case.factor.work.error_bound


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.mark.parametrize("p", POWERS)
def test_powers_are_those_of_eigh(case: Case, p: float) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    for damping in (DAMPING, 5.0):
        actual = case.factor.power(y, p, damping)
        assert distance(actual, damped_power(case.matrix, y, p, damping)) <= _allowed(case, p)


@pytest.mark.parametrize("p", POWERS)
def test_clipped_powers_are_those_of_eigh(case: Case, p: float) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    for max_condition in (50.0, 1.5):
        actual = case.factor.power(y, p, 1e-3, max_condition)
        clipped = not case.factor.clips_nothing(1e-3, max_condition)
        assert distance(actual, damped_power(case.matrix, y, p, 1e-3, max_condition)) <= _allowed(case, p, clipped)


def test_a_clip_that_is_not_reached_changes_nothing(case: Case) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    for p in (-1.0, -0.5):
        assert torch.equal(case.factor.power(y, p, DAMPING, 1e9), case.factor.power(y, p, DAMPING))


def test_a_power_and_its_negative_cancel(case: Case) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    for p in POWERS:
        there = case.factor.power(y, p, 1.0)
        assert distance(case.factor.power(there, -p, 1.0), y) <= 1e-10, p


def test_the_first_power_is_the_product_and_the_damping(case: Case) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    assert distance(case.factor.matvec(y), case.matrix @ y) <= 1e-12
    assert distance(case.factor.power(y, 1.0, DAMPING), case.matrix @ y + DAMPING * y) <= 1e-12
    assert distance(case.factor.power(y, 1.0, 0.0), case.matrix @ y) <= 1e-12


def test_products_and_powers_are_symmetric(case: Case) -> None:
    u, v = normal(2, case.factor.dim, 1, seed=1)
    operations = [case.factor.matvec, lambda y: case.factor.solve(y, DAMPING)]
    operations += [lambda y, p=p: case.factor.power(y, p, DAMPING) for p in (-0.5, 0.3)]
    for operation in operations:
        left, right = u.mT @ operation(v), operation(u).mT @ v
        assert abs(float(left - right)) <= 1e-10 * float(operation(v).norm() * u.norm())


def test_solutions_are_those_of_eigh(case: Case) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    for damping in (DAMPING, 5.0, DAMPING):
        assert distance(case.factor.solve(y, damping), damped_power(case.matrix, y, -1, damping)) <= 1e-10
        assert case.factor.work.attempts in ([], [{"jitter": 0.0, "result": "ok"}])


def test_log_determinants_are_those_of_eigh(case: Case) -> None:
    for damping in (DAMPING, 5.0):
        expected = float((spectrum(case.matrix) + damping).log().sum())
        assert float(case.factor.logdet(damping)) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    case.factor.power(normal(case.factor.dim, 1), 1.0, DAMPING, 1.1)  # decomposes
    assert float(case.factor.logdet(5.0)) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_trace_norm_diagonal_and_eigenvalues_are_those_of_the_matrix(case: Case) -> None:
    f, m = case.factor, case.matrix
    assert f.trace().dtype == f.frobenius().dtype == torch.float64
    assert float(f.trace()) == pytest.approx(float(m.trace()), rel=1e-12)
    assert float(f.frobenius()) == pytest.approx(float(m.norm()), rel=1e-12)
    assert distance(f.diagonal(), m.diagonal()) <= 1e-12
    assert distance(f.to_dense(), m) <= 1e-12
    top = float(spectrum(m).max())
    assert float(f.largest_bound()) >= top * (1 - 1e-12)
    eigenvalues = f.eigenvalues()
    assert len(eigenvalues) == f.dim
    assert float((eigenvalues - spectrum(m)).abs().max()) <= 1e-12 * top
    assert bool((eigenvalues.diff() >= 0).all())
    assert float(f.largest_bound()) >= top * (1 - 1e-12)


def test_the_condition_is_a_bound_and_exact_once_decomposed(case: Case) -> None:
    values = spectrum(case.matrix) + DAMPING
    kappa = float(values[-1] / values[0])
    decomposed = case.factor.extremes() is not None
    for _ in range(2):
        for limit in (None, 7.0):
            actual, exact = case.factor.condition(DAMPING, limit)
            want = kappa if limit is None else min(kappa, limit)
            assert exact == decomposed
            assert actual == pytest.approx(want, rel=1e-9) if exact else actual >= want * (1 - 1e-12)
        assert case.factor.condition_bound(DAMPING) >= kappa * (1 - 1e-12)
        assert case.factor.bound() >= float(spectrum(case.matrix)[-1]) * (1 - 1e-12)
        case.factor.power(normal(case.factor.dim, 1), -0.5, DAMPING)
        decomposed = case.factor.extremes() is not None
    assert decomposed == (isinstance(case.factor, Spectral) and float(case.matrix.norm()) > 0)


def test_a_bound_is_the_same_before_and_after_a_decomposition(case: Case) -> None:
    """What it decides (Cholesky or eigenvectors, float32 or float64) does not depend on earlier calls."""
    before = float(case.factor.largest_bound())
    case.factor.power(normal(case.factor.dim, 1), -0.5, DAMPING)
    assert float(case.factor.largest_bound()) == before == case.factor.bound()


def test_a_bound_of_blocks_is_the_same_before_and_after_a_decomposition() -> None:
    factor = BlockDiagonal(torch.stack([positive(5, seed=i) for i in range(3)]))
    before = float(factor.largest_bound())
    factor.power(normal(15, 1), -0.5, DAMPING)
    assert float(factor.largest_bound()) == before


@pytest.mark.parametrize("columns", [17, 18, 40])
def test_a_basis_of_as_many_columns_as_rows_is_as_exact_as_any_other(columns: int) -> None:
    """Singular values from 1 to 1e-5, as gradients of a softmax have: the smallest eigenvectors Q = U W are inaccurate."""
    left, right = (torch.linalg.qr(normal(n, 18, seed=n)).Q for n in (18, 40))
    u = (left * torch.logspace(0, -5, 18, dtype=torch.float64) @ right.mT @ normal(40, columns)).float()
    y, m = normal(18, 3).float(), u.double() @ u.mT.double()
    values, vectors = torch.linalg.eigh(m)
    for p in (-1.0, -0.5, 0.5, 1.0):
        want = vectors @ ((values.clamp(min=0) + 0.03).pow(p)[:, None] * (vectors.mT @ y.double()))
        off = float(distance(LowRank.of(u).power(y, p, 0.03).double(), want))
        assert off <= 3e-7, p


def test_what_is_read_from_many_factors_together_is_theirs() -> None:
    factors = [make().factor for make in CASES.values()]
    fetch_bounds(factors)
    traces = fetch_traces(factors)
    for factor, make in zip(factors, CASES.values(), strict=True):
        assert factor.bound() == float(make().factor.largest_bound())
        assert traces[id(factor)] == float(make().factor.trace())


@pytest.mark.parametrize("columns", [0, 1, 5])
def test_any_number_of_right_hand_sides_is_answered(case: Case, columns: int) -> None:
    y = normal(case.factor.dim, columns, seed=1)
    answers = [case.factor.matvec(y), case.factor.solve(y, DAMPING)]
    answers += [case.factor.power(y, p, DAMPING, k) for p in (-1.0, -0.5) for k in (None, 50.0)]
    for answer in answers:
        assert answer.shape == y.shape


def test_the_right_hand_side_is_left_alone(case: Case) -> None:
    y = normal(case.factor.dim, 3, seed=1)
    before, matrix = y.clone(), case.factor.to_dense().clone()
    for p in POWERS:
        case.factor.power(y, p, DAMPING)
    case.factor.solve(y, DAMPING)
    case.factor.logdet(DAMPING)
    assert torch.equal(y, before)
    assert torch.equal(case.factor.to_dense(), matrix)


@pytest.mark.parametrize(
    "name, rank",
    [("low rank wide", 7), ("low rank duplicates", 3), ("low rank zero columns", 3), ("low rank all zero", 0)],
)
def test_directions_that_are_rounding_are_left_out(name: str, rank: int) -> None:
    factor = CASES[name]().factor
    assert isinstance(factor, LowRank)
    assert len(factor.spectrum) == rank
    basis = factor.from_basis(torch.eye(rank, dtype=torch.float64))
    assert distance(basis.mT @ basis, torch.eye(rank, dtype=torch.float64)) <= 1e-10


def test_a_negative_power_of_a_singular_matrix_needs_damping() -> None:
    factor = LowRank.of(normal(6, 2))
    with pytest.raises(gramian.GramianError, match="^damping: expected more than 0"):
        factor.power(normal(6, 1), -1.0, 0.0)
    assert bool(factor.power(normal(6, 1), 0.5, 0.0).isfinite().all())


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 3)])
def test_a_dense_matrix_that_is_not_square_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(gramian.GramianError, match="^factor: expected a square matrix"):
        Dense.of(torch.zeros(shape))


def test_columns_that_are_no_matrix_are_refused() -> None:
    with pytest.raises(gramian.GramianError, match="^factor: expected columns"):
        LowRank.of(torch.zeros(3))


@pytest.mark.parametrize("name", ["low rank", "low rank duplicates", "low rank zero columns", "plus"])
def test_solve_and_logdet_are_those_of_linear_operator(name: str) -> None:
    case = CASES[name]()
    root = case.factor.columns.stored.load()
    d = case.factor.values_N if name == "plus" else torch.zeros(case.factor.dim, dtype=torch.float64)
    peer = LowRankRootLinearOperator(root) + DiagLinearOperator(d + DAMPING)
    y = normal(case.factor.dim, 3, seed=1)
    assert distance(case.factor.solve(y, DAMPING), peer.solve(y)) <= 1e-10
    assert float(case.factor.logdet(DAMPING)) == pytest.approx(float(peer.logdet()), rel=1e-10)


def test_a_dense_solve_and_logdet_are_those_of_linear_operator() -> None:
    m, y = positive(10), normal(10, 3, seed=1)
    peer = DenseLinearOperator(m).add_diagonal(torch.tensor(DAMPING, dtype=torch.float64))
    assert distance(Dense.of(m).solve(y, DAMPING), peer.solve(y)) <= 1e-10
    assert float(Dense.of(m).logdet(DAMPING)) == pytest.approx(float(peer.logdet()), rel=1e-10)


sizes, seeds = st.integers(1, 14), st.integers(0, 2**16)
dampings = st.floats(-2, 1).map(lambda e: 10**e)


@quick
@given(n=sizes, r=st.integers(0, 20), damping=dampings, p=st.floats(-2, 2), seed=seeds)
def test_low_rank_powers_are_those_of_eigh_for_any_shape(n: int, r: int, damping: float, p: float, seed: int) -> None:
    u, y = normal(n, r, seed=seed), normal(n, 2, seed=seed + 1)
    factor, m = LowRank.of(u), u @ u.mT
    assert distance(factor.power(y, p, damping), damped_power(m, y, p, damping)) <= 1e-10
    assert distance(factor.power(y, p, damping, 20.0), damped_power(m, y, p, damping, 20.0)) <= 1e-10
    assert distance(factor.solve(y, damping), damped_power(m, y, -1, damping)) <= 1e-10


@quick
@given(n=sizes, damping=dampings, p=st.floats(-2, 2), seed=seeds)
def test_diagonal_powers_are_those_of_eigh_for_any_shape(n: int, damping: float, p: float, seed: int) -> None:
    d, y = normal(n, seed=seed).abs(), normal(n, 2, seed=seed + 1)
    expected = damped_power(torch.diag(d), y, p, damping, 20.0)
    assert distance(Diagonal(d).power(y, p, damping, 20.0), expected) <= 1e-12


@quick
@given(n=sizes, r=st.integers(0, 8), sign=st.sampled_from([1, -1]), damping=dampings, p=st.floats(-2, 2), seed=seeds)
def test_diagonal_low_rank_powers_are_within_their_bound_for_any_shape(
    n: int, r: int, sign: int, damping: float, p: float, seed: int
) -> None:
    y = normal(n, 2, seed=seed + 1)
    if sign > 0:
        d, u = normal(n, seed=seed).abs(), normal(n, r, seed=seed + 2)
        factor, m = DiagonalLowRank.of(d, u, +1), torch.diag(d) + u @ u.mT
    else:
        probability, w = probabilities(n, r, sharpness=2.0, seed=seed)
        factor, m = DiagonalLowRank.softmax(probability * w.sqrt(), torch.float64), softmax_fisher(probability, w)
    actual = factor.power(y, p, damping)
    assert factor.work.error_bound < 1e-6
    assert distance(actual, damped_power(m, y, p, damping)) <= 1e-10 + factor.work.error_bound
    assert distance(factor.solve(y, damping), damped_power(m, y, -1, damping)) <= 1e-10


def test_a_sum_counts_the_scales_of_a_matrix_that_half_precision_stores_exactly() -> None:
    """As a factor that was saved in float16, without any rounding, is when it is loaded."""
    exact = Dense.of(torch.eye(8) / 8, torch.float16)
    loaded = Dense(replace(exact.stored, rounded=False))
    total = Dense.summed(loaded, Dense.of(torch.eye(8)), 0.5, 0.5, torch.float32)
    torch.testing.assert_close(total.dense(), torch.eye(8) * 0.5625)
