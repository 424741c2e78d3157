"""Damaged files of a cache and refusals of the file system, each as an error of one line."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gramian.core.durable_files import FileRecord
from gramian.core.errors import GramianError


def damage(path: Path, expected: FileRecord, *, content: bool) -> str | None:
    """How a file differs from its record, or None; without `content` only the size is compared, and nothing is read."""
    problem = expected.difference(path, content=content)
    if problem is None or problem.startswith("has "):
        return problem
    if problem == "its checksum differs":
        return f"{problem}; expected it as it was written: remove it, and gramian cache makes it again"
    return f"{problem}; expected the file as it was written"


def refuse_damage(folder: Path, records: Mapping[str, FileRecord], *, content: bool) -> None:
    """Raise for the first file that differs from its record in {path inside the cache: record}; `content` as of `damage`."""
    for name, record in records.items():
        problem = damage(folder / name, record, content=content)
        if problem is not None:
            raise GramianError(f"cache: {folder / name} {problem}")


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into a `GramianError` of one line."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GramianError(
                f"cache: {folder}: the disk is full; expected more space, what is written so far is kept and goes on from there"
            ) from None
        raise GramianError(f"cache: {folder} cannot be written ({problem.strerror}); expected a folder") from None
