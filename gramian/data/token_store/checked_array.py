"""A memory map of a file whose blocks are compared with their checksums when they are first read."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError

BLOCK = 1 << 20
"""Bytes of a block."""
DIGEST = 8
"""Bytes of a block's checksum."""


def block_checksums(content: memoryview) -> str:
    """The checksums of all blocks of a file's content, hexadecimal."""
    return "".join(_checksum(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK))


class CheckedArray:
    """A flat array in a file, read by slices; a block that is not as it was written is an error, not a token.

    Another process opens the file again by its name. Cost of the first read of a block: one pass over it, about 1 ms.
    """

    def __init__(self, path: Path, dtype: str, length: int, checksums: str) -> None:
        path = path.resolve()  # another process may work in another folder
        self._from = (path, dtype, length, checksums)
        self._path = path
        self.dtype = np.dtype(dtype)
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if length else np.empty(0, dtype=np.uint8)
        )
        whole = len(self._bytes) // self.dtype.itemsize * self.dtype.itemsize
        self._array = self._bytes[:whole].view(self.dtype)
        self._checksums = bytes.fromhex(checksums)
        self._unread = np.ones(len(self._checksums) // DIGEST, dtype=bool)
        if len(self._array) != length or len(self._unread) != -(-len(self._bytes) // BLOCK):
            raise GramianError(
                f"{path}: has {len(self._bytes):,} bytes; expected {length:,} tokens and their checksums, or the folder "
                "removed, so that it is written again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedArray, self._from

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        """The elements of a slice with a step of 1.

        Raises:
            GramianError: if a block of them differs from what was written.
        """
        begin, stop, _ = part.indices(len(self))
        size = self.dtype.itemsize
        for block in range(begin * size // BLOCK, -(-stop * size // BLOCK)):
            if self._unread[block]:
                self._check(block)
        return self._array[begin:stop]

    def _check(self, block: int) -> None:
        content = self._bytes[block * BLOCK : (block + 1) * BLOCK].data
        if _checksum(content) != self._checksums[block * DIGEST : (block + 1) * DIGEST].hex():
            raise GramianError(
                f"{self._path}: block {block} (of 1 MiB) is not as it was written; expected an undamaged disk, or the folder "
                "removed, so that it is written again"
            )
        self._unread[block] = False


def _checksum(content: memoryview) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST).hexdigest()
