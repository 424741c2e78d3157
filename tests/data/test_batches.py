"""Batches: a function of seed and position, whatever the ranks, the workers and the place a run starts at."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import dataloader

from gramian.core.errors import GramianError
from gramian.data import Batches, DataWorkerDied, StepBatch, Windows
from gramian.data.token_stream import Stream
from gramian.data.window_order import windows_at
from gramian.data.windows import NOT_COUNTED
from tests.kit.matrix import examples
from tests.kit.waiting import PATIENCE

LENGTH = 5


def windows_of(count: int, isolate: bool = False) -> Windows:
    """So many windows, the last one padded, of documents of 1 to 9 tokens that all differ."""
    size = count * LENGTH - 2
    edges = [0]
    while edges[-1] < size:
        edges.append(min(size, edges[-1] + 1 + len(edges) * 7 % 9))
    stream = Stream([np.arange(size)], np.array(edges), vocabulary=size + 1, end=size)
    return Windows(stream, LENGTH, isolate=isolate)


def steps(windows: Windows, count: int, start: int = 0, skipped: tuple[int, ...] = (), **told: Any) -> list[StepBatch]:
    batches = Batches(windows, **told)
    taken = list(islice(batches.from_position(start, skipped), count))
    batches.close()
    return taken


def rows(batch: StepBatch) -> list[dict[str, list[int]]]:
    """All rows of a rank, in order, without those that nothing is counted of."""
    return [
        {name: values[row].tolist() for name, values in micro.items()}
        for micro in batch.micro
        for row in range(len(micro["tokens"]))
        if bool((micro["targets"][row] != NOT_COUNTED).any())
    ]


def expected_rows(windows: Windows, position: int, batch: int, seed: int) -> list[dict[str, list[int]]]:
    chosen = windows_at(position, len(windows), batch, seed).tolist()
    return [
        {name: values.tolist() for name, values in windows[window].items()} | {"windows": window} for window in chosen
    ]


def same(left: StepBatch, right: StepBatch) -> bool:
    return (
        (left.position, left.tokens) == (right.position, right.tokens)
        and len(left.micro) == len(right.micro)
        and all(
            a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
            for a, b in zip(left.micro, right.micro, strict=True)
        )
    )


@settings(max_examples=examples(80))
@given(st.integers(1, 30), st.integers(1, 13), st.integers(0, 6), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_ranks_together_are_one_process(
    size: int, batch: int, micro_batch: int, world: int, start: int, isolate: bool
) -> None:
    windows = windows_of(size, isolate)
    told: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch, "seed": 3, "world_size": world}
    ranks = [steps(windows, 2, start, rank=rank, **told) for rank in range(world)]
    most = -(-batch // world)
    for step in range(2):
        together = [ranks[rank][step] for rank in range(world)]
        whole = expected_rows(windows, start + step, batch, seed=3)
        assert [row for part in together for row in rows(part)] == whole
        counted = sum(target != NOT_COUNTED for row in whole for target in row["targets"])
        for part in together:
            assert (part.position, part.tokens) == (start + step, counted)
            assert len(part.micro) == -(-most // (micro_batch or most))
            sizes = [len(micro["tokens"]) for micro in part.micro]
            assert min(sizes) >= 1
            assert max(sizes) <= (micro_batch or most)
            assert sum(sizes) == max(len(rows(part)), sum(sizes[:-1]) + 1)
            assert len(rows(part)) in (most, most - 1)
            for micro in part.micro:  # also of rows that only keep up with other ranks
                assert torch.equal(micro["tokens"], windows.stack(micro["windows"].numpy())["tokens"])
            assert all(values.dtype == torch.int64 for micro in part.micro for values in micro.values())


@settings(max_examples=examples(40))
@given(st.integers(0, 12), st.sets(st.integers(0, 20)), st.integers(1, 8))
def test_any_start_continues_and_skipped_positions_are_left_out(start: int, skipped: set[int], batch: int) -> None:
    windows = windows_of(11)
    kept = [position for position in range(start, 40) if position not in skipped][:5]
    later = steps(windows, 5, start, tuple(skipped), batch=batch, seed=1)
    assert [step.position for step in later] == kept
    everything = steps(windows, 40, batch=batch, seed=1)
    assert all(same(step, everything[step.position]) for step in later)


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_makes_the_same_batches(workers: int) -> None:
    windows = windows_of(23, isolate=True)
    told: dict[str, Any] = {"batch": 6, "micro_batch": 2, "seed": 2, "rank": 1, "world_size": 2}
    alone = steps(windows, 12, 3, (5, 6), **told)
    helped = steps(windows, 12, 3, (5, 6), workers=workers, prefetch=2, **told)
    assert all(same(*pair) for pair in zip(alone, helped, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_states_are_left_alone(workers: int) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    steps(windows_of(9), 3, batch=4, workers=workers)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_new_start_keeps_the_workers_and_ends_the_iterator_before() -> None:
    windows = windows_of(23)
    batches = Batches(windows, batch=4, workers=2)
    first = batches.from_position(0)
    list(islice(first, 3))
    processes = {child.pid for child in multiprocessing.active_children()}
    second = batches.from_position(1, skipped=[2])
    again = list(islice(second, 5))
    assert [step.position for step in again] == [1, 3, 4, 5, 6]
    plain = steps(windows, 5, 1, (2,), batch=4)
    assert all(same(*pair) for pair in zip(again, plain, strict=True))
    assert {child.pid for child in multiprocessing.active_children()} == processes
    with pytest.raises(GramianError, match="^from_position: was called again"):
        next(first)
    batches.close()
    with pytest.raises(GramianError, match="^from_position: .*close"):
        next(second)


def test_close_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    batches = Batches(windows_of(9), batch=4, workers=2)
    iterator = batches.from_position(0)
    next(iterator)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    batches.close()
    assert not any(process.is_alive() for process in started)
    assert next(batches.from_position(4)).position == 4
    batches.close()


def test_workers_are_out_of_reach_of_ctrl_c() -> None:
    before = set(multiprocessing.active_children())
    batches = Batches(windows_of(9), batch=4, workers=1)
    next(batches.from_position(0))
    (worker,) = set(multiprocessing.active_children()) - before
    assert os.getpgid(worker.pid or 0) != os.getpgid(0)
    batches.close()


def test_a_dead_worker_is_told_by_the_next_batch_in_one_line_and_replaced() -> None:
    windows = windows_of(23)
    before = set(multiprocessing.active_children())
    batches = Batches(windows, batch=4, workers=2)
    iterator = batches.from_position(0)
    next(iterator)
    worker = min(set(multiprocessing.active_children()) - before, key=lambda process: process.pid or 0)
    os.kill(worker.pid or 0, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)  # what a signal handler raises, it raises here
    with pytest.raises(DataWorkerDied) as caught:
        next(iterator)
    assert str(caught.value) == (
        f"data.workers: worker {worker.pid} of 2 died (killed by signal 9); expected enough memory for all, "
        "or fewer workers; 0 reads in the training process"
    )
    assert isinstance(caught.value, GramianError)
    again = list(islice(batches.from_position(1), 3))
    plain = steps(windows, 3, 1, batch=4)
    assert all(same(*pair) for pair in zip(again, plain, strict=True))
    batches.close()


class Deadly(Windows):
    """Ends the process that asks for its data."""

    def stack(self, index: Any) -> dict[str, Tensor]:
        os._exit(3)


def test_a_worker_that_dies_while_a_batch_is_awaited_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    windows = windows_of(9)
    windows.__class__ = Deadly
    batches = Batches(windows, batch=4, workers=1)
    with pytest.raises(DataWorkerDied, match=r"^data.workers: worker \d+ of 1 died \(exit 3\); expected"):
        next(batches.from_position(0))
    batches.close()


@pytest.mark.slow
@pytest.mark.full
def test_a_process_that_just_ends_takes_its_workers_along() -> None:
    script = (
        "import numpy as np, multiprocessing\n"
        "from gramian.data import Batches, Windows\n"
        "from gramian.data.token_stream import Stream\n"
        "stream = Stream([np.arange(100)], np.array([0, 100]), vocabulary=100, end=99)\n"
        "iterator = Batches(Windows(stream, 5), batch=4, workers=2).from_position(0)\n"
        "next(iterator)\n"
        "print(*[child.pid for child in multiprocessing.active_children()])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_error_in_a_worker_stays_itself() -> None:
    windows = windows_of(9)
    windows.stream = None  # type: ignore[assignment]
    batches = Batches(windows, batch=4, workers=1)
    with pytest.raises(AttributeError):
        next(batches.from_position(0))
    batches.close()


def test_workers_that_cannot_be_started_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(GramianError, match=r"^data.workers: 2 cannot be started \(Resource temporarily unavailable\)"):
        Batches(windows_of(9), batch=4, workers=2).from_position(0)


def test_batches_go_to_the_device() -> None:
    (step,) = steps(windows_of(9), 1, batch=4, device="meta")
    places = {name: values.device.type for name, values in step.micro[0].items()}
    assert places == {"tokens": "meta", "targets": "meta", "windows": "cpu"}  # who looks windows up does so on the host


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"batch": 0}, "data.batch: expected at least 1, got 0"),
        ({"batch": 4, "micro_batch": -1}, "data.micro_batch: expected at least 0, got -1"),
        ({"batch": 4, "workers": -1}, "data.workers: expected at least 0, got -1"),
        ({"batch": 4, "prefetch": 0}, "data.prefetch: expected at least 1, got 0"),
        ({"batch": 4, "rank": 2, "world_size": 2}, "rank: expected 0 to 1, got 2"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(told: dict[str, int], message: str) -> None:
    with pytest.raises(GramianError) as caught:
        Batches(windows_of(3), **told)
    assert str(caught.value) == message


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(GramianError, match="^start: expected at least 0"):
        Batches(windows_of(3), batch=1).from_position(-1)


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    for child in set(multiprocessing.active_children()) - before:
        child.join(PATIENCE)
    assert set(multiprocessing.active_children()) <= before
