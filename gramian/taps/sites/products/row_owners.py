"""Which sample every row of a tensor belongs to, followed through a layer's own code.

A mixture of experts sorts the tokens of a batch by expert, so the shape of a tensor inside it says nothing about samples. Each
function of torch that the layer calls is seen here. One that moves rows (an index, a transposition, a reshape) is applied to
the rows' owners, too; the result of any other has the owners of its first argument with as many rows. That is an assumption
about functions that mix or reorder rows in other ways; the row proof finds rows that were given to the wrong sample.

The owner of a row is sample · 2³² + token: the number of its sample, and that of the token inside the sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.taps.gradients.grouped_rows import BITS
from gramian.taps.sites.batch_layout import Layout, split
from gramian.taps.sites.products.weight_views import UnknownUse

MOVES = frozenset((
    "__getitem__", "T", "mT", "t", "index_select", "repeat_interleave", "repeat", "tile", "transpose", "swapaxes",
    "swapdims", "permute", "movedim", "moveaxis", "expand", "expand_as", "broadcast_to", "narrow", "select", "split",
    "split_with_sizes", "chunk", "tensor_split", "unbind", "flip", "roll", "cat", "concat", "concatenate", "stack",
))  # fmt: skip
"""Names of functions that only move rows: they are called once more, on the owners."""
RESHAPES = frozenset((
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "_unsafe_view", "view_as",
    "reshape_as",
))  # fmt: skip
ADDS_ROWS = frozenset((
    "index_add", "index_add_", "index_copy", "index_copy_",
))  # fmt: skip
"""Names of functions (x, axis, index, rows) that write rows into x at an index."""


@dataclass(frozen=True)
class Owners:
    """The owners [*rows] of a tensor [*rows, features]."""

    rows: Tensor
    """Integers; on the CPU if `fixed`, whatever the device of the tensor."""
    fixed: bool
    """True if they follow from shapes alone, False if the content of a tensor has moved rows."""
    sequence: int
    """Number of tokens of a sample that owners count; 0: of several tensors with different numbers."""


class RowOwners:
    """The owners of the rows of tensors that a layer's code makes."""

    def __init__(self, inputs: Sequence[Tensor], layouts: Sequence[Layout], batch: int) -> None:
        """Begin with tensors of k·B rows where `layouts` have the samples; others have no owners."""
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for x, layout in zip(inputs, layouts, strict=True):
            rows, axis = x.shape[:-1], layout.axis
            if batch and axis is not None and axis < len(rows) and rows[axis] and rows[axis] % batch == 0:
                self._of[x] = Owners(_in_order(batch, tuple(rows), layout), True, math.prod(rows) // batch)

    def of_use(self, x: Tensor, y: Tensor, columns: bool) -> Owners:
        """The owners of the rows of y, a product of the rows of x and a weight.

        `columns`: rows end with the axis before the last, which has one entry.

        Raises:
            UnknownUse: if they are not known, or y has other rows than x.
        """
        known: Owners | None = self._of.get(x)
        if known is None or known.rows.shape != x.shape[:-1]:
            raise UnknownUse("rows of unknown samples")
        rows = known.rows
        if columns:
            rows = rows[..., :1].expand(*rows.shape[:-1], y.shape[-2])
        if rows.shape != y.shape[:-1]:
            raise UnknownUse("another number of rows")
        return Owners(rows, known.fixed, known.sequence)

    def set(self, y: Tensor, owners: Owners) -> None:
        """Give the rows of y these owners."""
        self._of[y] = owners

    def follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Find the owners of the rows of `result`, which a function of this name has returned."""
        leaves = pytree.tree_leaves((args, kwargs))
        known = [t for t in leaves if isinstance(t, Tensor) and t in self._of]
        results = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.dim() > 1 and y.numel()]
        if not known or not results or any(y is x for y in results for x in known):  # the last: written in place
            return
        first: Owners = self._of[known[0]]
        found: Sequence[Owners | None]
        if name in RESHAPES:
            shape = known[0].shape
            found = [Owners(_reshaped(first.rows, shape, y.shape), first.fixed, first.sequence) for y in results]
        elif name in MOVES:
            widths = (None,) if _indexes_features(name, args, kwargs) else (1, None)
            found = self._moved(func, args, kwargs, results, widths)
        elif name in ADDS_ROWS and len(args) == 4 and args[1] == 0 and args[3] in self._of:
            added: Owners = self._of[args[3]]
            rows = on_device(added.rows, args[2].device)
            rows = rows.new_zeros(results[0].shape[:-1]).index_copy_(0, args[2], rows)
            found = [Owners(rows, False, added.sequence)]
        else:
            found = [
                next((self._of[x] for x in known if self._of[x].rows.shape == y.shape[:-1]), None) for y in results
            ]
        for y, owners in zip(results, found, strict=True):
            if owners is not None:
                self._of[y] = owners

    def _moved(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
        widths: tuple[int | None, ...],
    ) -> Sequence[Owners | None]:
        """Owners of the results of a function that moves rows: what it makes of owners with a last axis of 1, or as long.

        `widths`: lengths of that axis to try, None for as long as that of the tensor itself.
        """
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        index = next((t for t in leaves if t not in self._of), None)
        fixed = index is None and all(self._of[t].fixed for t in leaves)
        sequences = {self._of[t].sequence for t in leaves if t in self._of}
        sequence = sequences.pop() if len(sequences) == 1 else 0
        devices = {self._of[t].rows.device for t in leaves if t in self._of} | (
            {index.device} if index is not None else set()
        )
        device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
        for width in widths:

            def owners_of(t: Any, width: int | None = width) -> Any:
                if not isinstance(t, Tensor) or t not in self._of:
                    return t
                rows = on_device(self._of[t].rows, device)
                return rows.unsqueeze(-1).expand(*rows.shape, width or t.shape[-1])

            try:
                moved = func(*pytree.tree_map(owners_of, args), **pytree.tree_map(owners_of, kwargs))
            except (
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
            ):  # it names the size of the last axis, or divides it
                continue
            found = [t for t in pytree.tree_leaves(moved) if isinstance(t, Tensor)]
            if len(found) == len(results) and all(
                t.shape[:-1] == y.shape[:-1] and t.shape[-1:] != (0,) for t, y in zip(found, results, strict=True)
            ):
                return [Owners(t[..., 0], fixed, sequence) for t in found]
        return [None] * len(results)


def _indexes_features(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a tensor of indices may select from the last axis: of an axis of 1 it would read outside, which ends CUDA."""
    if name == "index_select":
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        return bool(axis in (-1, args[0].dim() - 1))
    if name != "__getitem__" or not isinstance(args[0], Tensor):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [i for i in index if isinstance(i, (Tensor, list))]
    taken = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else i is not None for i in index)
    return bool(tensors) and (taken >= args[0].dim() or any(i is Ellipsis for i in index))


