"""A lock on a folder: one process at a time has it, and the system releases it when that process ends, however it ends."""

import fcntl
import os
import weakref
from pathlib import Path

LOCK = ".lock"
"""Name of the empty file that is locked; it may stay when no process has the lock."""


class FolderLock:
    """An exclusive lock on an existing folder, from the creation of this object to `release` or the end of the process.

    A file that is open for writing is locked, and not the folder itself: network file systems refuse the latter. Processes
    that are forked, such as data workers, do not have it: they outlive a killed process for some seconds.

    Raises:
        BlockingIOError: if another process, or another object of this one, has the lock.
        OSError: if the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release(mine()))
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(path, self._file):
                raise BlockingIOError  # removed by the process that had it
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the folder; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _release(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()
