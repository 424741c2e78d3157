"""The user's DataLoader with its sampler replaced by keyed Poisson draws."""

import copy
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from gramian.core.errors import GramianError
from gramian.privacy.sampling.cyclic import Groups
from gramian.privacy.sampling.dataset_fingerprint import preserved_generators
from gramian.privacy.sampling.empty_batch import without_rows
from gramian.privacy.sampling.poisson import Piece, PoissonBatchSampler
from gramian.privacy.sampling.row_order import reorders
from gramian.privacy.sampling.single_collation import LastBatch

BATCHES_COMPARED, MOST_COMPARED = 8, 16
"""Batches of several units in which the order of rows is compared with that of records, and records of each."""


class PrivateLoader(DataLoader[Any]):
    """A DataLoader of Poisson draws over a loader's data set, in micro-batches (pieces), with all its other settings.

    If a loop is left early, batches that workers had prefetched are drawn again in the next. `on_piece` is called when a batch
    is yielded, not when it is loaded. A piece without records is a batch of zero rows. `drop_last`, `shuffle`, `sampler` and
    `batch_sampler` of the user's loader are not used.

    Args:
        loader: the user's loader; its `dataset` is the complete one.
        draws: the draws of an epoch, of all records of that data set.
        on_piece: called with the piece of each batch that is yielded.
        groups: groups of cyclic sampling, by which `draws` are made; None: every draw is from all records.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: PoissonBatchSampler,
        on_piece: Callable[[Piece], None] = lambda piece: None,
        groups: Groups | None = None,
    ) -> None:
        self._on_piece = on_piece
        self._device = getattr(loader, "device", None)  # of a loader that Accelerate prepared
        self._is_accelerate_prepared = True  # Accelerate's prepare() leaves it as it is: draws are shared out already
        self.draws_of_epoch, self.groups = draws, groups
        """The draws, and the groups of cyclic sampling that they are from; None: each is from all records."""
        self._empty: Any = None
        self._unordered = BATCHES_COMPARED
        """Number of batches in which `refuse_reordering` still looks at the order of rows."""
        self._last: tuple[Piece, Any] = (Piece(-1, 0, True, []), None)
        """The piece (micro-batch) that was yielded last, and its batch."""
        super().__init__(loader.dataset, batch_sampler=draws, **loading_options(loader))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of an epoch in order; a micro-batch without records is a batch of zero rows."""
        for piece, batch in self.pieces():
            self.begin(piece, batch)
            yield batch

    def pieces(self) -> Iterator[tuple[Piece, Any]]:
        """Yield (piece, batch) of an epoch, for loops that read ahead: `begin` must be called before each batch's forward."""
        batches = super().__iter__()
        begun = self.draws_of_epoch.begun
        for batch in batches:
            while not (piece := begun.popleft()).indices:
                yield piece, self._placed(self.empty_batch())
            yield piece, self._placed(batch)
        while begun:
            yield begun.popleft(), self._placed(self.empty_batch())

    def _placed(self, batch: Any) -> Any:
        """The batch on the device that Accelerate chose; as it is without Accelerate."""
        if self._device is None:
            return batch
        return pytree.tree_map(lambda leaf: leaf.to(self._device) if hasattr(leaf, "to") else leaf, batch)

    def draws(self) -> Iterator[Iterator[Any]]:
        """Yield, for each Poisson draw of an epoch, an iterator over its micro-batches.

        Each iterator must be run to its end before the next draw is asked for.
        """
        batches = iter(self)

        def pieces(batch: Any) -> Iterator[Any]:
            yield batch
            while not self._last[0].last:
                yield next(batches)

        for first in batches:
            yield pieces(first)

    def split(self, parts: int) -> None:
        """From the next epoch on, yield every draw in exactly `parts` micro-batches, some of which may have no records."""
        self.draws_of_epoch.parts = parts

    def rekey(self, key: bytes, groups: bytes) -> None:
        """Use other keys, of a loaded checkpoint, for all draws that are made from now on: of sampling, and of its groups."""
        self.draws_of_epoch.key = key
        if self.groups is not None:
            self.groups.regroup(groups)

    def __len__(self) -> int:
        """Number of draws (optimizer steps) per epoch; with `max_physical_batch` an epoch may yield more batches."""
        return len(self.draws_of_epoch)

    def empty_batch(self) -> Any:
        """A batch of zero rows: the first record, collated alone, with every tensor cut to [:0]."""
        if self._empty is None:
            with preserved_generators():
                self._empty = (without_rows(self.collate_fn([self.dataset[0]])),)
        return copy.copy(self._empty[0])

    def begin(self, piece: Piece, batch: Any) -> None:
        """Begin a piece (micro-batch) that `pieces` yielded, so that the next forward and backward are counted as its own.

        Raises:
            GramianError: if an earlier draw was summed and no optimizer step released it.
        """
        self._on_piece(piece)
        self._last = (piece, batch)

    def refuse_reordering(self) -> None:
        """Raise a `GramianError` if the collate function reorders records, whose rows are given to units in their order.

        Looked at in the first batches with several units, on a record of each, which is read and collated again.
        """
        piece = self._last[0]
        if piece.units is None or self._unordered < 1 or piece.count < 2:
            return
        self._unordered -= 1
        chosen = list(dict(zip(piece.units, piece.indices, strict=True)).values())[:MOST_COMPARED]
        with preserved_generators():
            wrong = reorders(self.collate_fn, [self.dataset[index] for index in chosen])
        if wrong:
            raise GramianError(
                "data_loader: its collate_fn reorders records, so that rows would be clipped as another unit's; expected "
                "rows in the order of the records, or engine.units(ids) with the unit of each row"
            )

    def last_batch(self) -> LastBatch:
        """The batch that was yielded last, and a function that collates each of its records alone."""
        piece, batch = self._last

        def singles() -> list[Any]:
            with preserved_generators():
                return [self.collate_fn([self.dataset[index]]) for index in piece.indices]

        return LastBatch(batch, len(piece.indices), singles)


def records_of(loader: DataLoader[Any]) -> int:
    """Number of records of a loader's data set; a `GramianError` if Poisson sampling cannot draw from it."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise GramianError(
            f"data_loader: {type(dataset).__name__} is an IterableDataset; expected one with indices, or poisson_sampling=False"
        )
    if not isinstance(dataset, Sized) or len(dataset) < 1:
        raise GramianError(f"data_loader: {type(dataset).__name__} has no records; expected a data set with a length")
    if loader.batch_sampler is None:
        raise GramianError("data_loader: batch_size=None switches batching off; expected a batch size")
    return len(dataset)


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Keyword arguments of a DataLoader that say how it loads, with which workers and collation, and not which records."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}