def _reshaped(owners: Tensor, before: torch.Size, after: torch.Size) -> Tensor:
    """Owners [*rows] of a tensor [*rows, features] after a reshape, which may split or join features."""
    each = math.gcd(before[-1], after[-1]) or 1
    parts = owners.unsqueeze(-1).expand(*owners.shape, before[-1] // each)
    return parts.reshape(*after[:-1], after[-1] // each)[..., 0]


@lru_cache(maxsize=64)
def _in_order(batch: int, rows: tuple[int, ...], layout: Layout) -> Tensor:
    """Owners [*rows] of rows of `batch` samples, which lie as `layout` says; each sample's rows are numbered in order."""
    owners = torch.empty(rows, dtype=torch.long)
    by_sample = split(owners, layout, batch)
    numbers = (torch.arange(batch) << BITS)[:, None] + torch.arange(owners.numel() // batch)
    by_sample.copy_(numbers.view(by_sample.shape))
    return owners


_ON_DEVICES: dict[Any, Tensor] = {}


def on_device(owners: Tensor, device: torch.device) -> Tensor:
    """The owners on a device. Those that were on the CPU are copied once: a copy waits for the device."""
    if owners.device == device:
        return owners
    if owners.device.type != "cpu":
        return owners.to(device)
    key = (device, tuple(owners.shape), hash(owners.contiguous().numpy().tobytes()))
    if key not in _ON_DEVICES:
        if len(_ON_DEVICES) >= 64:
            _ON_DEVICES.clear()
        _ON_DEVICES[key] = owners.to(device)
    return _ON_DEVICES[key]
