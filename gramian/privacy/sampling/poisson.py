"""Keyed Poisson sampling: whether a record takes part in a draw is a function of (key, draw number, record).

It does not depend on the number of ranks, so a run resumes from a draw number, and a change of world size changes which rank
computes a record, not which records are drawn.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gramian.core.errors import GramianError
from gramian.kernels import chacha
from gramian.privacy.sampling.record_units import RecordUnits

_CHUNK = 2**19
"""Number of records whose random numbers are drawn at once: 4 MB of key stream."""


def draw(key: bytes, draw_number: int, size: int, rate: float, most: int | None = None) -> NDArray[np.int64]:
    """Indices, ascending, of one Poisson draw from `size` records: record i takes part, independently, if u_i < rate.

    u_i is the 53-bit uniform number made of the 32-bit words 2i and 2i+1 of the key stream with the draw number (below 2⁹⁶) as
    nonce. Of more than `most` records those with the `most` smallest u_i stay: the u_i of drawn records are independent and
    uniform in [0, rate), so that this is a random subset. Cost: 8·size bytes of key stream, about 10 ms for a million records.

    Raises:
        GramianError: for a rate outside (0, 1] or without records.
    """
    if not 0 < rate <= 1:
        raise GramianError(f"sample_rate: {rate}; expected a probability in (0, 1]")
    if size < 1:
        raise GramianError(f"dataset: {size} records; expected at least 1")
    found, numbers = [], []
    for at in range(0, size, _CHUNK):
        count = min(_CHUNK, size - at)
        words = chacha.words(key, draw_number, 2 * at, 2 * count).numpy().astype(np.uint64).reshape(count, 2)
        uniform = ((words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))) * 2.0**-53
        drawn = np.flatnonzero(uniform < rate)
        found.append(drawn + at)
        numbers.append(uniform[drawn])
    indices = np.concatenate(found)
    if most is None or len(indices) <= most:
        return indices
    return np.sort(indices[np.argsort(np.concatenate(numbers), kind="stable")[:most]])


def share(indices: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """The records of a draw that one rank computes: every `world_size`-th, from index `rank` on; sizes differ by at most one.

    Raises:
        GramianError: if `rank` is not below `world_size`.
    """
    if not 0 <= rank < world_size:
        raise GramianError(f"rank: {rank} of {world_size}; expected 0 to {world_size - 1}")
    return indices[rank::world_size]


def pieces(count_per_rank_max: int, max_physical_batch: int | None) -> int:
    """Number of pieces (micro-batches) into which every rank splits a draw: as many as the largest share needs, at least 1.

    `count_per_rank_max` is the largest number of records of a rank; `max_physical_batch` None: one piece.

    Raises:
        GramianError: if max_physical_batch is below 1.
    """
    if max_physical_batch is None:
        return 1
    if max_physical_batch < 1:
        raise GramianError(f"max_physical_batch: {max_physical_batch}; expected at least 1 or None")
    return max(1, -(-count_per_rank_max // max_physical_batch))


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a Poisson draw on one rank.

    `draw` is the number of the draw, `piece` the number of the micro-batch in it, `last` True for its last, `indices` the
    records, `units` the unit of each; None: each record is a unit.
    """

    draw: int
    piece: int
    last: bool
    indices: list[int]
    units: list[int] | None = None

    @property
    def count(self) -> int:
        """Number of units whose records it has."""
        return len(self.indices if self.units is None else set(self.units))


def _filled(units: Sequence[int], sizes: Sequence[int], most: int | None) -> list[list[int]]:
    """Units in groups of at most `most` records, in order, with `sizes` records of each; a larger unit is a group by itself."""
    groups: list[list[int]] = []
    room = 0
    for unit, size in zip(units, sizes, strict=True):
        if not groups or (most is not None and size > room):
            groups.append([])
            room = most or 0
        groups[-1].append(unit)
        room -= size
    return groups


