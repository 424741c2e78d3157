"""The pool of processes: what it returns, what it reports, and that it survives."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kit import processes
from tests.kit.processes import RankError, distributed, run_on_ranks
from tests.kit.waiting import PATIENCE

# One xdist worker for the file, so that the tests share their pools.
pytestmark = pytest.mark.xdist_group("processes")


@distributed(world_size=2)
@pytest.mark.parametrize("size", [3, 5])
def test_a_collective_reaches_every_rank(rank: int, world_size: int, size: int) -> None:
    x = torch.full((size,), float(rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * size
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("first", [1, 2])
@distributed(world_size=2)
def test_fixtures_and_parameters_reach_the_body(rank: int, world_size: int, first: int, tmp_path: Path) -> None:
    assert first in (1, 2)
    assert world_size == dist.get_world_size() == 2
    assert tmp_path.is_dir()


@distributed(world_size=3)
def test_pools_of_other_sizes_live_beside(rank: int, world_size: int) -> None:
    assert (rank, world_size) == (dist.get_rank(), 3)


def _skip(rank: int, world_size: int) -> None:
    pytest.skip("not here")


def test_a_skip_of_the_body_skips_the_test_and_keeps_the_pool() -> None:
    pids = run_on_ranks(2, _pid)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_on_ranks(2, _skip)
    assert run_on_ranks(2, _pid) == pids


def test_the_markers_are_applied() -> None:
    assert {"dist", "xdist_group"} <= {mark.name for mark in test_pools_of_other_sizes_live_beside.pytestmark}


def _gather(rank: int, world_size: int, offset: int, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    return rank, scale * torch.arange(3).add(offset * rank)


def test_values_of_all_ranks_are_returned_in_order() -> None:
    values = run_on_ranks(2, _gather, 10, scale=2.0)
    assert [rank for rank, _ in values] == [0, 1]
    assert [tensor.tolist() for _, tensor in values] == [[0, 2, 4], [20, 22, 24]]


def _draw(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def test_every_task_begins_with_the_same_seed() -> None:
    assert len({value for _ in range(2) for value in run_on_ranks(2, _draw)}) == 1


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def test_the_same_processes_serve_one_test_after_another() -> None:
    pids = run_on_ranks(2, _pid)
    assert len({*pids, os.getpid()}) == 3
    assert run_on_ranks(2, _pid) == pids


def _fail(rank: int, world_size: int, failing: tuple[int, ...]) -> None:
    if rank in failing:
        raise ValueError(f"rank {rank} says no")


def _fail_before_a_collective(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 says no")
    dist.barrier()


def test_every_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankError) as failure:
        run_on_ranks(2, _fail, (1,))
    assert "--- rank 1 ---" in str(failure.value)
    assert "in _fail\n" in str(failure.value)
    assert "ValueError: rank 1 says no" in str(failure.value)
    assert "--- rank 0 ---" not in str(failure.value)
    with pytest.raises(RankError, match="(?s)rank 0 says no.*rank 1 says no"):
        run_on_ranks(2, _fail, (0, 1))


@pytest.mark.full
def test_a_rank_left_alone_in_a_collective_does_not_wait_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(processes, "GRACE_AFTER_FAILURE", 1.0)
    monkeypatch.setattr(processes, "wait", lambda pipes, seconds: waits.append(seconds) or wait(pipes, seconds))
    with pytest.raises(RankError, match="rank 1 says no"):
        run_on_ranks(2, _fail_before_a_collective)
    assert waits[0] > 1 >= waits[-1]


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def _crash(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)


@pytest.mark.full
def test_a_hang_is_detected_and_the_next_task_has_a_new_pool() -> None:
    pids = run_on_ranks(2, _pid)
    with pytest.raises(RankError, match="rank 0 ---\nno answer within 0.5 s"):
        run_on_ranks(2, _hang, timeout=0.5)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(run_on_ranks(2, _pid)) & set(pids)


def test_a_process_that_dies_is_reported_with_the_place() -> None:
    with pytest.raises(RankError, match="(?s)rank 1 ---\nprocess ended with exit code -11.*Segmentation.* in _crash"):
        run_on_ranks(2, _crash)


def test_a_function_that_other_processes_cannot_find_is_refused() -> None:
    def local(rank: int, world_size: int) -> None: ...

    with pytest.raises(ValueError, match="local.* is not at module level"):
        run_on_ranks(2, local)


@pytest.mark.full
def test_processes_end_with_the_interpreter() -> None:
    program = "from tests.kit import test_processes as t; print(*t.run_on_ranks(2, t._pid))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    for pid in done.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
