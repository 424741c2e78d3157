"""Factors whose U lies on several gloo processes, against the same factor in one."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors import diagonal_low_rank, merging
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.compression import compress
from gramian.linalg.factors.merging import merge
from gramian.linalg.factors.stored import store_columns
from gramian.parallel.exchange import Exchange, exchange_of
from gramian.parallel.sharded_columns import ShardedColumns
from tests.dist.worlds import ranks_agree
from tests.kit.matrix import sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.linalg.matrices import distance, normal

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

WORLDS = (2, 3, 4)
STORAGES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
ROUNDED = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Where what is compared was rounded to the storage dtype after a product."""
Make = Callable[[Tensor, Callable[[Tensor], Columns]], Factor]


COLUMNS: dict[str, Tensor] = {
    "tall": normal(13, 4),
    "wide": normal(7, 15),
    "square": normal(8, 8),
    "duplicates": torch.cat([normal(11, 3), normal(11, 3), normal(11, 1)], dim=1),
    "spread": normal(10, 5) * torch.logspace(-9, 0, 5, dtype=torch.float64),
    "zero": torch.zeros(6, 3, dtype=torch.float64),
    "no columns": normal(6, 0),
    "fewer features than ranks": normal(1, 3),
    "two features": normal(2, 1),
}
MAKES: dict[str, Make] = {
    "low rank": lambda u, held: LowRank(held(u)),
    "plus": lambda u, held: DiagonalLowRank(normal(len(u), seed=3).abs(), held(u), +1),
    "softmax": lambda u, held: DiagonalLowRank.softmax_of(held(u.abs() / (1 + u.abs().sum(0)))),
}
MATRIX = [*itertools.product(MAKES, WORLDS, COLUMNS, STORAGES)]


def _joined() -> Exchange:
    exchange = exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    return exchange


def _sharded(u: Tensor, exchange: Exchange, storage: torch.dtype) -> ShardedColumns:
    return ShardedColumns.of(u[exchange.features(len(u))[exchange.rank]], len(u), exchange, storage)


def _pair(make: str, u: Tensor, storage: torch.dtype, exchange: Exchange) -> tuple[Any, Any]:
    """In one process, and on several."""
    one = MAKES[make](u, lambda columns: Columns(store_columns(columns, storage)))
    return one, MAKES[make](u, lambda columns: _sharded(columns, exchange, storage))


def _assert_same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.dtype == expected.dtype
    assert (error := distance(actual, expected)) <= tolerance, error
    assert ranks_agree(float(actual.double().sum()))


def _assert_same_bits(actual: Any, expected: Any) -> None:
    """Of two factors' columns: scales, error and body, and that each process holds its rows only."""
    assert isinstance(actual.columns, ShardedColumns) and actual.dim == expected.dim
    held, whole, wanted = actual.columns.stored, actual.columns.whole().stored, expected.columns.stored
    assert len(held.body) == actual.columns.part.stop - actual.columns.part.start < actual.dim or actual.dim < 2
    assert torch.equal(whole.body, wanted.body) and whole.left is None
    assert (whole.right is None) == (wanted.right is None)
    assert whole.right is None or (whole.right.dtype == wanted.right.dtype and torch.equal(whole.right, wanted.right))
    assert distance(whole.relative_error, wanted.relative_error) <= 1e-12


def _answers(factor: Any, y: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        "matvec": factor.matvec(y), "solve": factor.solve(y, 0.1), "trace": factor.trace(),
        "frobenius": factor.frobenius(), "diagonal": factor.diagonal(), "dense": factor.to_dense(),
        "logdet": factor.logdet(0.1), "bound": factor.largest_bound(), "error": factor.quantisation_error,
    }  # fmt: skip
    for p, max_condition in itertools.product((-1.0, -0.5, 0.5, 1.0), (None, 3.0)):
        found[f"power {p} {max_condition}"] = factor.power(y, p, 0.1, max_condition)
    found["eigenvalues"] = factor.eigenvalues()
    found["logdet, decomposed"] = factor.logdet(0.1)
    clip = factor.clip(0.1, 3.0)
    found["clip"] = torch.tensor([clip.count, clip.total, clip.mass, clip.floor], dtype=torch.float64)
    if factor.dim > 1:
        found["compressed"] = compress(factor, rank=2).factor.to_dense()
    return found


