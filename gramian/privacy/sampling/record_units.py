"""The units of privacy of a data set: which of its records belong to the same user or document, and are drawn together.

Shapes: N records, U units.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.kernels import chacha


@dataclass(frozen=True, eq=False)
class RecordUnits:
    """The records of each unit: those of unit u are `records_N[starts_U[u]]`, …, `records_N[starts_U[u + 1] − 1]`."""

    records_N: NDArray[np.int64]
    starts_U: NDArray[np.int64]
    most: int | None
    """Largest number of records of a unit in one draw; larger units give a random subset; None: all records."""

    @classmethod
    def of(cls, unit_of: Any, most: Any, size: int) -> "RecordUnits":
        """Sort the records of a data set by unit.

        Args:
            unit_of: integers [N], one for each index of the data set, equal for records of one unit.
            most: the argument max_records_per_unit.
            size: number N of records.

        Raises:
            GramianError: naming the argument that is not as described.
        """
        if isinstance(unit_of, Tensor):
            unit_of = unit_of.detach().cpu().numpy()
        try:
            ids_N = np.asarray(unit_of)
        except ValueError:
            ids_N = np.empty(0)
        if ids_N.dtype.kind not in "iu" or ids_N.shape != (size,):
            raise GramianError(
                f"unit_of: expected {size} integers, one for each record of the data set, got {ids_N.dtype} of shape "
                f"{list(ids_N.shape)}"
            )
        if int(ids_N.min()) < 0:
            raise GramianError(f"unit_of: expected ids from 0, got {int(ids_N.min())}")
        if most is not None and (not isinstance(most, int | np.integer) or isinstance(most, bool) or most < 1):
            raise GramianError(f"max_records_per_unit: expected a number of records or None, got {most!r}")
        _, numbers_N, counts_U = np.unique(ids_N, return_inverse=True, return_counts=True)
        starts_U = np.concatenate([[0], np.cumsum(counts_U)]).astype(np.int64)
        return cls(np.argsort(numbers_N, kind="stable"), starts_U, None if most is None else int(most))

    def __len__(self) -> int:
        """Number U of units."""
        return len(self.starts_U) - 1

    @property
    def largest(self) -> int:
        """Largest number of records that one unit has in a draw."""
        counts_U = np.diff(self.starts_U)
        return int(counts_U.max() if self.most is None else counts_U.clip(max=self.most).max())

    def size(self, unit: int) -> int:
        """Number of records of one unit in a draw."""
        count = int(self.starts_U[unit + 1] - self.starts_U[unit])
        return count if self.most is None else min(count, self.most)

    @property
    def digest(self) -> str:
        """Hex hash of the assignment and of the largest number of records; the same on every process of a run."""
        found = hashlib.blake2b(f"{self.most}".encode(), digest_size=16)
        found.update(self.records_N.tobytes() + self.starts_U.tobytes())
        return found.hexdigest()

    def drawn(self, key: bytes, draw_number: int, units: Sequence[int]) -> list[list[int]]:
        """The records of each of these units in the draw of this number, in the order of the data set.

        Of a unit with more than `most` records those with the `most` smallest random numbers take part: words 2i and 2i + 1 of
        the key stream with the draw number as nonce, i counted over `records_N`, under a key made of the sampling key.
        """
        found, own = [], hashlib.blake2b(key=key, person=b"unit's records", digest_size=32).digest()
        for unit in units:
            begin, end = int(self.starts_U[unit]), int(self.starts_U[unit + 1])
            records = self.records_N[begin:end]
            if self.most is not None and end - begin > self.most:
                words = chacha.words(own, draw_number, 2 * begin, 2 * (end - begin)).numpy().astype(np.uint64)
                numbers = (words[0::2] << np.uint64(32)) | words[1::2]
                records = np.sort(records[np.argsort(numbers, kind="stable")[: self.most]])
            found.append(records.tolist())
        return found
