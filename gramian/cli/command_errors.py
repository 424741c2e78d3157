"""Failures of commands: the exception behind exit code 1, one-line descriptions, and which process prints under torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.parallel.process_grid import ProcessGrid

FAILED_ON_ONE = re.compile(r"process \d+: (?!GramianError)\w*(Error|Exception|Interrupt)\b")
"""Matches the message of an error, not of bad input, that another process raised while all of them worked together."""


class RunFailed(Exception):
    """A run or a check that did not succeed, with the reason as its message; the command exits with 1."""


def is_first_process() -> bool:
    """Whether this is rank 0 of the processes that torchrun started, which alone prints; also true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def only_first_complains(run: Callable[[], int]) -> int:
    """Run a command whose errors are the same on every process: rank 0 raises them, the others only return the exit code."""
    try:
        return run()
    except (GramianError, RunFailed) as problem:
        if is_first_process():
            raise
        return 2 if isinstance(problem, GramianError) else 1


def only_one_complains(grid: ProcessGrid, run: Callable[[], int]) -> int:
    """Run a command on every process. If it fails, the process that failed first raises the error, the others return its code.

    torchrun ends the other processes as soon as one has ended, so the one that knows the reason must not leave it to rank 0.
    """
    try:
        return run()
    except (GramianError, RunFailed, OSError) as problem:
        if grid.size == 1 or grid.first_failure(str(problem)) == f"process {grid.rank}: {problem}":
            raise
        return 2 if isinstance(problem, GramianError) else 1


def lost_another(problem: BaseException) -> bool:
    """Whether an exception says that a collective failed because another process has gone."""
    return any(name in str(problem).lower() for name in ("gloo", "nccl", "connection", "peer"))


def refuse_torchrun(command: str) -> None:
    """Refuse to run a single-process command under torchrun.

    Raises:
        GramianError: if torchrun started this process.
    """
    from gramian.parallel.world import started_by_torchrun

    if started_by_torchrun():
        raise GramianError(f"{command}: is for one process; expected no torchrun")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that the memory of the host or of a GPU is full."""
    import torch

    full = isinstance(problem, torch.OutOfMemoryError | MemoryError)
    return full or any(words in str(problem) for words in ("can't allocate memory", "not enough memory"))


def names_of_failed(failed: list[str], total: int, most: int = 3) -> str:
    """One line for the end of a command: how many of `total` checks failed, and the names of the first `most` of them."""
    more = f"; and {len(failed) - most} more" if len(failed) > most else ""
    return f"{len(failed)} of {total} checks failed: {'; '.join(failed[:most])}{more}"
