"""The arguments of a forward by sample: which parts carry samples, and the same call on other samples."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.taps.proof.fingerprint import Fingerprint
from gramian.taps.units import Units

SCALARS = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Samples:
    """Arguments, flattened, and the rows that each leaf has for one sample (0: it belongs to no sample)."""

    leaves: list[Any]
    spec: Any
    rows: list[int]
    batch: int
    units: Units | None = None

    @classmethod
    def of(
        cls, arguments: Any, batch: int, *, given: bool = False, fixed: Sequence[int] = (), units: Units | None = None
    ) -> "Samples":
        """Find the leaves that carry samples: tensors whose axis 0 is B, and lists of B plain values.

        Args:
            arguments: (args, kwargs), or a batch in any structure.
            batch: B.
            given: True if the user named B: where no tensor has B rows, those with k·B are then taken for samples.
            fixed: leaves to leave alone although they have B rows.
            units: which rows or tokens belong together; None: each row is a unit.
        """
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=lambda value: _is_list_of(value, batch))
        rows = [0 if i in fixed else _rows(leaf, batch) for i, leaf in enumerate(leaves)]
        if given and not any(rows):
            rows = [_grouped_rows(leaf, batch) for leaf in leaves]
        return cls(leaves, spec, rows, batch, units)

    @property
    def ambiguous(self) -> list[int]:
        """Leaves other than the first tensor whose axis 0 may be B by chance: a mask [T, T] where T is B."""
        tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        if not tensors:
            return []
        elsewhere = self.batch in self.leaves[tensors[0]].shape[1:]
        return [i for i in tensors[1:] if self.rows[i] and (elsewhere or self.batch in self.leaves[i].shape[1:])]

    @property
    def structure(self) -> tuple[Any, ...]:
        """Nesting, names, dtypes and ranks, and which leaves carry samples; no sizes."""
        kinds = [
            (str(leaf.dtype), leaf.dim(), bool(rows)) if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf, rows in zip(self.leaves, self.rows, strict=True)
        ]
        return (str(self.spec), *kinds, None if self.units is None else self.units.ids.dim())

    def uneven(self) -> tuple[int, ...]:
        """Leaves of integers in which samples have different numbers of tokens that do not count: −100, or 0 in a mask.

        A mean over the tokens of a batch tells samples apart as long as these numbers are equal, and couples them once they are
        not. A mask holds zeros and ones. Cost: some passes over each such leaf; waits for the device once.
        """
        found, differ = [], []
        for number, (leaf, rows) in enumerate(zip(self.leaves, self.rows, strict=True)):
            if not rows or not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dim() < 2:
                continue
            tokens_BT = leaf.reshape(self.batch, -1)
            ignored_B, zeros_B = ((tokens_BT == value).sum(1) for value in (-100, 0))
            masks = ((tokens_BT == 0) | (tokens_BT == 1)).all()
            found.append(number)
            differ.append((ignored_B != ignored_B[0]).any() | (masks & (zeros_B != zeros_B[0]).any()))
        flags = torch.stack(differ).tolist() if differ else []
        return tuple(number for number, flag in zip(found, flags, strict=True) if flag)

    def take(self, source: Sequence[int]) -> Any:
        """The arguments with sample source[i] in place i; copies, which the forward may write into."""
        index = torch.tensor(source)
        taken = [
            _taken(leaf, index, rows) if rows else _own(leaf) for leaf, rows in zip(self.leaves, self.rows, strict=True)
        ]
        return pytree.tree_unflatten(taken, self.spec)

    def take_tokens(self, source: Tensor) -> Any:
        """The arguments with token source[b, t] of the flattened batch in place [b, t].

        Only the first tensor and real ones are content; other integers and flags (documents, positions, masks) say how tokens
        of a row belong together, and stay.
        """
        first = next((i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)), -1)
        taken = [
            self.tokens_of(leaf, source)
            if i == first or (isinstance(leaf, Tensor) and leaf.is_floating_point())
            else _own(leaf)
            for i, leaf in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(taken, self.spec)

    def tokens_of(self, leaf: Any, source: Tensor) -> Any:
        """A tensor [B, T, …] with other tokens in place; anything else as a copy."""
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != source.shape:
            return _own(leaf)
        return leaf.detach().flatten(0, 1)[source.to(leaf.device)]

    def contents(self) -> list[int]:
        """A hash of every sample's content, over all leaves that carry samples."""
        total = torch.zeros(self.batch, dtype=torch.int64)
        for number, (leaf, rows) in enumerate(zip(self.leaves, self.rows, strict=True)):
            if rows and isinstance(leaf, Tensor):
                total += Fingerprint.of(leaf.reshape(self.batch, rows, *leaf.shape[1:]), number).hashes_R
            elif rows:
                total += torch.tensor([hash(repr(value)) >> 1 for value in leaf])
        return [int(value) for value in total]


def donors(contents: Sequence[int], draw: random.Random) -> list[int | None]:
    """For every sample another one of other content, drawn at random; None where all others are equal to it."""
    found: list[int | None] = []
    everyone = list(range(len(contents)))
    for own in contents:
        draw.shuffle(everyone)
        found.append(next((i for i in everyone if contents[i] != own), None))
    return found


def _is_list_of(value: Any, batch: int) -> bool:
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != batch or not batch:
        return False
    return all(isinstance(item, SCALARS) for item in value)


def _rows(leaf: Any, batch: int) -> int:
    if isinstance(leaf, Tensor):
        return int(leaf.dim() > 0 and leaf.shape[0] == batch)
    return int(_is_list_of(leaf, batch))


def _grouped_rows(leaf: Any, batch: int) -> int:
    fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] and leaf.shape[0] % batch == 0
    return leaf.shape[0] // batch if fits else 0


def _taken(leaf: Any, index: Tensor, rows: int) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)(leaf[i] for i in index.tolist())
    grouped = leaf.detach().reshape(leaf.shape[0] // rows, rows, *leaf.shape[1:])
    taken = grouped.index_select(0, index.to(leaf.device)).flatten(0, 1)
    return taken.requires_grad_(leaf.requires_grad)


def _own(leaf: Any) -> Any:
    """A leaf that a forward may write into."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, SCALARS) or callable(leaf):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # whatever cannot be copied is passed as it is
        return leaf
