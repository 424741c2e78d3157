"""The batches of a run, prepared by worker processes.

A batch is a function of the seed and of its data position (its index in the run's sequence of batches) alone.

Shape suffixes:
    R  windows of a step on this rank
    T  tokens of a window
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gramian.core.errors import GramianError
from gramian.data.window_order import windows_at
from gramian.data.windows import NOT_COUNTED, Windows

Int64s = npt.NDArray[np.int64]
_Rows = tuple[int, int, dict[str, Tensor]]


class DataWorkerDied(GramianError):
    """A worker process that prepares batches died; `Batches.from_position` starts new workers."""

    @classmethod
    def because(cls, how: str) -> Self:
        """Return the error whose message says how the worker died (`how`) and which option to change."""
        advice = "expected enough memory for all, or fewer workers; 0 reads in the training process"
        return cls(f"data.workers: {how}; {advice}")


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The data of one optimizer step on one rank.

    Attributes:
        position: the data position, the index of the batch in the run's sequence of batches.
        micro: micro-batches, the same number on every rank. Each is a dict: "tokens", "targets" and, for isolated documents,
            "documents" are int64 [rows, T]; "windows", int64 [rows] on the host, is the index of each row's window.
        tokens: number of targets of the step that have a loss term, over all ranks.
        first: index of this rank's first window among the step's windows of all ranks.
    """

    position: int
    micro: list[dict[str, Tensor]]
    tokens: int
    first: int = 0


