"""The user's DataLoader with its sampler replaced by keyed Poisson draws."""

import copy
import dataclasses
import hashlib
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gramian.core.errors import GramianError
from gramian.privacy.sampling.poisson import Piece, PoissonBatchSampler
from gramian.privacy.sampling.single_collation import LastBatch


class PrivateLoader(DataLoader[Any]):
    """Poisson draws over the data set of a loader, in physical pieces, with all its other settings.

    Each epoch is `len(loader)` draws, counted from `next_draw()` when its iteration begins; what workers had prefetched of a
    loop that was left is drawn again. `on_piece` is called when a batch is handed over, not when it is loaded. A piece without
    records is a batch of zero rows. `drop_last`, `shuffle`, `sampler` and `batch_sampler` of the user's loader are not used.

    Args:
        loader: the user's; its `dataset` is the whole one.
        key: the sampling key, 32 bytes, the same on every rank.
        sample_rate: probability of a record to take part in a draw.
        expected_batch: records of a draw on average, over all ranks; gives the length of an epoch.
        next_draw: the number of the next draw.
        on_piece: called with (draw, piece, last, number of records) for each batch handed over.
        rank: of this process.
        world: number of data-parallel ranks.
        max_physical_batch: most records in one batch; None = the whole share at once.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        key: bytes,
        sample_rate: float,
        expected_batch: float,
        next_draw: Callable[[], int],
        on_piece: Callable[[int, int, bool, int], None] = lambda draw, piece, last, records: None,
        rank: int = 0,
        world: int = 1,
        max_physical_batch: int | None = None,
    ) -> None:
        size = size_of(loader)
        if not expected_batch > 0:
            raise GramianError(f"expected_batch: {expected_batch}; expected more than 0")
        steps = max(1, round(size / expected_batch))
        self._on_piece = on_piece
        self._draws = PoissonBatchSampler(
            key,
            size,
            sample_rate,
            steps,
            next_draw=next_draw,
            rank=rank,
            world=world,
            max_physical_batch=max_physical_batch,
        )
        self._batches = _FilledPieces(self._draws)
        self._empty: Any = None
        self._handed: tuple[list[int], Any] = ([], None)
        """Indices of the records of the last batch, and the batch."""
        self._last = True
        super().__init__(
            loader.dataset,
            batch_sampler=self._batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches of the pieces in order."""
        batches = super().__iter__()
        handed = self._batches.handed
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            while not (piece := handed.popleft()).indices:
                yield self._hand_over(piece, self.empty_batch())
            yield self._hand_over(piece, batch)
        while handed:
            yield self._hand_over(handed.popleft(), self.empty_batch())

    def draws(self) -> Iterator[Iterator[Any]]:
        """An epoch draw by draw, each an iterator over the batches of its pieces, which must be gone through to its end."""
        batches = iter(self)

        def pieces(batch: Any) -> Iterator[Any]:
            yield batch
            while not self._last:
                yield next(batches)

        for first in batches:
            yield pieces(first)

    def rekey(self, key: bytes) -> None:
        """Draw with another key from the next epoch on: that of a checkpoint."""
        self._draws.key = key

    def __len__(self) -> int:
        """Draws, that is optimizer steps, per epoch; `max_physical_batch` makes an iteration yield more batches than that."""
        return len(self._draws)

    def empty_batch(self) -> Any:
        """A batch of zero rows: one record collated, and every tensor cut to [:0]."""
        if self._empty is None:
            with _untouched_generators():
                self._empty = (without_rows(self.collate_fn([self.dataset[0]])),)
        return copy.copy(self._empty[0])

    def _hand_over(self, piece: Piece, batch: Any) -> Any:
        self._on_piece(piece.draw, piece.piece, piece.last, len(piece.indices))
        self._last, self._handed = piece.last, (list(piece.indices), batch)
        return batch

    def last_batch(self) -> LastBatch:
        """The batch that was handed over last, and how its records are collated alone."""
        indices, batch = self._handed

        def singles() -> list[Any]:
            with _untouched_generators():
                return [self.collate_fn([self.dataset[index]]) for index in indices]

        return LastBatch(batch, len(indices), singles)


class _FilledPieces:
    """The batch sampler inside: index lists of the pieces that have records, and a queue of all pieces begun, in order.

    Workers never see an empty list, which many data sets cannot index.
    """

    def __init__(self, draws: PoissonBatchSampler) -> None:
        self._draws = draws
        self.handed: deque[Piece] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        # A new queue for a new epoch, before the first index list is asked for: a loop that was left does not disturb it.
        self.handed = deque()
        return self._filled(self.handed)

    def _filled(self, handed: deque[Piece]) -> Iterator[list[int]]:
        for piece in self._draws.epoch():
            handed.append(piece)
            if piece.indices:
                yield piece.indices

    def __len__(self) -> int:
        return len(self._draws)


def size_of(loader: DataLoader[Any]) -> int:
    """Records of a loader's data set; refuses what Poisson sampling cannot draw from.

    Args:
        loader: the user's.

    Returns:
        The number of records.
    """
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


def without_rows(batch: Any) -> Any:
    """A collated batch with every tensor and array cut to [:0]; tuples, lists, mappings and dataclasses keep their types.

    A list or tuple without any tensor is taken for one value per record, and is emptied.

    Args:
        batch: what a collate function returned.

    Returns:
        The same structure with zero rows.
    """
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, str | bytes):
        return batch
    if isinstance(batch, Mapping):
        emptied = {key: without_rows(value) for key, value in batch.items()}
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)
            for key, value in emptied.items():
                clone[key] = value
            return clone
        return emptied
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            field.name: without_rows(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init
        }
        return dataclasses.replace(batch, **fields)
    if isinstance(batch, Sequence):
        if not _has_tensors(batch):
            return batch[:0]
        emptied_items = [without_rows(value) for value in batch]
        if isinstance(batch, tuple):
            return type(batch)(*emptied_items) if hasattr(batch, "_fields") else tuple(emptied_items)
        return emptied_items
    return batch


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    if isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping):
        return any(_has_tensors(v) for v in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_tensors(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, Sequence) and any(_has_tensors(v) for v in value)


def fingerprint(dataset: Any) -> tuple[int, int]:
    """(length, 63-bit digest of the first, the middle and the last record): ranks with the same data have the same.

    A record that reads differently twice, by random augmentation, is left out. A function of private records: for comparing
    ranks, and for the checkpoint, which is as secret as they are.

    Args:
        dataset: with a length and indices.

    Returns:
        Two integers for an int64 tensor.
    """
    size = len(dataset)
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    for index in sorted({0, size // 2, size - 1}) if size else ():
        with _untouched_generators():
            once, again = _digest(dataset[index]), _digest(dataset[index])
        digest.update(once if once == again else b"random")
    return size, int.from_bytes(digest.digest(), "little") >> 1


def _digest(record: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, record)
    return digest.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    """Type, shape and content of a record's parts, in order."""
    update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        update(f"{value.dtype}{list(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _feed(update, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(update, part)
    else:
        try:
            update(pickle.dumps(value, protocol=4))
        except Exception:  # whatever cannot be pickled counts by its type alone
            update(b"?")


@contextmanager
def _untouched_generators() -> Iterator[None]:
    """Reading a record here leaves the global generators of torch, numpy and Python as they were."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
