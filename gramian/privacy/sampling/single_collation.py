"""Samples as the loader would collate them alone, to show that padding does not leak from one sample into another."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone

MOST_ALONE = 4
"""Largest number of samples of a batch that are collated alone (each as a batch of one)."""
LARGEST_CUT = 2
"""Largest number of tokens that the user's loop may cut off a batch before the model sees it (language models drop the last).
"""

Path = tuple[Any, ...]
"""Keys and indices that lead from the root of a batch to a tensor."""


@dataclass(frozen=True)
class LastBatch:
    """The batch that a loader yielded last, with a function that collates its records one by one."""

    batch: Any
    records: int
    """Number of records of the batch."""
    singles: Callable[[], list[Any]]
    """Function that returns each record of the batch collated alone, in order."""

    def samples_alone(self, samples: SampleArguments, among: Collection[int]) -> list[SampleAlone]:
        """Up to 4 of the samples numbered in `among`, each collated alone, as arguments of the model.

        Padded samples are chosen, of different lengths where possible, shortest first; a single sample if none is padded. The
        list is empty if the arguments `samples` are not those of this batch. Cost: one record read and collated for each sample
        of the batch.
        """
        tensors = tensors_of(self.batch)
        places = {
            number: next((place for place in (_Place.of(path, t, mine) for path, t in tensors.items()) if place), None)
            for number, mine in enumerate(samples.leaves)
            if samples.rows[number] and isinstance(mine, Tensor)
        }
        if self.records != samples.batch or not any(places.values()):
            return []
        singles = [tensors_of(single) for single in self.singles()]
        sizes = {row: sum(leaf.numel() for leaf in singles[row].values()) for row in among}
        longest = sum(leaf.numel() for leaf in tensors.values()) // samples.batch
        padded = sorted((row for row in sizes if sizes[row] < longest), key=sizes.__getitem__)
        chosen = padded[:: -(-len(padded) // MOST_ALONE)] if padded else [next(iter(sizes))]
        found = [self._alone(samples, places, singles[row], row) for row in chosen]
        return [one for one in found if one is not None]

    def _alone(
        self, samples: SampleArguments, places: "Mapping[int, _Place | None]", single: "Mapping[Path, Tensor]", row: int
    ) -> SampleAlone | None:
        """Sample `row` alone, as arguments of the model; None if it differs from the batch's (random augmentation).

        `places` tells which tensor of the batch each argument comes from, and `single` has the tensors of the sample collated
        alone. An argument that the user made of a batch (positions, lengths) becomes the sample's row, cut to its tokens.
        """
        tensors, taken, left, cut = tensors_of(self.batch), list(samples.leaves), False, dict[int, int]()
        for number, place in places.items():
            if place is None:
                continue
            own, mine = single.get(place.path), samples.leaves[number]
            at_end = _ends(own[0], tensors[place.path][row]) if own is not None and own.shape[:1] == (1,) else None
            if own is None or at_end is None:
                return None
            left = left or at_end
            own = place.cut(own)
            taken[number] = own.to(mine.device, mine.dtype)
            if mine.dim() > 1:
                cut[mine.shape[1]] = own.shape[1]
        for number in (number for number, place in places.items() if place is None):
            mine = samples.leaves[number]
            rows = mine.shape[0] // samples.batch
            own = mine[row * rows : (row + 1) * rows]
            length = cut.get(own.shape[1]) if own.dim() > 1 else None
            if length is not None:
                own = own[:, own.shape[1] - length :] if left else own[:, :length]
            taken[number] = own
        for number, leaf in enumerate(samples.leaves):
            if samples.rows[number] and not isinstance(leaf, Tensor):
                taken[number] = leaf[row : row + 1]
        return SampleAlone(row, pytree.tree_unflatten(taken, samples.spec), left)


@dataclass(frozen=True)
class _Place:
    """Where a model argument comes from in the loader's batch: the tensor's path, and the tokens cut off at both ends."""

    path: Path
    start: int
    end: int

    @classmethod
    def of(cls, path: Path, tensor: Tensor, mine: Tensor) -> "_Place | None":
        """The place of the argument `mine` in one tensor of the batch, up to 2 tokens cut off; None if it is not from it."""
        if _same(tensor, mine):
            return cls(path, 0, 0)
        if tensor.dim() < 2 or tensor.dim() != mine.dim():
            return None
        missing = tensor.shape[1] - mine.shape[1]
        cuts = [cls(path, start, missing - start) for start in range(missing + 1)] if 0 < missing <= LARGEST_CUT else []
        return next((one for one in cuts if _same(one.cut(tensor), mine)), None)

    def cut(self, tensor: Tensor) -> Tensor:
        """Cut the same tokens off a tensor of the batch, or of one record."""
        return tensor[:, self.start : tensor.shape[1] - self.end] if self.start or self.end else tensor


class RecordingCollate:
    """A collate function that stores the records and the batch of its last call, if it ran in this process.

    With DataLoader workers nothing is stored here, and proofs use a slice of the batch in place of a sample collated alone.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        """Wrap the collate function `collate`."""
        self.collate = collate
        self.last: tuple[Sequence[Any], Any] | None = None

    def __call__(self, records: Sequence[Any]) -> Any:
        """Collate records; they and the batch are stored in `last`."""
        batch = self.collate(records)
        self.last = (records, batch)
        return batch

    def __reduce__(self) -> Any:
        """Pickle the collate function without the stored records."""
        return (RecordingCollate, (self.collate,))

    def last_batch(self) -> LastBatch | None:
        """The batch that this process collated last, with its records; None before the first.

        It is always None with DataLoader workers, which collate in their own processes.
        """
        if self.last is None:
            return None
        records, batch = self.last
        return LastBatch(batch, len(records), lambda: [self.collate([record]) for record in records])


def tensors_of(batch: Any) -> dict[Path, Tensor]:
    """{path in the batch: tensor} of all tensors of a batch."""
    leaves, _ = pytree.tree_flatten_with_path(_plain(batch))
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _plain(batch: Any) -> Any:
    """A batch with mappings and dataclasses of any class converted to dicts, which `torch.utils._pytree` can flatten."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    return [_plain(value) for value in batch] if isinstance(batch, list | tuple) else batch


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device, other.dtype), other)


def _ends(alone: Tensor, row: Tensor) -> bool | None:
    """True if a record's tokens are the end of a row of the batch (padded left), False if its beginning, None if neither."""
    if alone.dim() != row.dim() or any(here > there for here, there in zip(alone.shape, row.shape, strict=True)):
        return None
    begins = row[tuple(slice(0, size) for size in alone.shape)]
    ends = row[tuple(slice(there - here, there) for here, there in zip(alone.shape, row.shape, strict=True))]
    if torch.equal(alone, begins):
        return False
    return True if torch.equal(alone, ends) else None
