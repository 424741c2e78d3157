"""Copies of the state in host memory: what is counted, what gives way, what is refused."""

import pytest

from gramian.plan.budget import USABLE
from gramian.plan.host_memory import LEAST, PIECE, HostPlan, allocated, copy_bytes, packed, plan_host

GB = 10**9
XL = [(50257, 1600), (1024, 1600), *48 * [(1600, 4800), (4800,), (1600, 1600), (1600, 6400), (6400, 1600)]]
"""Some 1.5 billion parameters."""


def test_tensors_share_pieces_in_order_and_a_large_one_has_its_own() -> None:
    sizes = [PIECE // 2, PIECE // 2, 1, 3 * PIECE, PIECE - 1, 1, 1]
    assert packed(sizes) == [[0, 1], [2], [3], [4, 5], [6]]
    assert packed([]) == []
    assert allocated(sizes, pinned=False) == sum(sizes)
    assert allocated(sizes, pinned=True) == PIECE + 1 + 4 * PIECE + PIECE + 1  # powers of two
    assert allocated([0], pinned=True) == 0


def test_a_copy_is_weights_and_optimizer_and_factors() -> None:
    shapes = [(7, 5), (5,), ()]
    assert copy_bytes(shapes, 4, 0) == 41 * 4
    assert copy_bytes(shapes, 8, 2) == 3 * 41 * 8
    assert copy_bytes(shapes, 4, 1, factors=1000) == 2 * 41 * 4 + 1000
    assert copy_bytes(shapes, 4, 1, shards=2) == 2 * (4 * 5 + 3 + 1) * 4  # of the process that holds most


def test_eight_processes_of_a_large_model_are_counted_eight_times() -> None:
    """DDP of 1.5 billion parameters and AdamW: the plan of one GPU said that it fits."""
    copy = copy_bytes(XL, 4, 2, pinned=True)
    assert 17 * GB < copy < 24 * GB
    plan = plan_host(copy, 3, 8, sharded=False, available=2000 * GB)
    assert plan.process == 4 * copy and plan.host == 25 * copy > 400 * GB
    assert f"{plan.host / 1e9:.2f} GB on a host of 8 processes of 1800.00 GB" in str(plan)
    shards = copy_bytes(XL, 4, 2, shards=8, pinned=True)
    assert plan_host(shards, 3, 8, sharded=True, available=None).host == 32 * shards < plan.host / 5


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("processes", [1, 8])
def test_fewer_snapshots_come_before_a_refusal_and_most_that_fit_are_taken(processes: int, sharded: bool) -> None:
    whole = HostPlan(GB, 5, 5, processes, processes if sharded else 1, None)
    for available in range(0, 60 * GB, GB // 2):
        plan = plan_host(GB, 5, processes, sharded, available)
        assert plan.usable == int(USABLE * available)
        assert plan.fits == (plan.host <= plan.usable)
        assert LEAST <= plan.snapshots <= 5
        if plan.snapshots < 5 and plan.fits:
            assert plan.host + processes * GB > plan.usable  # not one more
            assert "checkpoint.snapshots=5 would take too much" in str(plan)
        if not plan.fits:
            assert plan.snapshots == LEAST
            assert "\n" not in plan.refusal and plan.refusal.startswith("checkpoint.snapshots: not even 2 and")
    assert plan_host(GB, 5, processes, sharded, None) == whole and whole.fits and "too much" not in str(whole)
