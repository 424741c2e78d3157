"""Half precision at rest: nothing underflows or overflows, the error is known, and positive stays positive."""

import math

import pytest
import torch
from torch import Tensor

import gramian
from gramian.linalg import Dense, DiagonalLowRank, LowRank
from gramian.linalg.factors.stored import Stored, join_columns, store_columns, store_symmetric
from tests.linalg.matrices import (
    assert_positive,
    distance,
    normal,
    positive,
    probabilities,
    softmax_fisher,
    stored_matrix,
)

LARGEST_ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
half = pytest.mark.parametrize("storage", LARGEST_ERROR)
sources = pytest.mark.parametrize("source", [torch.float32, torch.float64])


def _columns(low: float, high: float, n: int = 300, r: int = 12) -> Tensor:
    """Columns of very different scales, 10^low to 10^high."""
    return normal(n, r) * torch.logspace(low, high, r, dtype=torch.float64)


def _symmetric(low: float, high: float, n: int = 40) -> Tensor:
    """Rows and columns of very different scales."""
    scale = torch.logspace(low, high, n, dtype=torch.float64).sqrt()
    return positive(n) * scale[:, None] * scale[None, :]


def assert_stored(stored: Stored, matrix: Tensor, storage: torch.dtype) -> None:
    assert stored.body.dtype == storage
    loaded = stored.load(dtype=torch.float64)
    assert distance(loaded, matrix) <= LARGEST_ERROR[storage]
    assert float(stored.relative_error) == pytest.approx(distance(loaded, matrix), rel=1e-4)
    for column, want in zip(loaded.mT, matrix.double().mT, strict=True):
        assert distance(column, want) <= LARGEST_ERROR[storage]


@half
@sources
def test_tiny_columns_of_any_scale_are_kept(storage: torch.dtype, source: torch.dtype) -> None:
    u = _columns(-12, -7).to(source)
    assert float((u.half() == 0).double().mean()) > 0.6  # what a plain cast makes of them
    assert_stored(store_columns(u, storage), u, storage)


@half
@sources
def test_tiny_symmetric_matrices_of_any_scale_are_kept(storage: torch.dtype, source: torch.dtype) -> None:
    m = _symmetric(-14, -8).to(source)
    assert float((m.half() == 0).double().mean()) > 0.6
    assert_stored(store_symmetric(m, storage), m, storage)


@half
@sources
def test_large_numbers_are_kept(storage: torch.dtype, source: torch.dtype) -> None:
    u, m = _columns(3, 9).to(source), _symmetric(3, 9).to(source)
    assert bool(u.half().isinf().any())
    assert bool(m.half().isinf().any())
    assert_stored(store_columns(u, storage), u, storage)
    assert_stored(store_symmetric(m, storage), m, storage)


@half
@sources
@pytest.mark.parametrize("exponent", [-28, 28])
def test_the_error_is_right_where_its_squares_leave_float32(
    storage: torch.dtype, source: torch.dtype, exponent: int
) -> None:
    u = (normal(50, 4) * 10.0**exponent).to(source)
    assert_stored(store_columns(u, storage), u, storage)


@half
def test_columns_that_arrive_in_half_precision_are_kept_exactly(storage: torch.dtype) -> None:
    u = (_columns(-6, -1)).to(storage)
    stored = store_columns(u, storage)
    assert float(stored.relative_error) == 0
    assert torch.equal(stored.load(dtype=torch.float64), u.double())
    m = _symmetric(-5, -2).to(storage)
    assert_stored(store_symmetric(m, storage), m, storage)


@half
def test_zero_columns_stay_zero_and_harm_nobody(storage: torch.dtype) -> None:
    u = _columns(-9, -7)
    u[:, [0, 5]] = 0
    assert_stored(store_columns(u, storage), u, storage)
    zero = store_columns(torch.zeros(5, 3), storage)
    assert torch.equal(zero.load(), torch.zeros(5, 3))
    assert float(zero.relative_error) == 0
    assert torch.equal(store_symmetric(torch.zeros(5, 5), storage).load(), torch.zeros(5, 5))
    assert store_columns(torch.zeros(5, 0), storage).load().shape == (5, 0)
    assert store_columns(torch.zeros(0, 5), storage).load().shape == (0, 5)


@half
def test_scaling_by_powers_of_two_is_exact(storage: torch.dtype) -> None:
    u = normal(20, 3).to(storage).double()
    assert torch.equal(store_columns(2.0**-40 * u, storage).load(dtype=torch.float64), 2.0**-40 * u)


