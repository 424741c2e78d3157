"""How much of float32 is left where the damping is small: at least three digits or so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from tests.kit.matrix import FULL
from tests.linalg.matrices import damped_power, distance, normal, probabilities, stored_matrix

pytestmark = pytest.mark.oracle

STORAGE = (torch.float16, torch.bfloat16, torch.float32)
N, R = 120, 16
quick = settings(max_examples=200 if FULL else 25)


def _columns(scale: float, decades: float, seed: int = 0) -> Tensor:
    """U in float32 whose columns fall off by so many decades: the eigenvalues of U Uᵀ by twice as many."""
    return (scale * normal(N, R, seed=seed) * torch.logspace(0, -decades, R, dtype=torch.float64)).float()


def _in_span(factor: LowRank, p: float, damping: float, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Y = U C in float64, and (U Uᵀ + λI)^p Y by the singular values of the stored U: exact in every direction."""
    u, c = factor.columns.stored.load(dtype=torch.float64), normal(R, 3, seed=seed)
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    c = right.mT @ (c / s[:, None])  # every direction weighs the same
    return u @ c, left @ ((s.square() + damping).pow(p)[:, None] * (s[:, None] * (right @ c)))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("scale", [1.0, N**-0.5], ids=["unit entries", "unit columns"])
@pytest.mark.parametrize("decades", [0.0, 2.5])
@pytest.mark.parametrize("damping", [1e-4, 1e-6, 1e-8])
def test_what_lies_in_the_span_is_solved_at_any_damping(
    storage: torch.dtype, scale: float, decades: float, damping: float
) -> None:
    factor = LowRank.of(_columns(scale, decades), storage)
    assert factor.working_dtype(damping) == torch.float64
    y, expected = _in_span(factor, -1, damping)
    for actual in (factor.solve(y, damping), factor.power(y, -1.0, damping)):
        assert actual.dtype == y.dtype  # what it is handed in float64, it hands on in float64
        assert distance(actual, expected) <= 1e-3
    y, expected = _in_span(factor, -0.5, damping)
    assert distance(factor.power(y, -0.5, damping), expected) <= 1e-3


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("damping", [1e-4, 1e-6, 1e-8])
def test_a_float32_right_hand_side_is_solved_for_what_it_is(storage: torch.dtype, damping: float) -> None:
    factor = LowRank.of(_columns(1.0, 1.0), storage)
    y = _in_span(factor, -1, damping)[0].float()
    expected = damped_power(stored_matrix(factor), y.double(), -1, damping)
    assert distance(factor.solve(y, damping), expected) <= 1e-3
    assert distance(factor.power(y, -1.0, damping), expected) <= 1e-3


@quick
@given(
    exponent=st.floats(-8, 1), scale=st.floats(-4, 3), decades=st.floats(0, 3), storage=st.sampled_from(STORAGE)
)  # fmt: skip
def test_three_digits_or_so_are_kept_at_any_scale(
    exponent: float, scale: float, decades: float, storage: torch.dtype
) -> None:
    factor, damping = LowRank.of(_columns(10**scale, decades), storage), 10**exponent * 10 ** (2 * scale)
    y, expected = _in_span(factor, -1, damping)
    assert distance(factor.solve(y, damping), expected) <= 2e-3
    assert distance(factor.power(y, -1.0, damping), expected) <= 2e-3


def test_float32_is_kept_where_it_is_good_enough() -> None:
    factor = LowRank.of(_columns(N**-0.5, 0.0), torch.float16)
    assert factor.working_dtype(0.1) == torch.float32
    assert factor.working_dtype(0.1, -8.0) == torch.float64
    assert LowRank.of(_columns(N**-0.5, 0.0)).working_dtype(0.1) == torch.float64  # stored so that digits count
    assert LowRank.of(_columns(1.0, 0.0).double()).working_dtype(0.1) == torch.float64
    assert Diagonal(torch.ones(3)).working_dtype(1e-9) == torch.float32


def test_directions_far_below_the_largest_are_not_dropped() -> None:
    u = torch.zeros(N, 2, dtype=torch.float32)
    u[0, 0], u[1, 1] = 1.0, 1e-4  # eigenvalues 1 and 1e-8
    factor = LowRank.of(u)
    y = torch.zeros(N, 1)
    y[1] = 1.0
    assert float(factor.power(y, -1.0, 1e-8)[1]) == pytest.approx(1 / 2e-8, rel=1e-5)
    assert float(factor.eigenvalues()[-2]) == pytest.approx(1e-8, rel=1e-5)


@pytest.mark.parametrize("p", [-1.0, -0.5, 0.5])
def test_directions_far_below_the_damping_cost_no_digits_in_float32(p: float) -> None:
    q, rotation = torch.linalg.qr(normal(N, R)).Q, torch.linalg.qr(normal(R, R)).Q
    factor = LowRank.of((q * torch.logspace(0, -6, R, dtype=torch.float64) @ rotation).float())
    assert factor.working_dtype(0.5) == torch.float32
    y = normal(N, 3, seed=1)
    assert distance(factor.power(y, p, 0.5), damped_power(stored_matrix(factor), y, p, 0.5)) <= 1e-6


