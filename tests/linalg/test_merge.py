"""Weighted sums of factors, and factors of lower rank."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gramian
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg import wide as wide_module
from gramian.linalg.factors import merging
from gramian.linalg.factors.compression import compress
from gramian.linalg.factors.merging import merge
from tests.kit.memory import measured
from tests.linalg.matrices import (
    CASES,
    assert_positive,
    distance,
    normal,
    positive,
    probabilities,
    softmax_fisher,
    stored_matrix,
)

pytestmark = pytest.mark.oracle

WEIGHTS = (0.9, 0.3)


def _softmax(n: int, seed: int, storage: torch.dtype, tokens: int = 3) -> DiagonalLowRank:
    p, w = probabilities(n, tokens, sharpness=3.0, seed=seed)
    return DiagonalLowRank.softmax(p * w.sqrt(), storage)


KINDS: dict[str, Callable[[int, int, torch.dtype], Factor]] = {
    "dense": lambda n, seed, dtype: Dense.of(positive(n, seed=seed), dtype),
    "low rank": lambda n, seed, dtype: LowRank.of(normal(n, 3, seed=seed), dtype),
    "diagonal": lambda n, seed, dtype: Diagonal(normal(n, seed=seed).abs()),
    "plus": lambda n, seed, dtype: DiagonalLowRank.of(normal(n, seed=seed).abs(), normal(n, 2, seed=seed), +1, dtype),
    "softmax": _softmax,
}
PAIRS = [*itertools.product(KINDS, KINDS)]
REFUSED = {frozenset(("low rank", "softmax")), frozenset(("plus", "softmax"))}


def _sum(left: Factor, right: Factor) -> Tensor:
    return WEIGHTS[0] * stored_matrix(left) + WEIGHTS[1] * stored_matrix(right)


@pytest.mark.parametrize("left, right", [pair for pair in PAIRS if frozenset(pair) not in REFUSED])
def test_a_merged_factor_is_the_weighted_sum(left: str, right: str) -> None:
    a, b = KINDS[left](12, 0, torch.float64), KINDS[right](12, 1, torch.float64)
    merged = merge(a, b, *WEIGHTS)
    assert distance(merged.to_dense(), _sum(a, b)) <= 1e-12
    y = normal(12, 2, seed=2)
    assert distance(merged.matvec(y), _sum(a, b) @ y) <= 1e-12


@pytest.mark.parametrize("left, right", PAIRS)
def test_sides_that_differ_are_named(left: str, right: str) -> None:
    a, b = KINDS[left](12, 0, torch.float64), KINDS[right](11, 1, torch.float64)
    with pytest.raises(gramian.GramianError, match=r"^merge: sides of 1[12] and 1[12]; expected equal ones$"):
        merge(a, b, *WEIGHTS)


@pytest.mark.parametrize("left, right", [pair for pair in PAIRS if frozenset(pair) in REFUSED])
def test_columns_of_different_sign_do_not_merge(left: str, right: str) -> None:
    a, b = KINDS[left](12, 0, torch.float64), KINDS[right](12, 1, torch.float64)
    with pytest.raises(gramian.GramianError, match=r"^merge: a .* and a .*; expected the same representation$"):
        merge(a, b, *WEIGHTS)


@pytest.mark.parametrize("left, right", [pair for pair in PAIRS if frozenset(pair) not in REFUSED])
def test_merging_in_half_precision_costs_at_most_one_rounding(left: str, right: str) -> None:
    a, b = KINDS[left](12, 0, torch.float16), KINDS[right](12, 1, torch.float16)
    merged = merge(a, b, *WEIGHTS)
    assert merged.dtype in (torch.float32, torch.float64)
    rounded = isinstance(merged, Dense)
    assert distance(stored_matrix(merged), _sum(a, b)) <= (1e-3 if rounded else 1e-12)


@pytest.mark.parametrize("left, right", [pair for pair in PAIRS if frozenset(pair) not in REFUSED])
def test_a_sum_says_what_its_parts_were_off_by(left: str, right: str) -> None:
    rounded, exact = ([KINDS[kind](12, i, dtype) for i, kind in enumerate((left, right))] for dtype in KEPT)
    merged, wanted = merge(rounded[0], rounded[1], *WEIGHTS), _sum(*exact)
    if isinstance(merged, Dense):
        off, told = distance(stored_matrix(merged), wanted), float(merged.quantisation_error)
        assert 1e-7 < off <= told + 1e-7 and told <= 20 * off


KEPT = (torch.float16, torch.float64)


@pytest.mark.parametrize("left, right", [("dense", "dense"), ("low rank", "low rank"), ("plus", "dense")])
def test_a_sum_that_is_written_out_holds_one_matrix_beside_itself(
    left: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_module, "BLOCK", 2000)
    monkeypatch.setitem(KINDS, "low rank", lambda n, seed, dtype: LowRank.of(normal(n, n // 2, seed=seed), dtype))
    n = 400
    a, b = KINDS[left](n, 0, torch.float16), KINDS[right](n, 1, torch.float16)
    with measured() as found:
        merged = merge(a, b, *WEIGHTS)
    assert isinstance(merged, Dense) and merged.nbytes == 4 * n * n
    assert found.peak <= 2 * merged.nbytes + 3 * 8 * 2000 + 20_000


@pytest.mark.parametrize("first, second", [*itertools.permutations([torch.float16, torch.float32, torch.float64], 2)])
@pytest.mark.parametrize("kind", ["low rank", "softmax"])
def test_columns_of_different_precision_merge(kind: str, first: torch.dtype, second: torch.dtype) -> None:
    a, b = KINDS[kind](12, 0, first), KINDS[kind](12, 1, second)
    merged = merge(a, b, *WEIGHTS)
    assert merged.storage_dtype == first
    assert distance(stored_matrix(merged), _sum(a, b)) <= 2e-3
    if kind == "softmax":
        assert_positive(stored_matrix(merged))


@pytest.mark.parametrize("kind", ["low rank", "softmax"])
def test_a_moving_average_in_half_precision_does_not_drift(kind: str) -> None:
    total = KINDS[kind](200, 0, torch.float16)
    expected = stored_matrix(total)
    for seed in range(1, 30):
        new = KINDS[kind](200, seed, torch.float16)
        total, expected = merge(total, new, 0.9, 0.1), 0.9 * expected + 0.1 * stored_matrix(new)
    assert distance(stored_matrix(total), expected) <= 1e-12
    assert_positive(stored_matrix(total))


def test_low_rank_becomes_dense_once_its_columns_are_as_many_as_its_rows() -> None:
    a, b, c = (LowRank.of(normal(8, r, seed=r)) for r in (3, 4, 5))
    thin, whole = merge(a, b, *WEIGHTS), merge(a, c, *WEIGHTS)
    assert isinstance(thin, LowRank)
    assert thin.rank == 7
    assert isinstance(whole, Dense)
    assert distance(whole.to_dense(), _sum(a, c)) <= 1e-12


def test_low_rank_stays_so_where_dense_would_be_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "WIDEST_DENSE", 7)
    a, b = LowRank.of(normal(8, 4)), LowRank.of(normal(8, 5, seed=1))
    merged = merge(a, b, *WEIGHTS)
    assert isinstance(merged, LowRank)
    assert distance(merged.to_dense(), _sum(a, b)) <= 1e-12


def test_a_merge_leaves_its_parts_alone() -> None:
    for left, right in PAIRS:
        if frozenset((left, right)) in REFUSED:
            continue
        a, b = KINDS[left](12, 0, torch.float64), KINDS[right](12, 1, torch.float64)
        before = stored_matrix(a).clone(), stored_matrix(b).clone()
        merge(a, b, *WEIGHTS)
        assert torch.equal(stored_matrix(a), before[0])
        assert torch.equal(stored_matrix(b), before[1])


# ---- lower rank ------------------------------------------------------------------------------------------------------

SPECTRAL = ("dense", "dense singular", "low rank", "low rank wide", "low rank duplicates", "low rank zero columns")


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("rank", [1, 2, 3, 100])
def test_the_leading_directions_are_the_best_approximation(name: str, rank: int) -> None:
    case = CASES[name]()
    small = compress(case.factor, rank=rank)
    values, vectors = torch.linalg.eigh(case.matrix)
    best = vectors[:, -rank:] @ torch.diag(values[-rank:]) @ vectors[:, -rank:].mT
    assert small.factor.rank <= rank
    assert distance(small.factor.to_dense(), best) <= 1e-9
    lost = float(case.matrix.trace() - best.trace())
    assert small.discarded_trace == pytest.approx(lost, abs=1e-10 * float(case.matrix.trace()))


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("energy", [1e-6, 0.5, 0.9, 0.999, 1.0])
def test_a_share_of_the_trace_is_held_by_as_few_directions_as_possible(name: str, energy: float) -> None:
    case = CASES[name]()
    small = compress(case.factor, energy=energy)
    descending = torch.linalg.eigvalsh(case.matrix).flip(0)
    total = float(case.matrix.trace())
    kept = float(small.factor.trace())
    assert kept >= energy * total * (1 - 1e-10)
    assert kept - float(descending[small.factor.rank - 1]) < energy * total
    assert small.discarded_trace == pytest.approx(total - kept, abs=1e-10 * total)


@pytest.mark.parametrize("name", ["plus", "plus wide", "softmax", "softmax wide", "softmax confident"])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_beside_a_diagonal_only_the_columns_are_compressed(name: str, rank: int) -> None:
    case = CASES[name]()
    small = compress(case.factor, rank=rank)
    u = case.factor.columns.stored.load()
    values, vectors = torch.linalg.eigh(u @ u.mT)
    best = vectors[:, -rank:] @ torch.diag(values[-rank:]) @ vectors[:, -rank:].mT
    assert distance(small.factor.to_dense(), torch.diag(case.factor.values_N) + case.factor.sign * best) <= 1e-10
    change = abs(float(small.factor.trace() - case.factor.trace()))
    assert small.discarded_trace == pytest.approx(change, abs=1e-10)
    assert_positive(small.factor.to_dense())


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 30])
def test_a_compressed_softmax_head_stays_positive_in_half_precision(storage: torch.dtype, rank: int) -> None:
    factor = _softmax(80, 0, storage, tokens=30)
    small = compress(factor, rank=rank)
    assert_positive(stored_matrix(small.factor))
    if rank == 30:
        assert distance(stored_matrix(small.factor), stored_matrix(factor)) <= 4 * torch.finfo(storage).eps


@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.float16])
def test_thinned_columns_are_scaled_so_that_nothing_is_lost_in_the_mean(storage: torch.dtype) -> None:
    u, chosen = normal(9, 6), torch.tensor([0, 2, 5])
    for merged in (False, True):
        low = LowRank.of(u, storage)
        plus = DiagonalLowRank.of(normal(9).abs(), u, +1, storage)
        if merged:  # columns with scales of their own
            low, plus = (
                merge(low, LowRank.of(u[:, :1], storage), 0.7, 0.3),
                merge(plus, Diagonal(normal(9).abs()), 0.7, 0.3),
            )
        for factor in (low, plus):
            kept = factor.columns.stored.load(dtype=torch.float64)[:, chosen]
            thin = factor.thin(chosen)
            expected = (factor.rank / 3) * kept @ kept.mT
            if isinstance(factor, DiagonalLowRank):
                expected = expected + torch.diag(factor.values_N.double())
            assert thin.rank == 3
            assert distance(stored_matrix(thin), expected) <= (1e-14 if storage == torch.float64 else 1e-6)


@pytest.mark.parametrize("storage", [torch.float64, torch.float16])
def test_a_thinned_softmax_head_stays_positive_and_is_itself_in_the_mean(storage: torch.dtype) -> None:
    counts = Diagonal(normal(40).abs().double())
    heads = [_softmax(40, 0, storage, tokens=6), _softmax(40, 1, storage, tokens=6)]
    factor = merge(merge(heads[0], heads[1], *WEIGHTS), counts, 1.0, 0.1)
    choices = [torch.tensor(chosen) for chosen in itertools.combinations(range(12), 2)]
    mean = torch.zeros(40, 40, dtype=torch.float64)
    for chosen in choices:
        thin = factor.thin(chosen)
        assert thin.rank == 2
        assert_positive(stored_matrix(thin))
        mean += stored_matrix(thin) / len(choices)
    assert distance(mean, stored_matrix(factor)) <= (1e-12 if storage == torch.float64 else 2e-3)


def test_a_diagonal_is_its_own_compression() -> None:
    case = CASES["diagonal"]()
    small = compress(case.factor, rank=2)
    assert small.factor is case.factor
    assert small.discarded_trace == 0


def test_no_columns_compress_to_none() -> None:
    small = compress(CASES["low rank no columns"]().factor, rank=2)
    assert small.factor.rank == 0
    assert small.discarded_trace == 0


@pytest.mark.parametrize("name", ["dense", "low rank", "diagonal", "plus", "softmax"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "^compress: expected either rank= or energy="),
        ({"rank": 2, "energy": 0.5}, "^compress: expected either rank= or energy="),
        ({"rank": 0}, "^rank: expected at least 1, got 0"),
        ({"rank": -3}, "^rank: expected at least 1, got -3"),
        ({"energy": 0.0}, r"^energy: expected a share of the trace in \(0, 1\], got 0.0"),
        ({"energy": 1.5}, r"^energy: expected a share of the trace in \(0, 1\], got 1.5"),
        ({"energy": float("nan")}, r"^energy: expected a share of the trace in \(0, 1\], got nan"),
    ],
)
def test_a_compression_that_makes_no_sense_is_refused(name: str, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(gramian.GramianError, match=message):
        compress(CASES[name]().factor, **arguments)


def test_a_softmax_head_is_the_fisher_of_its_tokens() -> None:
    p, w = probabilities(9, 4)
    factor = DiagonalLowRank.softmax(p * w.sqrt(), torch.float64)
    assert distance(factor.to_dense(), softmax_fisher(p, w)) <= 1e-13
    assert float(factor.matvec(torch.ones(9, 1, dtype=torch.float64)).abs().max()) <= 1e-15
