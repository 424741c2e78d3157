"""A solve that always comes back, and a record of what it took."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gramian
from gramian.linalg import Cholesky, Dense
from gramian.linalg.factors.cholesky import settle_all
from tests.kit.matrix import FULL
from tests.linalg.matrices import damped_power, distance, normal, positive, spectrum

FIRST = 1e-6
quick = settings(max_examples=400 if FULL else 60)


def _indefinite(n: int = 8) -> Tensor:
    m = normal(n, n)
    return m + m.mT


def _nearly_singular(n: int = 30) -> Tensor:
    """The Hilbert matrix: positive definite, condition far beyond float64."""
    i = torch.arange(n, dtype=torch.float64)
    return 1 / (i[:, None] + i[None, :] + 1)


def _all_ones(n: int = 8) -> Tensor:
    """Rank one; the second pivot is zero exactly."""
    return torch.ones(n, n, dtype=torch.float64)


MATRICES = {
    "positive": positive(8),
    "nearly singular": _nearly_singular(),
    "rank one": _all_ones(),
    "indefinite": _indefinite(),
    "negative": -positive(8),
    "zero": torch.zeros(8, 8, dtype=torch.float64),
    "zero diagonal": torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64),
    "one": torch.ones(1, 1, dtype=torch.float64),
    "none": torch.zeros(0, 0, dtype=torch.float64),
}


def assert_settled(factorisation: Cholesky) -> None:
    """Every try is there, jitter rising, and only the last one is a success."""
    jitters = [a.jitter for a in factorisation.attempts]
    results = [a.result for a in factorisation.attempts]
    assert jitters[0] == 0
    assert all(result == "not positive definite" for result in results[:-1])
    assert results[-1] == "ok" or results[-1].startswith("eigenvalues raised (")
    tried = [j for j, result in zip(jitters, results, strict=True) if not result.startswith("eigenvalues")]
    assert all(later == pytest.approx(10 * earlier) for earlier, later in itertools.pairwise(tried[1:]))


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_finite_matrix_is_solved(name: str, scale: float, dtype: torch.dtype) -> None:
    matrix = (scale * MATRICES[name]).to(dtype)
    factorisation = Cholesky(matrix, FIRST)
    solution = factorisation.solve(normal(len(matrix), 3, seed=1).to(dtype))
    assert solution.dtype == dtype
    assert bool(solution.isfinite().all())
    assert bool(factorisation.logdet().isfinite())
    assert_settled(factorisation)


def test_a_positive_matrix_is_solved_at_the_first_try() -> None:
    m, y = positive(8), normal(8, 3, seed=1)
    factorisation = Cholesky(m, FIRST)
    assert distance(factorisation.solve(y), damped_power(m, y, -1, 0.0)) <= 1e-11
    assert float(factorisation.logdet()) == pytest.approx(float(spectrum(m).log().sum()), rel=1e-11)
    assert [(a.jitter, a.result) for a in factorisation.attempts] == [(0.0, "ok")]


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_jitter_is_relative_to_the_diagonal(scale: float) -> None:
    m, y = scale * _all_ones(), normal(8, 3, seed=1)
    factorisation = Cholesky(m, FIRST)
    first = factorisation.attempts[1]
    assert first.jitter == pytest.approx(1e-6 * scale)
    assert first.result == "ok"
    assert distance(factorisation.solve(y), damped_power(m, y, -1, first.jitter)) <= 1e-6


def test_a_large_matrix_in_float32_would_not_feel_an_absolute_jitter() -> None:
    m = (1e8 * _all_ones()).float()
    assert torch.equal(m + FIRST * torch.eye(8), m)
    factorisation = Cholesky(m, FIRST)
    assert factorisation.attempts[1].jitter == pytest.approx(1e2)
    assert factorisation.attempts[1].result == "ok"


def test_jitter_rises_tenfold_until_it_is_enough() -> None:
    m = torch.eye(8, dtype=torch.float64)
    m[0, 0] = -2e-4  # too little at 1e-6, 1e-5 and 1e-4 of the mean diagonal
    factorisation = Cholesky(m, FIRST)
    scale = (7 + 2e-4) / 8
    assert [a.jitter for a in factorisation.attempts] == pytest.approx(
        [0, 1e-6 * scale, 1e-5 * scale, 1e-4 * scale, 1e-3 * scale]
    )
    assert factorisation.attempts[-1].result == "ok"


def test_an_indefinite_matrix_has_its_eigenvalues_raised() -> None:
    m, y = _indefinite(), normal(8, 3, seed=1)
    factorisation = Cholesky(m, FIRST)
    last = factorisation.attempts[-1]
    values, vectors = torch.linalg.eigh(m)
    assert last.jitter == pytest.approx(1e-6 * float(m.diagonal().abs().mean()))
    raised = values.clamp(min=last.jitter)
    assert distance(factorisation.solve(y), vectors @ ((vectors.mT @ y) / raised[:, None])) <= 1e-9
    assert float(factorisation.logdet()) == pytest.approx(float(raised.log().sum()), rel=1e-9)
    assert last.result == "eigenvalues raised (float64 on cpu)"
    assert len(factorisation.attempts) >= 7


def test_a_matrix_without_a_scale_of_its_own_counts_as_one() -> None:
    factorisation = Cholesky(MATRICES["zero"], FIRST)
    assert [(a.jitter, a.result) for a in factorisation.attempts[1:]] == [(FIRST, "ok")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_eigenvalue_is_left_below_what_rounding_can_tell_from_zero(dtype: torch.dtype) -> None:
    m = torch.tensor([[1e-30, 1.0], [1.0, 1e-30]], dtype=dtype)
    assert Cholesky(m, FIRST).attempts[-1].jitter == pytest.approx(torch.finfo(dtype).eps)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (5, 2), (7, 7)])
def test_what_is_not_finite_is_refused_every_time(value: float, place: tuple[int, int]) -> None:
    m = positive(8)
    m[place] = m[place[::-1]] = value
    factorisation = Cholesky(m, FIRST)
    for use in (lambda: factorisation.solve(normal(8, 1)), factorisation.logdet, lambda: factorisation.attempts):
        with pytest.raises(gramian.GramianError, match="^cholesky: the matrix holds NaN or infinity"):
            use()


@quick
@given(
    entries=st.lists(st.integers(-1000, 1000) | st.integers(-1, 1), min_size=10, max_size=10),
    exponent=st.integers(-20, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_symmetric_matrix_is_solved(entries: list[int], exponent: int, dtype: torch.dtype) -> None:
    m = torch.zeros(4, 4, dtype=torch.float64)
    m[tuple(torch.tril_indices(4, 4))] = torch.tensor(entries, dtype=torch.float64)
    m = m + m.tril(-1).mT
    top = float(m.abs().max())
    if top > 0:
        m = m / top * 10.0**exponent
    factorisation = Cholesky(m.to(dtype), FIRST)
    # a pivot may be as small as rounding allows: small right-hand sides, lest a true solution leave float32
    assert bool(factorisation.solve(torch.eye(4, dtype=dtype) * 1e-3).isfinite().all())
    assert_settled(factorisation)


@pytest.mark.parametrize("name", ["positive", "rank one", "indefinite", "nearly singular"])
def test_many_columns_are_solved_as_few_are(name: str) -> None:
    m = MATRICES[name]
    y = normal(len(m), 2 * len(m), seed=1)
    few, many = Cholesky(m, FIRST), Cholesky(m, FIRST)
    expected = torch.cat([few.solve(part) for part in y.split(2, dim=1)], dim=1)
    logdet = float(many.logdet())
    assert distance(many.solve(y), expected) <= 1e-6
    assert distance(many.solve(y[:, :2]), expected[:, :2]) <= 1e-6
    assert float(many.logdet()) == logdet
    assert many.nbytes <= m.nbytes + m[0].nbytes
    assert many.attempts == few.attempts


def test_many_factorisations_are_looked_at_together() -> None:
    matrices = [m for m in MATRICES.values() if len(m)]
    alone, together = [[Cholesky(m, FIRST) for m in matrices] for _ in range(2)]
    together[0].solve(normal(len(matrices[0]), 1))  # looked at before
    settle_all(together)
    assert [system.attempts for system in together] == [system.attempts for system in alone]
    settle_all([])


def test_a_factor_records_what_its_solve_took() -> None:
    m = _all_ones()
    m[0, 0] = 1 - 1e-3  # slightly indefinite
    factor = Dense.of(m)
    factor.prepare_solve(1e-9, FIRST)
    solution = factor.solve(normal(8, 2), 1e-9, FIRST)
    assert bool(solution.isfinite().all())
    assert factor.work.attempts[0] == {"jitter": 0.0, "result": "not positive definite"}
    assert factor.work.attempts[1]["jitter"] == pytest.approx(1e-6, rel=1e-3)
    assert factor.work.attempts[-1]["result"] == "ok"


def test_the_matrix_is_held_until_the_first_use_and_not_changed() -> None:
    m = _all_ones()
    before = m.clone()
    factorisation = Cholesky(m, FIRST)
    assert factorisation.nbytes == 2 * m.nbytes
    factorisation.solve(normal(8, 1))
    assert factorisation.nbytes == m.nbytes
    assert torch.equal(m, before)
