"""Eigenvectors where the first way to them fails, and what stands in where all of them do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gramian
from gramian.linalg import Cholesky, Dense, DiagonalLowRank, LowRank, eigendecompose
from gramian.linalg.factors.compression import compress
from gramian.linalg.factors.eigendecomposition import singular_pairs
from tests.linalg.matrices import CASES, damped_power, distance, normal, positive, spectrum

FAILURES = [
    torch.linalg.LinAlgError("the algorithm failed to converge"),
    torch.OutOfMemoryError("out of memory"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INVALID_VALUE,\nwhen calling cusolverDnXsyevd"),
]
Break = Callable[[int], list[torch.dtype]]


@pytest.fixture(params=FAILURES, ids=lambda error: type(error).__name__)
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Break:
    """A function that makes the next n calls of eigh fail; it returns the dtypes of all calls."""
    real = torch.linalg.eigh

    def break_it(times: int) -> list[torch.dtype]:
        calls: list[torch.dtype] = []

        def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(matrix.dtype)
            if len(calls) <= times:
                raise request.param
            return real(matrix)

        monkeypatch.setattr(torch.linalg, "eigh", eigh)
        return calls

    return break_it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_is_its_eigenpairs(dtype: torch.dtype) -> None:
    m = positive(9).to(dtype)
    values, vectors, where = eigendecompose(m)
    assert where == f"{str(dtype).removeprefix('torch.')} on cpu"
    assert values.dtype == vectors.dtype == dtype
    assert distance(vectors @ torch.diag(values) @ vectors.mT, m) <= 20 * torch.finfo(dtype).eps
    assert bool((values.diff() >= 0).all())


def test_a_failure_in_float32_is_repaired_in_float64(failing: Break) -> None:
    calls = failing(1)
    m = positive(9).float()
    values, vectors, where = eigendecompose(m)
    assert where == "float64 on cpu"
    assert calls == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    assert distance(vectors @ torch.diag(values) @ vectors.mT, m) <= 1e-6


def test_a_result_that_is_not_finite_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda m: (m.diagonal() * torch.nan, m) if m.dtype == torch.float32 else real(m)
    )
    assert eigendecompose(positive(9).float())[2] == "float64 on cpu"


def test_where_every_try_fails_one_line_says_so(failing: Break) -> None:
    calls = failing(100)
    with pytest.raises(gramian.GramianError, match=r"^eigh: failed in every precision \(\w+\); expected") as raised:
        eigendecompose(positive(9).float())
    assert "\n" not in str(raised.value)
    assert calls == [torch.float32, torch.float64]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    m = positive(9)
    m[2, 5] = m[5, 2] = value
    with pytest.raises(gramian.GramianError, match="^eigh: the matrix holds NaN or infinity"):
        eigendecompose(m)
    y = normal(9, 1)
    for factor in (Dense.of(m), LowRank.of(m[:, :4] * m[5, 2])):
        with pytest.raises(gramian.GramianError, match="holds NaN or infinity"):
            factor.power(y, -0.5, 0.1)
        assert factor.work.fallback == ""


def test_a_dense_factor_falls_back_to_its_diagonal(failing: Break) -> None:
    failing(100)
    m, y = positive(9), normal(9, 3, seed=1)
    factor = Dense.of(m)
    d = m.diagonal()
    for p, max_condition in ((-1.0, None), (-0.5, None), (-1.0, 1.5)):
        floor = 0.0 if max_condition is None else (float(d.max()) + 0.1) / max_condition
        expected = (d + 0.1).clamp(min=floor).pow(p)[:, None] * y
        assert distance(factor.power(y, p, 0.1, max_condition), expected) <= 1e-12
    assert factor.work.fallback.startswith("diagonal in place of eigenvectors: eigh: failed")
    assert distance(factor.eigenvalues(), d.sort().values) <= 1e-12
    assert factor.clip(0.1, 1.5).total == 9


def test_the_fallback_keeps_what_needs_no_eigenvectors(failing: Break) -> None:
    m, y = positive(9), normal(9, 3, seed=1)
    solution, logdet, top = damped_power(m, y, -1, 0.1), float((spectrum(m) + 0.1).log().sum()), float(spectrum(m)[-1])
    failing(100)
    factor = Dense.of(m)
    factor.power(y, -0.5, 0.1)
    assert distance(factor.solve(y, 0.1), solution) <= 1e-11
    assert float(factor.logdet(0.1)) == pytest.approx(logdet, rel=1e-11)
    assert float(factor.largest_bound()) >= top
    assert factor.bound() >= top


def test_a_compressed_fallback_keeps_the_largest_of_the_diagonal(failing: Break) -> None:
    failing(100)
    m = positive(9)
    largest = m.diagonal().sort(descending=True)
    small = compress(Dense.of(m), rank=2)
    expected = torch.zeros(9, dtype=torch.float64)
    expected[largest.indices[:2]] = largest.values[:2]
    assert distance(small.factor.to_dense(), torch.diag(expected)) <= 1e-12
    assert small.discarded_trace == pytest.approx(float(largest.values[2:].sum()))


@pytest.mark.parametrize("name", ["low rank", "low rank wide", "low rank duplicates"])
def test_a_low_rank_factor_falls_back_to_singular_values_and_stays_exact(name: str, failing: Break) -> None:
    case = CASES[name]()
    y = normal(case.factor.dim, 3, seed=1)
    expected = {p: damped_power(case.matrix, y, p, 0.1, 50.0) for p in (-1.0, -0.5, 0.3)}
    failing(100)
    for p, want in expected.items():
        assert distance(case.factor.power(y, p, 0.1, 50.0), want) <= 1e-10
    assert case.factor.work.fallback.startswith("singular values in place of eigenvalues: eigh: failed")


def test_where_singular_values_fail_too_one_line_says_so(failing: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(100)

    def svd(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("no\nluck")

    monkeypatch.setattr(torch.linalg, "svd", svd)
    factor = LowRank.of(normal(9, 3))
    with pytest.raises(gramian.GramianError, match=r"^svd: failed after eigh did \(\w+\); expected") as raised:
        factor.power(normal(9, 1), -0.5, 0.1)
    assert "\n" not in str(raised.value)
    assert bool(factor.solve(normal(9, 1), 0.1).isfinite().all())


def test_singular_pairs_are_eigenpairs() -> None:
    m = positive(9, rank=5)
    values, vectors = singular_pairs(m)
    assert distance(vectors @ torch.diag(values) @ vectors.mT, m) <= 1e-13
    assert float((values - spectrum(m)).abs().max()) <= 1e-13
    assert bool((values.diff() >= 0).all())


def test_a_written_out_matrix_has_its_fallback_on_the_record(failing: Break) -> None:
    case = CASES["softmax"]()
    failing(100)
    assert isinstance(case.factor, DiagonalLowRank)
    assert bool(case.factor.power(normal(12, 1), -0.5, 1e-3, 50.0).isfinite().all())
    assert case.factor.work.fallback.startswith("diagonal in place of eigenvectors")


def test_an_indefinite_matrix_that_cannot_be_decomposed_is_refused_in_one_line(failing: Break) -> None:
    failing(100)
    factorisation = Cholesky(-positive(9), 1e-6)
    with pytest.raises(gramian.GramianError, match="^eigh: failed in every precision"):
        factorisation.solve(normal(9, 1))
