"""Damaged files of a cache and refusals of the file system, each as an error of one line."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gramian.core.durable_files import FileRecord
from gramian.core.errors import GramianError


def damage(path: Path, expected: FileRecord, *, content: bool) -> str | None:
    """How a file differs from its record, or None.

    Args:
        path: of the file.
        expected: its record.
        content: compare the checksum, at the price of reading it all; else the size.
    """
    problem = expected.difference(path, content=content)
    if problem is None or problem.startswith("has "):
        return problem
    if problem == "its checksum differs":
        return f"{problem}; expected it as it was written: remove it, and gramian cache makes it again"
    return f"{problem}; expected the file as it was written"


def refuse_damage(folder: Path, records: Mapping[str, FileRecord], *, content: bool) -> None:
    """Raise for the first file that differs from its record.

    Args:
        folder: of the cache.
        records: {path inside the cache: its record}.
        content: as of `damage`.

    Raises:
        GramianError: naming the file.
    """
    for name, record in records.items():
        problem = damage(folder / name, record, content=content)
        if problem is not None:
            raise GramianError(f"cache: {folder / name} {problem}")


@contextmanager
def told_in_one_line(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GramianError(
                f"cache: {folder}: the disk is full; expected more space, what is written so far is kept and goes on from there"
            ) from None
        raise GramianError(f"cache: {folder} cannot be written ({problem.strerror}); expected a folder") from None