def _factors(rank: int, world_size: int, make: str, columns: str, storage: torch.dtype) -> None:
    u = COLUMNS[columns]
    one, several = _pair(make, u, storage, _joined())
    _assert_same_bits(several, one)
    y = normal(len(u), 3, seed=1)
    expected, actual = _answers(one, y), _answers(several, y)
    for name, want in expected.items():
        tolerance = ROUNDED[storage] if name == "compressed" else TOLERANCE[storage]
        if isinstance(one, DiagonalLowRank) and (want_size := float(want.double().norm())) < 1e-9:
            # a single feature of a softmax head: M = 0
            assert want_size + float(actual[name].double().norm()) <= 1e-9, name
            continue
        try:
            _assert_same(actual[name], want, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    low = compress(several, energy=0.9).factor if u.shape[1] else several
    assert isinstance(low.columns, ShardedColumns)


@pytest.mark.dist
@pytest.mark.parametrize("make, world_size, columns, storage", sample(MATRIX, 9, lambda item: item[2]))
def test_a_factor_on_several_processes_is_the_factor(
    make: str, world_size: int, columns: str, storage: torch.dtype
) -> None:
    run_on_ranks(world_size, _factors, make, columns, storage)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "merge": lambda a, b: merge(a, b, 0.9, 0.3),
    "merge twice": lambda a, b: merge(merge(a, b, 0.9, 0.3), b, 0.5, 0.5),
    "thin": lambda a, b: a.thin(torch.tensor([0, 2])),
    "thin and merge": lambda a, b: merge(a.thin(torch.tensor([0, 2])), b.thin(torch.tensor([1])), 0.9, 0.1),
    "scaled and stored again": lambda a, b: merge(a, b, 1e-9, 1e-12).to(dtype=torch.bfloat16),
    "moved": lambda a, b: a.to("cpu"),
    "to float16": lambda a, b: a.to(dtype=torch.float16),
    "to float32": lambda a, b: a.to(dtype=torch.float32),
    "to float64": lambda a, b: a.to(dtype=torch.float64),
}