class Batches:
    """Batches by data position, the same for any number of ranks and workers.

    The windows of a step are split over the ranks contiguously and as evenly as possible, and on a rank into micro-batches.
    Every rank has as many micro-batches; one without windows for its last one gets a single row without loss terms.

    The first `from_position` starts the workers, and later calls reuse them, so one `Batches` should serve a run. Workers use
    no random numbers, and the loader has its own generator. Workers leave the process group, so that Ctrl-C reaches only the
    training process, which can finish its step. The death of a worker raises when the next batch is requested, not in the
    middle of a step.

    Args:
        windows: the data.
        batch: windows per step, over all ranks.
        micro_batch: maximum number of windows per micro-batch; 0: all windows of the rank.
        seed: seed of the order.
        rank: rank of this process.
        world_size: number of data-parallel ranks.
        workers: number of processes that prepare batches; 0: this process prepares them.
        prefetch: number of steps that each worker prepares ahead.
        pin: put batches into page-locked memory if they can be copied to a GPU.
        device: device that batches are copied to, without waiting for the copy; None: no copy.

    Raises:
        GramianError: if a count is too small, or `rank` is not in 0 … world_size - 1.

    Example:
        >>> batches = Batches(windows, batch=16, micro_batch=4, seed=0)
        >>> len(next(batches.from_position(0)).micro)
        4
    """

    def __init__(
        self,
        windows: Windows,
        *,
        batch: int,
        micro_batch: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, least in (
            ("data.batch", batch, 1),
            ("data.micro_batch", micro_batch, 0),
            ("data.workers", workers, 0),
            ("data.prefetch", prefetch, 1),
        ):
            if value < least:
                raise GramianError(f"{name}: expected at least {least}, got {value}")
        if not 0 <= rank < world_size:
            raise GramianError(f"rank: expected 0 to {world_size - 1}, got {rank}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = min(workers, max(2, cores))  # more only compete with each other; batches do not depend on it
        self._steps = _Steps(windows, batch, micro_batch, seed, rank, world_size)
        self._positions = _Positions()
        self._prefetch = prefetch
        self._device = None if device is None else torch.device(device)
        on_gpu = self._device is None or self._device.type == "cuda"
        self._pin = pin and on_gpu and torch.cuda.is_available()
        self._loader: DataLoader[_Rows] | None = None
        self._rows: Iterator[_Rows] | None = None
        self._processes: list[BaseProcess] = []
        self._turn = 0

    def from_position(self, start: int, skipped: Collection[int] = ()) -> Iterator[StepBatch]:
        """Iterate over the batches from a data position on, without the positions in `skipped`; never ends.

        Workers begin to prepare batches at once.

        Raises:
            DataWorkerDied: here or from the iterator, if a worker has died.
            GramianError: if `start` is negative or workers cannot be started; from the iterator, if `from_position` or `close`
                has been called since.
        """
        if start < 0:
            raise GramianError(f"start: expected at least 0, got {start}")
        if any(process.exitcode is not None for process in self._processes):
            self.close()
        self._turn += 1
        self._positions.start, self._positions.skipped = start, frozenset(skipped)
        try:
            return self._follow(self._started(), self._turn)
        except (RuntimeError, EOFError) as problem:
            raise self._explained(problem) from None
        except OSError as problem:
            raise GramianError(
                f"data.workers: {self.workers} cannot be started ({problem.strerror}); expected fewer"
            ) from None

    def close(self) -> None:
        """Stop the worker processes; the next `from_position` starts new ones."""
        self._turn += 1
        shut_down_workers(self._rows)
        self._loader, self._rows, self._processes = None, None, []

    def _started(self) -> Iterator[_Rows]:
        if self._loader is None:
            self._loader = DataLoader(
                self._steps,
                batch_size=None,
                sampler=self._positions,
                num_workers=self.workers,
                collate_fn=_as_it_is,
                pin_memory=self._pin,
                worker_init_fn=leave_process_group,
                prefetch_factor=self._prefetch if self.workers else None,
                persistent_workers=self.workers > 0,
                generator=torch.Generator(),
            )
            before = multiprocessing.active_children()
            self._rows = iter(self._loader)
            if self.workers:
                self._processes = [child for child in multiprocessing.active_children() if child not in before]
                suppress_worker_death_errors()
        else:
            self._rows = iter(self._loader)
        return self._rows

    def _follow(self, rows: Iterator[_Rows], turn: int) -> Iterator[StepBatch]:
        while True:
            if turn != self._turn:
                raise GramianError("from_position: was called again, or close was; expected its newest iterator")
            self._refuse_dead()
            try:
                position, tokens, rows_R = next(rows)
            except (RuntimeError, OSError, EOFError) as problem:
                raise self._explained(problem) from None
            if self._device is not None:
                rows_R = {
                    name: values if name == "windows" else values.to(self._device, non_blocking=True)
                    for name, values in rows_R.items()
                }
            yield StepBatch(position, self._steps.cut(rows_R), tokens, self._steps.first)

    def _refuse_dead(self) -> None:
        for process in self._processes:
            if process.exitcode is not None:
                cause = f"killed by signal {-process.exitcode}" if process.exitcode < 0 else f"exit {process.exitcode}"
                raise DataWorkerDied.because(f"worker {process.pid} of {self.workers} died ({cause})")

    def _explained(self, problem: Exception) -> Exception:
        """Return the error to raise for the loader's error `problem`: `DataWorkerDied` if a worker died, else `problem`."""
        if isinstance(problem, OSError | EOFError):  # lost connection to a worker that may be about to end
            connection.wait([process.sentinel for process in self._processes], timeout=1)
        try:
            self._refuse_dead()
        except DataWorkerDied as died:
            return died
        return problem


class _Steps(Dataset[_Rows]):
    """Maps a data position to (position, number of targets with a loss term over all ranks, {name: rows} of this rank)."""

    def __init__(self, windows: Windows, batch: int, micro_batch: int, seed: int, rank: int, world_size: int) -> None:
        self._windows = windows
        self._batch = batch
        self._seed = seed
        self.first, self._stop = rank * batch // world_size, (rank + 1) * batch // world_size
        most = -(-batch // world_size)
        self._micro_batch = micro_batch or most
        self._count = -(-most // self._micro_batch)

    def __getitem__(self, position: int) -> _Rows:
        batch = windows_at(position, len(self._windows), self._batch, self._seed)
        mine = batch[self.first : self._stop]
        missing = len(mine) <= (self._count - 1) * self._micro_batch
        windows = np.append(mine, batch[:1]) if missing else mine
        rows_R = self._windows.stack(windows) | {"windows": torch.from_numpy(windows)}
        if missing:
            rows_R["targets"][-1] = NOT_COUNTED
        return position, int(self._windows.counted(batch).sum()), rows_R

    def cut(self, rows_R: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Split the rows of this rank, {name: [rows, …]}, into micro-batches of the same names."""
        return [
            {name: values[at * self._micro_batch : (at + 1) * self._micro_batch] for name, values in rows_R.items()}
            for at in range(self._count)
        ]


class _Positions(Sampler[int]):
    """Sampler that yields data positions from `start` on, without those in `skipped`; never ends."""

    start = 0
    skipped: frozenset[int] = frozenset()

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        skipped = self.skipped
        return (position for position in itertools.count(self.start) if position not in skipped)


def leave_process_group(worker: int) -> None:
    """Leave the process group (`worker_init_fn` of a DataLoader), so that Ctrl-C does not end the worker."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def shut_down_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator now; waiting for the garbage collector may keep them alive."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def _as_it_is(rows: Any) -> Any:
    return rows


class _QuietAboutWorkers:
    """Wraps torch's SIGCHLD handler; suppresses the RuntimeError that it raises anywhere in the program if a worker dies."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as problem:
            if "DataLoader worker" not in str(problem):
                raise


def suppress_worker_death_errors() -> None:
    """Suppress errors of torch's SIGCHLD handler; a loader that waits for a batch notices a dead worker within seconds."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _QuietAboutWorkers):
            signal.signal(signal.SIGCHLD, _QuietAboutWorkers(handler))