class PoissonBatchSampler:
    """Record indices of the micro-batches (pieces) of one rank over an epoch, as the `batch_sampler` of a DataLoader.

    Every rank has the same number of pieces in every draw. Pieces without records are not yielded, since many data sets cannot
    be indexed by an empty list; the queue `begun` gets all of them.

    Args:
        key: the sampling key, 32 bytes, the same on every rank.
        size: number of records of the complete data set; of units, if there are `units`.
        rate: probability that a record, or unit, takes part in a draw.
        steps: number of draws per epoch.
        next_draw: function that returns the number of the first draw when an epoch begins.
        rank: rank of this process.
        world_size: number of ranks.
        max_physical_batch: largest number of records in one piece; None: all of the rank's records.
        max_draw: largest number of records (units) of a draw over all ranks, which larger ones are cut to; None: no limit.
        draw_of: function (key, number, size, rate) that returns the records of a draw in place of `draw`, as of cyclic
            sampling; None: `draw`.
        units: the records of each unit, which are drawn together, and stay in one piece; None: each record is a unit.
    """

    def __init__(
        self,
        key: bytes,
        size: int,
        rate: float,
        steps: int,
        *,
        next_draw: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world_size: int = 1,
        max_physical_batch: int | None = None,
        max_draw: int | None = None,
        draw_of: Callable[[bytes, int, int, float], NDArray[np.int64]] | None = None,
        units: RecordUnits | None = None,
    ) -> None:
        if steps < 1:
            raise GramianError(f"steps: {steps}; expected at least 1")
        pieces(0, max_physical_batch)
        share(np.empty(0, np.int64), rank, world_size)
        self.key = key
        self.parts: int | None = None
        """Number of pieces of every draw, for loops that count batches; None: as max_physical_batch says."""
        self.size, self.rate, self.steps, self.max_draw = size, rate, steps, max_draw
        self.rank, self.world_size, self.max_physical_batch = rank, world_size, max_physical_batch
        self._next_draw, self._draw_of, self._units = next_draw, draw_of, units
        self.begun: deque[Piece] = deque()
        """All pieces of the last epoch so far, in order, that were not taken from here; a new queue for each epoch."""

    def pieces_of(self, number: int) -> list[Piece]:
        """This rank's pieces (micro-batches) of the draw of this number, in order."""
        if self._draw_of is None:
            indices = draw(self.key, number, self.size, self.rate, self.max_draw)
        else:
            indices = self._draw_of(self.key, number, self.size, self.rate)
        if self._units is not None:
            return self._pieces_of_units(self._units, number, indices)
        mine = share(indices, self.rank, self.world_size)
        most = len(share(indices, 0, self.world_size))
        parts = self.parts or pieces(most, self.max_physical_batch)
        length = -(-most // parts) if self.parts else self.max_physical_batch or max(1, len(mine))
        return [
            Piece(number, part, part == parts - 1, mine[part * length : (part + 1) * length].tolist())
            for part in range(parts)
        ]

    def _pieces_of_units(self, units: RecordUnits, number: int, drawn: NDArray[np.int64]) -> list[Piece]:
        """`pieces_of` for units: each piece has as many as fit into max_physical_batch, with all records of each.

        Every rank computes the pieces of all, so that all have as many as the one that needs most.
        """
        counts: list[list[list[int]]] = []
        for rank in range(self.world_size):
            theirs = share(drawn, rank, self.world_size).tolist()
            length = -(-len(share(drawn, 0, self.world_size)) // (self.parts or 1))
            sizes = [1] * len(theirs) if self.parts else [units.size(unit) for unit in theirs]
            counts.append(_filled(theirs, sizes, length if self.parts else self.max_physical_batch))
        parts = self.parts or max(1, *map(len, counts))
        mine = counts[self.rank] + [[]] * (parts - len(counts[self.rank]))
        found = []
        for part, of_part in enumerate(mine):
            records = units.drawn(self.key, number, of_part)
            owners = [unit for unit, own in zip(of_part, records, strict=True) for _ in own]
            found.append(Piece(number, part, part == parts - 1, [index for own in records for index in own], owners))
        return found

    def __iter__(self) -> Iterator[list[int]]:
        self.begun = begun = deque[
            Piece
        ]()  # before the first list is asked for: a loop that was left does not disturb it
        return self._filled(begun)

    def _filled(self, begun: deque[Piece]) -> Iterator[list[int]]:
        first = self._next_draw()
        for number in range(first, first + self.steps):
            for piece in self.pieces_of(number):
                begun.append(piece)
                if piece.indices:
                    yield piece.indices

    def __len__(self) -> int:
        """Number of draws (optimizer steps) per epoch; an epoch yields at least as many pieces."""
        return self.steps
