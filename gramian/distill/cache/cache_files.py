"""Report damaged files of a cache, and errors of the file system, as a GramianError of one line."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gramian.core.durable_files import FileRecord
from gramian.core.errors import GramianError


def damage(path: Path, expected: FileRecord, *, content: bool) -> str | None:
    """How a file differs from its record of size and checksum, as text; None if it does not. Checksums only with `content`."""
    problem = expected.difference(path, content=content)
    if problem is None or problem.startswith("has "):
        return problem
    if problem == "its checksum differs":
        return f"{problem}; expected it as it was written: remove it, and gramian cache makes it again"
    return f"{problem}; expected the file as it was written"


def refuse_damage(folder: Path, records: Mapping[str, FileRecord], *, content: bool) -> None:
    """Raise a GramianError for the first file of a cache folder that differs from its record, {path in the folder: record}.

    With `content` checksums are compared, which reads the files; without it sizes alone.
    """
    for name, record in records.items():
        problem = damage(folder / name, record, content=content)
        if problem is not None:
            raise GramianError(f"cache: {folder / name} {problem}")


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Context manager: turn an OSError, such as a full disk, into a GramianError of one line that names the cache's folder."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GramianError(
                f"cache: {folder}: the disk is full; expected more space, what is written so far is kept and goes on from there"
            ) from None
        raise GramianError(f"cache: {folder} cannot be written ({problem.strerror}); expected a folder") from None
