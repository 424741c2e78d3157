"""Files that are complete or absent, also after a crash or on a full disk.

Content is written under a temporary name in the same folder and hashed while it is written; then the file is synced, renamed to
its final name, and the folder is synced. A reader sees the previous file or the new one, never a part. Cost beside the write:
one SHA-256 pass, two fsyncs and a rename.
"""

import glob
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gramian.core.errors import GramianError

TEMPORARY = ".tmp-"
"""Prefix of the name that a file has until it is complete."""
CHUNK = 1 << 24
"""Number of bytes that are hashed and written at a time."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file, as a manifest lists them."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the file at `path` and compute its record: size and SHA-256."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    def difference(self, path: Path, *, content: bool = True) -> str | None:
        """How the file at `path` differs from this record, as text; None if equal. `content` False compares sizes only."""
        try:
            size = path.stat().st_size
            if size != self.bytes:
                return f"has {size} bytes; expected {self.bytes}"
            if content and FileRecord.of(path).sha256 != self.sha256:
                return "its checksum differs"
        except FileNotFoundError:
            return "is missing"
        except OSError as reason:
            return f"cannot be read ({reason.strerror})"
        return None


class HashedFile:
    """A file that is being written and hashed by SHA-256; `finish` gives it its final name, `abandon` removes it.

    Args:
        path: the final name.
        private: True: mode 0600 and a temporary name that cannot be guessed; False: mode 0644 less the umask.
        rename: True: write under a temporary name until `finish`; False: create the file under its final name, which must be
            free: for a folder that is itself renamed when it is complete.
    """

    def __init__(self, path: Path, *, private: bool = False, rename: bool = True) -> None:
        self.path = path
        self._digest, self._bytes, self._finished = hashlib.sha256(), 0, False
        self._handle: int | None
        if rename:
            self._handle, self._temporary = _open_temporary(path, private)
        else:
            mode = 0o600 if private else 0o644
            self._handle, self._temporary = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), path

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes to the file and add them to its checksum."""
        assert self._handle is not None
        view = memoryview(content).cast("B")
        for start in range(0, len(view), CHUNK):
            rest = view[start : start + CHUNK]
            self._digest.update(rest)
            self._bytes += len(rest)
            while len(rest) > 0:
                rest = rest[os.write(self._handle, rest) :]

    def finish(self) -> FileRecord:
        """Sync the file, give it its final name and return its record; the caller syncs the folder."""
        assert self._handle is not None
        os.fsync(self._handle)
        self._close()
        if self._temporary != self.path:
            os.replace(self._temporary, self.path)
        self._finished = True
        return FileRecord(self._bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file and remove it if `finish` has not been called; a finished file stays."""
        self._close()
        if not self._finished:
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def replace_file(path: Path, content: bytes, *, private: bool = False) -> FileRecord:
    """Write `content` to a new file or in place of the old one, sync the folder, and return the record; `private`: mode 0600.

    Raises:
        OSError: if it cannot be written; the previous file is then unchanged.
    """
    file = HashedFile(path, private=private)
    try:
        file.write(content)
        record = file.finish()
    finally:
        file.abandon()
    sync_path(path.parent)
    return record


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, or replace it, and sync its folder; raises `GramianError` if it cannot be written."""
    try:
        replace_file(path, text.encode())
    except OSError as problem:
        raise GramianError(f"{path}: cannot be written ({problem.strerror}); expected a folder that can") from None


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Let other code write a file under a temporary name; it replaces `path` if the block ends without an error.

    If the block raises, the temporary file is removed and the previous file is unchanged.

    Yields:
        The temporary path, an empty file; of mode 0600 with `private`.

    Raises:
        OSError: if the file cannot be written; the previous file is then unchanged.
    """
    handle, temporary = _open_temporary(path, private)
    os.close(handle)
    try:
        yield temporary
        sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """fsync a file, or a folder (the names that were created, renamed or removed in it), so that it survives a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporaries(path: Path) -> None:
    """Remove the temporary files of the private file `path` that killed processes left; for the one process that writes it."""
    for left in path.parent.glob(f"{TEMPORARY}{glob.escape(path.name)}.*"):
        left.unlink(missing_ok=True)


def _open_temporary(path: Path, private: bool) -> tuple[int, Path]:
    """Create the temporary file of `path`; returns its descriptor, open for writing, and its name. `private`: mode 0600."""
    if private:
        handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.name}.", dir=path.parent)
        return handle, Path(name)
    temporary = path.with_name(TEMPORARY + path.name)
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), temporary
