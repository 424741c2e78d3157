"""Sums and moves between gloo processes, against the same tensors put together in one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gramian.parallel.exchange import Exchange, exchange_of, metered
from tests.dist.worlds import mine
from tests.kit.matrix import sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

CPU = torch.device("cpu")
COUNTS = {
    2: [(3, 2), (4, 4), (0, 3), (5, 0), (0, 0)],
    3: [(3, 1, 2), (2, 2, 2), (0, 4, 0), (1, 0, 3)],
    4: [(1, 2, 3, 4), (3, 3, 3, 3), (0, 0, 0, 2), (2, 0, 1, 0)],
}
WIDTHS = (1, 3, 8, 13)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
MATRIX = [
    (counts, width, dtype) for world in COUNTS for counts in COUNTS[world] for width in WIDTHS for dtype in DTYPES
]


def _joined() -> Exchange:
    exchange = exchange_of(None, CPU)
    assert exchange is not None
    return exchange


def _rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """The same on every rank; no two alike."""
    if dtype == torch.bool:
        return torch.rand(count, width, generator=torch.Generator().manual_seed(1)) < 0.5
    return torch.randint(-2000, 2000, (count, width), generator=torch.Generator().manual_seed(1)).div(8).to(dtype)


def _moves(rank: int, world_size: int, counts: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    exchange, whole = _joined(), _rows(sum(counts), width, dtype)
    given, item = whole[mine(rank, counts)], dtype.itemsize
    others = world_size - 1

    gathered = exchange.gather_rows(given, [*counts])
    assert gathered.dtype == dtype and torch.equal(gathered, whole)
    assert exchange.sent == {"all_reduce": 0, "all_gather": others * counts[rank] * width * item, "all_to_all": 0}

    part = exchange.features(width)[rank]
    resharded = exchange.reshard(given, [*counts])
    assert resharded.dtype == dtype and torch.equal(resharded, whole[:, part])
    kept = part.stop - part.start
    assert exchange.sent["all_to_all"] == counts[rank] * (width - kept) * item

    before, widths = dict(exchange.sent), [part.stop - part.start for part in exchange.features(width)]
    with metered() as meter:
        back = exchange.to_samples(resharded.contiguous(), 1, widths, [*counts])
    assert back.dtype == dtype and torch.equal(back, given)
    leaving = (sum(counts) - counts[rank]) * kept * item
    assert exchange.sent["all_to_all"] - before["all_to_all"] == leaving == meter.sent["all_to_all"]

    before, after = exchange.sent["all_to_all"], [*counts[::-1]]
    dealt = exchange.redistribute_rows(given, [*counts], after)
    assert dealt.dtype == dtype and torch.equal(dealt, whole[mine(rank, after)])
    kept_rows = set(range(len(whole))[mine(rank, counts)]) & set(range(len(whole))[mine(rank, after)])
    assert exchange.sent["all_to_all"] - before == (counts[rank] - len(kept_rows)) * width * item

    before = exchange.sent["all_gather"]
    features = exchange.gather_features(resharded.mT, width)
    assert features.dtype == dtype and torch.equal(features, whole.mT)
    longest = -(-width // world_size)
    assert exchange.sent["all_gather"] - before == others * longest * sum(counts) * item


@pytest.mark.dist
@pytest.mark.parametrize("counts, width, dtype", sample(MATRIX, 14))
def test_rows_and_features_arrive_where_they_belong(counts: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    run_on_ranks(len(counts), _moves, counts, width, dtype)


def _sums(rank: int, world_size: int, dtype: torch.dtype) -> None:
    exchange = _joined()
    parts = _rows(world_size, 11, dtype)
    given = parts[rank].clone()
    total = exchange.sum(given)
    assert total.dtype == dtype and torch.equal(total, parts.double().sum(0).to(dtype))
    assert torch.equal(given, parts[rank]) and total.data_ptr() != given.data_ptr()
    assert torch.equal(exchange.largest(given), parts.amax(0))
    assert exchange.sum(parts[:0]).shape == (0, 11)
    held = 11 * max(4, dtype.itemsize) if dtype.is_floating_point else 11 * dtype.itemsize
    each = [held * 2 * (world_size - 1) // world_size, 11 * dtype.itemsize * 2 * (world_size - 1) // world_size]
    assert exchange.sent == {"all_reduce": sum(each), "all_gather": 0, "all_to_all": 0}


@pytest.mark.dist
@pytest.mark.parametrize("world_size, dtype", [*itertools.product((2, 3, 4), DTYPES[:-1])])
def test_a_sum_is_a_new_tensor_and_the_same_as_of_all(world_size: int, dtype: torch.dtype) -> None:
    run_on_ranks(world_size, _sums, dtype)


@distributed(world_size=3)
def test_half_precision_is_added_up_in_float32(rank: int) -> None:
    # 2048 + 1 + 1 is 2048 when every step is rounded to float16.
    total = _joined().sum(torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)[rank])
    assert float(total) == 2050


def _told(rank: int, world_size: int) -> list[object]:
    exchange = _joined()
    message = {"rank": rank, "text": "é" * 9 * rank, "share": 0.1 + rank, "none": None, "counts": [rank] * rank}
    heard = exchange.gather_messages(message)
    assert exchange.gather_messages([]) == [[]] * world_size
    return heard


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_process_hears_what_each_says(world_size: int) -> None:
    expected = [
        {"rank": rank, "text": "é" * 9 * rank, "share": 0.1 + rank, "none": None, "counts": [rank] * rank}
        for rank in range(world_size)
    ]
    assert run_on_ranks(world_size, _told) == [expected] * world_size


@distributed(world_size=2)
def test_messages_are_counted(rank: int) -> None:
    exchange = _joined()
    assert exchange.gather_messages("a" * (3 + rank)) == ["aaa", "aaaa"]
    assert exchange.sent == {"all_reduce": 0, "all_gather": 8 + len('"aaaa"'), "all_to_all": 0}


@distributed(world_size=4)
def test_features_are_contiguous_and_even_up_to_one(rank: int) -> None:
    for n in (0, 1, 3, 4, 10, 50_257):
        parts = _joined().features(n)
        sizes = [part.stop - part.start for part in parts]
        assert [i for part in parts for i in range(n)[part]] == [*range(n)]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@distributed(world_size=3)
def test_a_group_of_some_processes_is_served_by_itself(rank: int) -> None:
    group = dist.new_group([0, 2])
    alone = [dist.new_group([r]) for r in range(3)][rank]
    try:
        assert exchange_of(alone, CPU) is None
        if rank == 1:
            with refusal("^process_group: got .*; expected a group that"):
                exchange_of(group, CPU)
            return
        exchange = exchange_of(group, CPU)
        assert exchange is not None and (exchange.rank, exchange.size) == (rank // 2, 2)
        assert exchange.gather_messages(rank) == [0, 2]
        assert float(exchange.sum(torch.tensor(float(rank)))) == 2
        rows = _rows(5, 3, torch.float64)
        given = rows[mine(rank // 2, (1, 4))]
        assert torch.equal(exchange.gather_rows(given, [1, 4]), rows)
        assert torch.equal(exchange.reshard(given, [1, 4]), rows[:, exchange.features(3)[exchange.rank]])
    finally:
        for made in (group, alone):
            if isinstance(made, dist.ProcessGroup):
                dist.destroy_process_group(made)


@distributed(world_size=2)
def test_counts_that_do_not_fit_are_named(rank: int) -> None:
    exchange = _joined()
    for move in (exchange.gather_rows, exchange.reshard):
        with refusal("^counts: 2 rows on process . of 2; expected "):
            move(torch.zeros(2, 3), [3, 3])


def test_one_process_has_nobody_to_talk_to() -> None:
    assert exchange_of(None, CPU) is None
    with refusal("^process_group: .*; expected None$"):
        exchange_of(object(), CPU)
