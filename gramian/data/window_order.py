"""The order of the windows: one keyed permutation per epoch, so that a batch is a pure function of seed and batch index."""

import hashlib
import math

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

ROUNDS = 12
"""Rounds of the Feistel network that permutes the windows; with fewer, the order of a few windows is visibly not random."""


class Permutation:
    """A permutation of 0 … size - 1, selected by a key; any part of it is computed without the rest.

    A Feistel network on pairs (l, r) with l < a and r < b, where a · b is `size` or little more. The rounds alternate

        l ← l + F(r) mod a    and    r ← r + F(l) mod b

    where F is a keyed 64-bit mix. Each round is invertible, so the network permutes 0 … a · b - 1. Results of `size` or more
    pass through the network again until they are smaller (cycle walking), which permutes 0 … size - 1. O(n) for n indices.
    Raises a GramianError if `size` is not in 1 … 2^62 - 1.

    Example:
        >>> sorted(Permutation(5, b"key")(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: bytes) -> None:
        if not 1 <= size < 2**62:
            raise GramianError(f"size: expected at least 1 and less than 2^62, got {size}")
        self.size = size
        left = math.isqrt(size - 1) + 1
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        self._keys = np.frombuffer(
            b"".join(hashlib.blake2b(key, digest_size=8, salt=bytes([turn])).digest() for turn in range(ROUNDS)),
            dtype="<u8",
        ).astype(np.uint64)

    def __call__(self, index: Int64s) -> Int64s:
        """Map indices, int64 [n] in 0 … size - 1, to their places in the permutation, int64 [n] of the same range."""
        places = self._network(index.astype(np.uint64))
        while len(outside := np.flatnonzero(places >= np.uint64(self.size))):
            places[outside] = self._network(places[outside])
        return places.astype(np.int64)

    def _network(self, index: UInt64s) -> UInt64s:
        left, right = index // self._right, index % self._right
        for turn, key in enumerate(self._keys):
            if turn % 2:
                right = (right + _mix(left ^ key) % self._right) % self._right
            else:
                left = (left + _mix(right ^ key) % self._left) % self._left
        return left * self._right + right


def windows_at(position: int, size: int, batch: int, seed: int) -> Int64s:
    """Indices of the windows of the batch with index `position` in the run, int64 [batch]; `size` is the number of windows.

    An endless sequence contains all windows once per epoch, in the permutation with the key (seed, epoch); the batch at
    position p is its elements p · batch … p · batch + batch - 1. A batch may begin in one epoch and end in a later one.
    """
    windows: list[Int64s] = []
    draw, stop = position * batch, (position + 1) * batch
    while draw < stop:
        epoch, inside = divmod(draw, size)
        count = min(stop - draw, size - inside)
        permutation = Permutation(size, f"{seed}/{epoch}".encode())
        windows.append(permutation(np.arange(inside, inside + count, dtype=np.int64)))
        draw += count
    return np.concatenate(windows)


def _mix(values: UInt64s) -> UInt64s:
    """Mix the bits of each uint64 by the finaliser of splitmix64; products wrap."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
