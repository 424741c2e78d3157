"""Cyclic Poisson sampling: records are in groups, and draw t takes from group t mod groups, each record independently.

So a record takes part at most once in any `groups` draws that follow each other, which correlated noise rests on. The group
of a record is a random number of a secret key stream, independent of all other records: with one record more, those that were
there stay where they were. Groups differ in size as binomial numbers do.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gramian.kernels import chacha
from gramian.privacy.sampling.poisson import draw


@dataclass
class Groups:
    """Which of `count` groups each record is in; the same for the whole run, whatever keys its draws have."""

    key: bytes = field(repr=False)
    """32 bytes, the same on every rank and after every resume."""
    count: int
    _of: NDArray[np.uint64] | None = field(default=None, repr=False)

    def of(self, size: int) -> NDArray[np.uint64]:
        """The group of each of `size` records: ⌊count · u_i⌋, u_i the 32-bit uniform number i of the key stream."""
        if self._of is None or len(self._of) != size:
            words = chacha.words(self.key, 0, 0, size).numpy().astype(np.uint64)
            self._of = (words * np.uint64(self.count)) >> np.uint64(32)
        return self._of

    def regroup(self, key: bytes) -> None:
        """Use the groups of another key, that of a loaded checkpoint."""
        self.key, self._of = key, None

    def cyclic_draw(self, key: bytes, number: int, size: int, rate: float) -> NDArray[np.int64]:
        """Indices, ascending, of draw `number`: records of group number mod count, each with probability count · rate."""
        indices = draw(key, number, size, min(1.0, rate * self.count))
        found: NDArray[np.int64] = indices[self.of(size)[indices] == number % self.count]
        return found