PAIRS = [
    *((storage, storage) for storage in STORAGES),
    (torch.float64, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
]


def _changed(rank: int, world_size: int, make: str, change: str, storage: torch.dtype, other: torch.dtype) -> None:
    exchange = _joined()
    one, several = _pair(make, normal(41, 4) * 2.0 ** torch.arange(4), storage, exchange)
    other_one, other_several = _pair(make, normal(41, 3, seed=5), other, exchange)
    expected, actual = CHANGES[change](one, other_one), CHANGES[change](several, other_several)
    if make == "low rank":
        _assert_same_bits(actual, expected)
    assert isinstance(actual.columns, ShardedColumns) and actual.rank == expected.rank
    assert actual.storage_dtype == expected.storage_dtype
    _assert_same(actual.to_dense(), expected.to_dense(), TOLERANCE[actual.dtype])
    _assert_same(actual.solve(normal(41, 2), 0.1), expected.solve(normal(41, 2), 0.1), TOLERANCE[actual.dtype])


@pytest.mark.dist
@pytest.mark.parametrize(
    "change, make, world_size, storage, other",
    sample(
        [(*case, *pair) for *case, pair in itertools.product(CHANGES, MAKES, (2, 3), PAIRS)], 27, lambda item: item[:2]
    ),
)
def test_what_is_made_of_factors_is_the_same_and_stays_where_it_is(
    change: str, make: str, world_size: int, storage: torch.dtype, other: torch.dtype
) -> None:
    run_on_ranks(world_size, _changed, make, change, storage, other)


@pytest.mark.full
@pytest.mark.parametrize("storage", [torch.float64, pytest.param(torch.float16, marks=pytest.mark.full)])
@distributed(world_size=3)
def test_factors_of_one_process_and_of_several_merge(rank: int, storage: torch.dtype) -> None:
    exchange = _joined()
    u, v, y = normal(17, 3), normal(17, 2, seed=5), normal(17, 2, seed=6)
    for left, right in [("low rank", "low rank"), ("plus", "plus"), ("plus", "low rank"), ("low rank", "plus")]:
        a, a_several = _pair(left, u, storage, exchange)
        b, b_several = _pair(right, v, storage, exchange)
        expected = merge(a, b, 0.9, 0.3)
        for merged in (
            merge(a, b_several, 0.9, 0.3),
            merge(a_several, b, 0.9, 0.3),
            merge(a_several, b_several, 0.9, 0.3),
        ):
            assert isinstance(merged.columns, ShardedColumns)
            _assert_same(merged.to_dense(), expected.to_dense(), 1e-6 if storage != torch.float64 else 1e-12)
            _assert_same(merged.power(y, -0.5, 0.1), expected.power(y, -0.5, 0.1), 1e-12)
    a, a_several = _pair("low rank", u, storage, exchange)
    for other in (Dense.of(normal(17, 17) @ normal(17, 17).mT), Diagonal(normal(17).abs())):
        for first, second in ((a_several, other), (other, a_several)):
            same = (a, other) if first is a_several else (other, a)
            merged, expected = merge(first, second, 0.9, 0.3), merge(same[0], same[1], 0.9, 0.3)
            assert isinstance(other, Dense) or isinstance(merged.columns, ShardedColumns)
            _assert_same(merged.to_dense(), expected.to_dense(), TOLERANCE[storage])


@distributed(world_size=2)
def test_merging_as_many_columns_as_rows_gives_a_whole_matrix(rank: int) -> None:
    for make in MAKES:
        a, a_several = _pair(make, normal(9, 5), torch.float64, _joined())
        merged = merge(a_several, a_several, 0.4, 0.6)
        assert isinstance(merged, Dense)
        _assert_same(merged.to_dense(), merge(a, a, 0.4, 0.6).to_dense(), 1e-12)


@pytest.mark.parametrize("make", ["plus", "softmax"])
@distributed(world_size=3)
def test_sides_too_wide_to_be_written_out(rank: int, make: str) -> None:
    before = diagonal_low_rank.WIDEST_DENSE, merging.WIDEST_DENSE
    diagonal_low_rank.WIDEST_DENSE = merging.WIDEST_DENSE = 4
    try:
        one, several = _pair(make, normal(19, 3), torch.float64, _joined())
        y, scales = normal(19, 2, seed=1), torch.tensor([0.5, 2.0], dtype=torch.float64)
        for p in (-1.0, -0.5, 0.5, 1.0):
            _assert_same(several.power(y, p, 0.1, 3.0), one.power(y, p, 0.1, 3.0), 1e-12)
        by_column = [factor.power_by_column(y, -1.0, scales, 0.1) for factor in (several, one)]
        _assert_same(by_column[0], by_column[1], 1e-10)  # conjugate gradients, to 1e-12 of the residual
        assert several.clip(0.1, 3.0).count == one.clip(0.1, 3.0).count == 19
        many, many_several = _pair(make, normal(7, 9), torch.float64, _joined())
        merged = merge(many_several, many_several, 0.4, 0.6)
        assert isinstance(merged.columns, ShardedColumns)
        _assert_same(merged.dense(), merge(many, many, 0.4, 0.6).dense(), 1e-12)
    finally:
        diagonal_low_rank.WIDEST_DENSE, merging.WIDEST_DENSE = before


def _rows_only(rank: int, world_size: int, n: int, storage: torch.dtype) -> None:
    exchange = _joined()
    one, several = _pair("low rank", normal(n, 4), storage, exchange)
    y, part = normal(n, 2, seed=1), several.columns.part
    mine = LowRank(several.columns.local())
    exchange.sent["all_gather"] = 0
    for actual, expected in [
        (mine.matvec(y[part]), one.matvec(y)),
        (mine.solve(y[part], 0.1), one.solve(y, 0.1)),
        (mine.power(y[part], -0.5, 0.1), one.power(y, -0.5, 0.1)),
        (mine.power(y[part], 0.5, 0.1, 3.0), one.power(y, 0.5, 0.1, 3.0)),
        (mine.diagonal(), one.diagonal()),
    ]:
        assert actual.dtype == expected.dtype
        assert float((actual - expected[part]).norm()) <= TOLERANCE[storage] * float(expected.norm())
    assert distance(mine.trace(), one.trace()) <= 1e-12
    assert distance(mine.eigenvalues(), one.eigenvalues()) <= 1e-12
    assert exchange.sent["all_gather"] == 0
    again = merge(mine, mine, 0.4, 0.6)
    assert again.solve(y[part], 0.1).shape == y[part].shape


@pytest.mark.dist
@pytest.mark.parametrize(
    "world_size, n, storage", [(2, 13, torch.float64), (3, 14, torch.float16), (4, 9, torch.float32)]
)
def test_rows_in_and_rows_out_gather_nothing(world_size: int, n: int, storage: torch.dtype) -> None:
    run_on_ranks(world_size, _rows_only, n, storage)


def _counted(rank: int, world_size: int, n: int, storage: torch.dtype) -> None:
    exchange, r, k, longest, others = _joined(), 5, 3, -(-n // world_size), world_size - 1

    def sent(action: Callable[[], object]) -> tuple[int, int]:
        before = dict(exchange.sent)
        action()
        assert exchange.sent["all_to_all"] == before["all_to_all"]
        return exchange.sent["all_reduce"] - before["all_reduce"], exchange.sent["all_gather"] - before["all_gather"]

    def ring(*sizes: int) -> int:
        return sum(2 * size * others // world_size for size in sizes)

    u = normal(n, r)[exchange.features(n)[rank]]
    half = storage.itemsize == 2
    columns = ShardedColumns.of(u, n, exchange, storage)
    stored = ring(8 * r, 16) if half else ring(16) if storage == torch.float32 else 0
    assert sent(lambda: ShardedColumns.of(u, n, exchange, storage)) == (stored, 0)
    for dtype in (torch.float32, torch.float64):
        y, c, item = normal(n, k).to(dtype), normal(r, k).to(dtype), dtype.itemsize
        assert sent(lambda y=y: columns.transposed_times(y)) == (ring(r * k * item), 0)
        assert sent(lambda c=c: columns.times(c)) == (0, others * longest * k * item)
        assert sent(lambda c=c: columns.local().times(c)) == (0, 0)
    assert sent(columns.gram) == (ring(8 * r * r), 0)
    assert sent(columns.gram) == (0, 0)  # kept
    assert sent(columns.squares_N) == (0, others * longest * 8)
    assert sent(columns.square) == (ring(8), 0)
    assert sent(columns.whole) == (0, others * longest * r * storage.itemsize)
    assert sent(lambda: columns.scaled(0.5).join(columns).select(torch.tensor([1]), 2.0).to("cpu")) == (0, 0)
    assert columns.nbytes == len(u) * r * storage.itemsize + (4 * r if half else 0) + 8 * r * r
    factor = LowRank(columns)
    factor.solve(normal(n, k), 0.1)
    assert sent(lambda: factor.solve(normal(n, k), 0.1)) == (ring(8 * r * k), others * longest * k * 8)
    columns.forget()
    assert sent(lambda: compress(LowRank(columns), rank=2)) == (ring(8 * r * r) + (ring(8 * 2, 16) if half else 0), 0)


@pytest.mark.dist
@pytest.mark.parametrize(
    "world_size, n, storage", [(2, 12, torch.float64), (3, 13, torch.float16), (4, 2, torch.float32)]
)
def test_bytes_are_those_of_the_table(world_size: int, n: int, storage: torch.dtype) -> None:
    run_on_ranks(world_size, _counted, n, storage)


@distributed(world_size=3)
def test_a_column_that_is_not_finite_is_stored_as_in_one_process(rank: int) -> None:
    for bad, row in itertools.product((torch.nan, torch.inf), (0, 4, 8)):
        u = 1e3 * normal(9, 3)
        u[row, 1] = bad
        one, several = _pair("low rank", u, torch.bfloat16, _joined())
        assert torch.equal(several.columns.stored.right, one.columns.stored.right)
        assert not several.trace().isfinite()


@distributed(world_size=2)
def test_a_right_side_of_the_wrong_length_is_named(rank: int) -> None:
    columns = _sharded(normal(9, 2), _joined(), torch.float64)
    with refusal("^y: 4 rows; expected 9$"):
        columns.transposed_times(normal(4, 1))
    with refusal("^y: 9 rows; expected [45]$"):
        columns.local().transposed_times(normal(9, 1))


@distributed(world_size=4)
def test_columns_that_every_process_holds_are_cut_without_sending(rank: int) -> None:
    exchange = _joined()
    for n, storage in itertools.product((2, 11), STORAGES):
        whole = Columns(store_columns(normal(n, 3), storage))
        cut = ShardedColumns.cut(whole, exchange)
        assert exchange.sent["all_gather"] == exchange.sent["all_reduce"] == 0
        assert torch.equal(cut.whole().stored.load(), whole.stored.load())
        exchange.sent["all_gather"] = 0
