"""Files of a cache: written under another name, hashed on the way, synced, then renamed; there whole or not there."""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gramian.core.errors import GramianError

TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class HashedFile:
    """A file under way. Until `finish` it has the name `.tmp-…`, and `abandon` leaves nothing of it.

    Args:
        path: that it will have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(TEMPORARY + path.name)
        self._digest, self._bytes = hashlib.sha256(), 0
        self._handle: int | None = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, content: bytes | memoryview) -> None:
        """Append."""
        assert self._handle is not None
        rest = memoryview(content).cast("B")
        self._digest.update(rest)
        self._bytes += len(rest)
        while len(rest) > 0:
            rest = rest[os.write(self._handle, rest) :]

    def finish(self) -> FileRecord:
        """Sync it and give it its name; the folder is left to `sync_folder`."""
        assert self._handle is not None
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = None
        os.replace(self._temporary, self.path)
        return FileRecord(self._bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Remove what there is, unless it is finished."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self._temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> FileRecord:
    """A file in one go, and its folder synced."""
    file = HashedFile(path)
    try:
        file.write(content)
        record = file.finish()
    finally:
        file.abandon()
    sync_folder(path.parent)
    return record


def sync_folder(path: Path) -> None:
    """Make renames in it last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(path: Path, expected: FileRecord, *, content: bool) -> str | None:
    """How a file differs from its record, or None.

    Args:
        path: of the file.
        expected: its record.
        content: compare the checksum, at the price of reading it all; else the size.
    """
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size} bytes; expected {expected.bytes}"
        if content:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    return "its checksum differs; expected it as it was written: remove it, and gramian cache makes it again"
    except FileNotFoundError:
        return "is missing; expected the file as it was written"
    except OSError as problem:
        return f"cannot be read ({problem.strerror}); expected the file as it was written"
    return None


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