@pytest.mark.parametrize("storage", [torch.float32, torch.float64])
def test_wide_storage_is_plain(storage: torch.dtype) -> None:
    u = normal(20, 3)
    stored = store_columns(u, storage)
    assert stored.right is None
    assert torch.equal(stored.body, u.to(storage))
    assert float(stored.relative_error) == pytest.approx(distance(u.to(storage), u), rel=1e-4)


@half
def test_what_is_not_finite_does_not_get_lost(storage: torch.dtype) -> None:
    u = normal(9, 3)
    u[2, 1] = torch.nan
    with pytest.raises(gramian.GramianError, match="NaN"):
        LowRank.of(u, storage).power(normal(9, 1), -0.5, 0.1)
    with pytest.raises(gramian.GramianError, match="NaN"):
        LowRank.of(u, storage).solve(normal(9, 1), 0.1)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_multiple_and_a_join_round_nothing(storage: torch.dtype) -> None:
    a, b = store_columns(_columns(-9, -7), storage), store_columns(_columns(2, 5, r=3), storage)
    wide = [part.load(dtype=torch.float64) for part in (a, b)]
    joined = join_columns(a.scaled(0.3), b.scaled(1.7))
    assert joined.body.dtype == storage
    assert distance(joined.load(dtype=torch.float64), torch.cat([0.3 * wide[0], 1.7 * wide[1]], 1)) <= 1e-15
    assert float(joined.relative_error) == max(float(a.relative_error), float(b.relative_error))


@half
def test_a_factor_reports_the_error_of_its_matrix(storage: torch.dtype) -> None:
    u, m = _columns(-9, -7), _symmetric(-9, -7)
    dense = Dense.of(m, storage)
    assert float(dense.quantisation_error) == pytest.approx(distance(stored_matrix(dense), m), rel=1e-4)
    low = LowRank.of(u, storage)
    e = float(low.columns.stored.relative_error)
    assert float(low.quantisation_error) == 2 * e
    assert distance(stored_matrix(low), u @ u.mT) <= math.sqrt(low.rank) * (2 * e + e**2)


@half
def test_low_rank_factors_stay_positive(storage: torch.dtype) -> None:
    assert_positive(stored_matrix(LowRank.of(_columns(-12, -7, n=60), storage)))
    d = torch.logspace(-9, -4, 60, dtype=torch.float64)
    assert_positive(stored_matrix(DiagonalLowRank.of(d, _columns(-9, -4, n=60), +1, storage)))


@half
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0, 100.0])
def test_softmax_heads_stay_positive(storage: torch.dtype, sharpness: float) -> None:
    p, w = probabilities(150, 30, sharpness)
    for scale in (1.0, 1e-8, 1e8):
        factor = DiagonalLowRank.softmax(p * (scale * w).sqrt(), storage)
        assert_positive(stored_matrix(factor))
        assert distance(stored_matrix(factor), scale * softmax_fisher(p, w)) <= 30 * LARGEST_ERROR[storage]


@pytest.mark.full
def test_a_wide_confident_softmax_head_stays_positive_in_float16() -> None:
    p, w = probabilities(2000, 24, sharpness=20.0)
    assert float(p.max(0).values.median()) > 0.9
    u = p * w.sqrt()
    factor = DiagonalLowRank.softmax(u.float(), torch.float16)
    assert_positive(stored_matrix(factor))
    rounded = store_columns(u, torch.float16).load(dtype=torch.float64)
    naive = torch.linalg.eigvalsh(torch.diag(p @ w) - rounded @ rounded.mT)  # with the diagonal of the exact columns
    assert float(naive[0]) < -1e-6 * float(naive[-1])


@half
@sources
def test_a_softmax_head_that_is_stored_again_stays_positive(storage: torch.dtype, source: torch.dtype) -> None:
    p, w = probabilities(150, 30, sharpness=3.0)
    wide = DiagonalLowRank.softmax(p * w.sqrt(), source)
    narrow = wide.to(dtype=storage)
    assert_positive(stored_matrix(narrow))
    assert distance(stored_matrix(narrow), softmax_fisher(p, w)) <= 4 * LARGEST_ERROR[storage]
    assert_positive(stored_matrix(narrow.to(dtype=source)))


def test_what_is_left_of_a_confident_softmax_head_is_right_in_half_precision() -> None:
    p, w = probabilities(60, 20, sharpness=30.0)
    factor = DiagonalLowRank.softmax(p * w.sqrt(), torch.float16)
    m = stored_matrix(factor)
    assert float(m.trace()) < 0.2 * float(factor.values_N.sum())
    assert float(factor.trace()) == pytest.approx(float(m.trace()), rel=1e-9)
    assert float(factor.frobenius()) == pytest.approx(float(m.norm()), rel=1e-6)
    assert distance(factor.diagonal(), m.diagonal()) <= 1e-6
