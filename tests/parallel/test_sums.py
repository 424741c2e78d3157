"""Named sums added up over processes."""

import pytest
import torch
import torch.distributed as dist

from gramian.parallel.all_reduce import all_reduce
from tests.kit.processes import distributed

pytestmark = pytest.mark.xdist_group("processes")


def _sums(rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds: several shapes and dtypes, and numbers that are exact in all of them."""
    return {
        "matrix": torch.arange(6.0).reshape(2, 3) * (rank + 1),
        "count": torch.tensor(float(rank + 1), dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "transposed": (torch.arange(6.0).reshape(2, 3) * 10**rank).T,
    }


def _check(rank: int, world_size: int) -> None:
    mine = _sums(rank)
    totals = all_reduce(mine, dist.group.WORLD)
    expected = {key: sum(_sums(other)[key] for other in range(world_size)) for key in mine}
    assert list(totals) == list(mine)
    for key, value in totals.items():
        assert value.dtype == mine[key].dtype
        assert torch.equal(value, expected[key]), key


@distributed(world_size=2)
def test_every_entry_is_the_sum_over_two_ranks(rank: int, world_size: int) -> None:
    _check(rank, world_size)


@distributed(world_size=3)
def test_every_entry_is_the_sum_over_three_ranks(rank: int, world_size: int) -> None:
    _check(rank, world_size)


@distributed(world_size=1)
def test_one_rank_keeps_what_it_has(rank: int, world_size: int) -> None:
    _check(rank, world_size)


@distributed(world_size=2)
def test_what_a_rank_hands_in_is_not_changed(rank: int, world_size: int) -> None:
    mine = _sums(rank)
    totals = all_reduce(mine, dist.group.WORLD)
    for key, value in _sums(rank).items():
        assert torch.equal(mine[key], value), key
        assert totals[key].numel() == 0 or totals[key].data_ptr() != mine[key].data_ptr()


@distributed(world_size=2)
def test_large_counts_stay_exact(rank: int, world_size: int) -> None:
    # A float32 counter stops at 2²⁴.
    totals = all_reduce({"count": torch.tensor(2.0**40 + rank, dtype=torch.float64)}, dist.group.WORLD)
    assert float(totals["count"]) == 2.0**41 + 1


@distributed(world_size=2)
def test_no_entries_need_no_partner(rank: int, world_size: int) -> None:
    if rank == 0:
        assert all_reduce({}, dist.group.WORLD) == {}


@distributed(world_size=3)
def test_only_the_ranks_of_a_group_take_part(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    total = all_reduce({"rank": torch.tensor(float(rank))}, groups[rank == 1])
    assert float(total["rank"]) == {0: 2.0, 1: 1.0, 2: 2.0}[rank]
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


@distributed(world_size=2)
def test_numbers_that_are_not_finite_reach_every_rank(rank: int, world_size: int) -> None:
    totals = all_reduce({"bad": torch.tensor([1.0, float("inf") if rank else 1.0])}, dist.group.WORLD)
    assert totals["bad"].tolist() == [2.0, float("inf")]