@pytest.mark.parametrize("storage", STORAGE)
def test_a_dense_solve_keeps_three_digits_of_the_stored_matrix(storage: torch.dtype) -> None:
    u = _columns(1.0, 1.0).double()
    factor = Dense.of(u @ u.mT + 0.5 * torch.eye(N), storage)
    m, y = stored_matrix(factor), normal(N, 3, seed=1)
    for damping in (1.0, 1e-3):
        expected = torch.linalg.solve(m + damping * torch.eye(N), y)
        assert distance(factor.solve(y, damping), expected) <= 1e-4


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
def test_a_dense_power_is_as_good_as_float32_eigenvectors(damping: float) -> None:
    u = _columns(N**-0.5, 1.0).double()
    factor = Dense.of((u @ u.mT).float())
    condition = float(torch.linalg.eigvalsh(u @ u.mT)[-1]) / damping + 1
    y = normal(N, 3, seed=1)
    expected = damped_power(stored_matrix(factor), y, -1, damping)
    actual = factor.power(y, -1.0, damping)
    assert actual.dtype == torch.float64
    assert distance(actual, expected) <= 10 * torch.finfo(torch.float32).eps * condition


def test_a_log_determinant_does_not_depend_on_what_was_done_before() -> None:
    u = _columns(N**-0.5, 0.0)
    for factor in (LowRank.of(u), Dense.of(u @ u.mT + 1e-4 * torch.eye(N))):
        before = float(factor.logdet(1e-7))
        factor.power(normal(N, 1), -0.5, 1e-3)
        assert float(factor.logdet(1e-7)) == pytest.approx(before, rel=1e-9)
        values = torch.linalg.eigvalsh(stored_matrix(factor)) + 1e-7
        assert before == pytest.approx(float(values.log().sum()), rel=1e-6)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_diagonal_with_columns_is_that_of_what_is_stored(storage: torch.dtype, sign: int) -> None:
    if sign > 0:
        factor = DiagonalLowRank.of(torch.logspace(-3, 0, N), _columns(N**-0.5, 1.0), +1, storage)
    else:
        p, w = probabilities(N, R, sharpness=3.0)
        factor = DiagonalLowRank.softmax((p * w.sqrt()).float(), storage)
    m, y = stored_matrix(factor), normal(N, 3, seed=1)
    for damping in (1e-2, 1e-5):
        for actual, p in (
            (factor.solve(y, damping), -1.0),
            (factor.power(y, -1.0, damping), -1.0),
            (factor.power(y, -0.5, damping), -0.5),
            (factor.power(y, 0.5, damping), 0.5),
        ):
            assert actual.dtype == y.dtype
            assert distance(actual, damped_power(m, y, p, damping)) <= 1e-6


@pytest.mark.parametrize("storage", [*STORAGE, torch.float64])
def test_results_have_the_dtype_of_the_factor(storage: torch.dtype) -> None:
    u, n = normal(9, 3), 9
    p, w = probabilities(n, 4)
    factors: list[Factor] = [
        Dense.of(u @ u.mT, storage),
        LowRank.of(u, storage),
        DiagonalLowRank.of(normal(n).abs().to(torch.float64), u, +1, storage),
        DiagonalLowRank.softmax(p * w.sqrt(), storage),
    ]
    want = torch.float64 if storage == torch.float64 else torch.float32
    for factor in factors:
        assert factor.dtype == want
        for y in (normal(n, 2), normal(n, 2).float()):
            answers = [factor.matvec(y), factor.diagonal(), factor.to_dense()]
            assert {a.dtype for a in answers} == {want}, factor.kind
            for damping in (1e-6, 1.0):
                powers = [factor.solve(y, damping), factor.power(y, -0.5, damping), factor.power(y, -1, damping, 9.0)]
                assert {a.dtype for a in powers} == {torch.promote_types(want, y.dtype)}, factor.kind
        numbers = [factor.trace(), factor.frobenius(), factor.logdet(0.1), factor.largest_bound()]
        assert {a.dtype for a in numbers} == {torch.float64}, factor.kind


@pytest.mark.parametrize("kappa", [1e5, 1e6])
@pytest.mark.parametrize("p", [-1.0, -0.5])
def test_powers_of_a_float32_matrix_keep_three_digits_whatever_the_condition(kappa: float, p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
    matrix = (q * torch.logspace(0, -8, 60, dtype=torch.float64)) @ q.mT
    factor, y = Dense.of(matrix.float()), torch.randn(60, 5, generator=generator)
    values, vectors = torch.linalg.eigh(factor.to_dense().double())
    want = (vectors * (values.clamp(min=0) + 1 / kappa).pow(p)) @ (vectors.mT @ y.double())
    assert float((factor.power(y, p, 1 / kappa).double() - want).norm() / want.norm()) < 1e-3
