"""The processes that build one cache together: one group per folder at a time, whose processes succeed or fail together."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_files import one_line_errors
from gramian.parallel.process_grid import ProcessGrid


@contextmanager
def all_or_none(grid: ProcessGrid, path: Path) -> Iterator[None]:
    """Context manager: a GramianError or OSError of the body on one process raises a GramianError on all. One all-reduce.

    The failed process raises its own reason; the others say that another process failed.
    """
    problem: GramianError | None = None
    try:
        with one_line_errors(path):
            yield
    except GramianError as mine:
        problem = mine
    if grid.most(float(problem is not None)):
        raise problem or GramianError("cache: another process could not go on; its own line says why")


@contextmanager
def folder_lock(path: Path, grid: ProcessGrid) -> Iterator[None]:
    """Context manager: create a cache's folder and lock it; raises a GramianError if other builders have locked it."""
    lock: int | None = None
    try:
        with all_or_none(grid, path):
            path.mkdir(parents=True, exist_ok=True)
            if grid.rank == 0:
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise GramianError(f"cache: {path} is being built by others; expected them to end") from None
        yield
    finally:
        if lock is not None:
            os.close(lock)
