"""The arguments of a forward by sample: which tensors and lists have rows of samples, and copies with other samples."""

import copy
import dataclasses
import enum
import random
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import GENERATORS
from gramian.taps.model.python_state import tensors_inside
from gramian.taps.proof.row_fingerprint import Fingerprint
from gramian.taps.units import Units

SCALARS = (int, float, bool, str, bytes, type(None))
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Unsigned dtypes of more than 8 bits, which torch neither compares nor sorts."""


@dataclass(frozen=True)
class SampleArguments:
    """Flattened arguments of a forward (`leaves`), and the number of rows that each has per sample (0: not split by sample)."""

    leaves: list[Any]
    spec: Any
    rows: list[int]
    batch: int
    units: Units | None = None

    @classmethod
    def of(
        cls, arguments: Any, batch: int, *, given: bool = False, fixed: Sequence[int] = (), units: Units | None = None
    ) -> "SampleArguments":
        """Find the arguments that have rows of samples: tensors whose axis 0 is k·B, and lists of B values or targets.

        Args:
            arguments: (args, kwargs), or a batch in any nested structure.
            batch: number B of samples.
            given: True if the user gave B: lists of B tensors then have one entry per sample, too.
            fixed: indices of flattened arguments that have B rows by chance, and no samples.
            units: groups of rows or tokens that count as one sample; None: each row is a sample.
        """
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=lambda value: _is_list_of(value, batch, given))
        rows = [0 if i in fixed else _rows(leaf, batch) for i, leaf in enumerate(leaves)]
        return cls(leaves, spec, rows, batch, units)

    def ambiguous(self, strict: bool) -> list[int]:
        """Indices of tensors whose axis 0 may be k·B by chance and not have samples: a mask [T, T] with T = B or 2·B.

        These are the tensors after the first that have k·B rows, k > 1, or that have B rows and a further axis of size B.

        Args:
            strict: False to add tensors of consecutive integers (positions) [B], if the first has a further axis of size B.
        """
        tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        if not tensors:
            return []
        elsewhere = not strict and self.batch in self.leaves[tensors[0]].shape[1:]
        several = [i for i in tensors[1:] if self.rows[i] > 1]
        return several + [
            i
            for i in tensors[1:]
            if self.rows[i] == 1
            and ((elsewhere and _are_places(self.leaves[i])) or self.batch in self.leaves[i].shape[1:])
        ]

    def opaque(self) -> list[str]:
        """List with a description of the first object that contains tensors of k·B rows, which cannot be replaced; else []."""
        return [
            f"{type(leaf).__name__} with a tensor of shape {list(t.shape)}"
            for leaf, rows in zip(self.leaves, self.rows, strict=True)
            if not rows and not isinstance(leaf, Tensor)
            for t in tensors_inside(leaf)
            if t.dim() and t.shape[0] and t.shape[0] % self.batch == 0
        ][:1]

    def of_one(self, arguments: Any) -> "SampleArguments":
        """`SampleArguments` of other `arguments` with the same structure and one sample (B = 1)."""
        return replace(self, leaves=self.spec.flatten_up_to(arguments), batch=1, units=None)

    def refuse_layouts(self) -> None:
        """Raise GramianError for tensors whose rows cannot be indexed: sparse, nested, quantized, meta, and 8-bit floats."""
        for t in (leaf for leaf in self.leaves if isinstance(leaf, Tensor)):
            byte = t.is_floating_point() and t.element_size() == 1
            if t.layout != torch.strided or t.is_nested or t.is_meta or t.is_quantized or byte:
                what = "nested" if t.is_nested else "on the meta device" if t.is_meta else f"of {t.layout}, {t.dtype}"
                raise GramianError(
                    f"model: is given a tensor that is {what}; expected dense tensors of 16 bits or more"
                )

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Shapes, without the first axis, of the tensors that have rows of samples."""
        pairs = zip(self.leaves, self.rows, strict=True)
        return tuple(tuple(leaf.shape[1:]) for leaf, rows in pairs if rows and isinstance(leaf, Tensor))

    @property
    def alike(self) -> bool:
        """True if an argument has as many tokens as there are samples, so that its shape does not show which is which.

        The last axis of floating-point numbers has features.
        """
        pairs = zip(self.leaves, self.rows, strict=True)
        shapes = (t.shape[1 : t.dim() - t.is_floating_point()] for t, rows in pairs if rows and isinstance(t, Tensor))
        return any(self.batch in shape for shape in shapes)

    @property
    def partition(self) -> tuple[int, ...] | None:
        """The unit of each row, numbered by first occurrence; None if each row is a unit, or units are groups of tokens."""
        if self.units is None or self.units.ids.dim() != 1:
            return None
        numbers: dict[int, int] = {}
        found = tuple(numbers.setdefault(unit, len(numbers)) for unit in self.units.ids.tolist())
        return found if len(numbers) < len(found) else None

    @property
    def structure(self) -> tuple[Any, ...]:
        """Hashable structure of the arguments, without sizes: nesting, dtypes, axes, flags, and which have rows of samples."""
        kinds = [
            (str(leaf.dtype), leaf.dim(), bool(rows), None if rows else _flag(leaf))
            if isinstance(leaf, Tensor)
            else _kind(leaf, rows)
            for leaf, rows in zip(self.leaves, self.rows, strict=True)
        ]
        units = self.units
        return (str(self.spec), *kinds, None if units is None else (units.by_token, units.share_rows, units.padded))

    def uneven(self) -> tuple[tuple[int, str], ...]:
        """(index of an argument, evidence) pairs, with the evidence that samples differ in how many of their tokens count.

        "counts": samples have different numbers of −100, or of zeros in a mask (zeros and one or two other values). "ignored":
        some number is −100. "values": numbers, one for each sample (lengths, labels, weights), differ. While these numbers are
        equal, a mean over the tokens of a batch does not mix samples, and `x[mask]` has as many rows of each sample; so a batch
        in which they differ is proven by itself. Of the first tensor only −100 counts. Cost: some passes over each tensor and
        one wait for the device; nothing if the first tensor alone has rows of samples.
        """
        found: list[tuple[int, str]] = []
        differ: list[Tensor] = []
        first = next((i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)), -1)
        lists = [
            number for number, leaf in enumerate(self.leaves) if self.rows[number] and not isinstance(leaf, Tensor)
        ]
        carrying = sum(rows > 0 for rows in self.rows) - len(lists)
        for number, (leaf, rows) in enumerate(zip(self.leaves, self.rows, strict=True)):
            if not rows or not isinstance(leaf, Tensor) or leaf.is_complex() or not leaf.numel():
                continue
            if number == first and (carrying < 2 or leaf.is_floating_point()):  # labels may come before what they label
                continue
            values_BT = leaf.detach().reshape(self.batch, -1)
            values_BT = values_BT.long() if leaf.dtype in WIDE_UNSIGNED else values_BT
            ignored_BT = values_BT == -100
            counts_B = ignored_BT.sum(1)
            flags = {"ignored": ignored_BT.any(), "counts": (counts_B != counts_B[:1]).any()}
            if number != first and values_BT.shape[1] == 1:
                flags["values"] = (values_BT != values_BT[:1]).any()
            elif number != first:
                zeros_BT = values_BT == 0
                masks = (zeros_BT | (values_BT == values_BT.max()) | (values_BT == values_BT.min())).all()
                zeros_B = zeros_BT.sum(1) * masks
                flags["counts"] = flags["counts"] | (zeros_B != zeros_B[:1]).any()
            found += [(number, kind) for kind in flags]
            differ += flags.values()
        shown = torch.stack([flag.to(differ[0].device) for flag in differ]).tolist() if differ else []
        tags = [one for one, flag in zip(found, shown, strict=True) if flag]
        return tuple(tags + [(number, "values") for number in lists if len(set(map(repr, self.leaves[number]))) > 1])

    def take(self, source: Sequence[int]) -> Any:
        """Copies of the arguments with sample source[i] in place i; the forward may write into them."""
        index = torch.tensor(source)
        taken = [
            _taken(leaf, index, rows) if rows else _own(leaf) for leaf, rows in zip(self.leaves, self.rows, strict=True)
        ]
        return pytree.tree_unflatten(taken, self.spec)

    def take_tokens(self, source: Tensor) -> Any:
        """Copies of the arguments with token number source[b, t], counted over the flattened batch [B·T], in place [b, t].

        Only the first tensor and floating-point ones change. Other integers and flags (documents, positions, masks) describe
        how tokens of a row belong together, and are not changed.
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
        """A tensor [B, T, …] with token number source[b, t] of the flattened batch in place [b, t]; any other value copied."""
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != source.shape:
            return _own(leaf)
        return leaf.detach().flatten(0, 1)[source.to(leaf.device)]

    @property
    def turns(self) -> bool:
        """True if all tensors are [B, T, …] with one axis of tokens, so that all tokens can move to other places."""
        assert self.units is not None
        batch, tokens = self.units.ids.shape
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim()]
        return all(t.shape[:2] == (batch, tokens) and tokens not in t.shape[2:] for t in tensors)

    def turned(self, source: Tensor) -> "SampleArguments":
        """These arguments with token source[b, t] of the flattened batch, and its unit, in place [b, t] of every tensor.

        Labels that repeat the tokens, and which the model shifts, are −100 at the first token of every unit: at the beginning
        of a row no token predicts it, whatever its label.
        """
        assert self.units is not None
        ids_BT = self.tokens_of(self.units.ids, source)
        begins_BT = torch.nn.functional.pad(ids_BT[:, 1:] != ids_BT[:, :-1], (1, 0), value=True)
        first = next((leaf for leaf in self.leaves if isinstance(leaf, Tensor)), None)
        leaves = [self.tokens_of(leaf, source) for leaf in self.leaves]
        for leaf, turned in zip(self.leaves, leaves, strict=True):
            shifted = isinstance(leaf, Tensor) and leaf is not first and first is not None and leaf.shape == first.shape
            if shifted and not leaf.is_floating_point() and bool(((leaf == first) | (leaf == -100)).all()):
                turned[begins_BT.to(turned.device)] = -100
        return replace(self, leaves=leaves, units=dataclasses.replace(self.units, ids=ids_BT, _found={}))

    def token_contents(self) -> list[int]:
        """Hash of each token [B·T] of the first tensor, where units are groups of tokens.

        Raises:
            GramianError: if the first tensor does not begin with the axes of the ids.
        """
        assert self.units is not None
        first = next((leaf for leaf in self.leaves if isinstance(leaf, Tensor)), torch.empty(0))
        if first.shape[:2] != self.units.ids.shape:
            length = first.shape[1] if first.dim() > 1 else 0
            raise GramianError(
                f"{self.units.field}: are given by token, {list(self.units.ids.shape)}, and the model's first tensor has "
                f"{length} tokens in a row, {list(first.shape)}; expected one whose first axes are the ids' own"
            )
        tokens = first.detach().flatten(0, 1)
        return [int(value) for value in Fingerprint.of(tokens.reshape(len(tokens), -1), 0).hashes_R]

    def contents(self) -> list[int]:
        """Hash of each sample's content over all arguments that have rows of samples: B integers."""
        total = torch.zeros(self.batch, dtype=torch.int64)
        for number, (leaf, rows) in enumerate(zip(self.leaves, self.rows, strict=True)):
            if rows and isinstance(leaf, Tensor):
                total += Fingerprint.of(leaf.reshape(self.batch, rows, *leaf.shape[1:]), number).hashes_R
            elif rows:
                total += torch.tensor([_content(value, number) for value in leaf])
        return [int(value) for value in total]


def donors(contents: Sequence[int], stayed: Sequence[int], draw: random.Random) -> list[int | None]:
    """For each sample the index of one to replace it with (its donor), of different content; None: all samples are equal.

    All samples get the same donor, one of `stayed` (not replaced) if possible, unless their content equals it; so the replaced
    content is gone from the batch. With a donor drawn for each sample, a small batch would often keep its content in another
    order, and a result that depends on it only through a sum or a maximum (a count of tokens, a scale) would not change.

    Args:
        contents: hash of each sample's content.
        stayed: samples that are not replaced.
        draw: random generator.
    """
    order = [*draw.sample(list(stayed), len(stayed)), *draw.sample(range(len(contents)), len(contents))]
    return [next((i for i in order if contents[i] != own), None) for own in contents]


def _kind(value: Any, rows: int) -> Any:
    """What a forward may branch on in an argument: the value of a flag, string, enum or function; else (type, rows > 0)."""
    if isinstance(value, enum.Enum):
        return type(value).__qualname__, value.name
    if isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, set | frozenset) and all(isinstance(item, SCALARS) for item in value):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return value.__module__, value.__qualname__, getattr(value, "__code__", None)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return _flag(value) if _flag(value) is not None else (type(value).__name__, bool(rows))


def _flag(value: Any) -> Any:
    """The number −1, 0, 1, 2 or 3, also from a tensor or array of one element, on which code may branch; None for others."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "biuf"):
        return None
    value = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
    return value if isinstance(value, int | float | complex) and value in (-1, 0, 1, 2, 3) else None


def _are_places(leaf: Tensor) -> bool:
    """True for a 1-D tensor of consecutive integers (positions)."""
    if leaf.dim() != 1 or leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
        return False
    return bool((leaf == leaf[0] + torch.arange(len(leaf), device=leaf.device)).all())


def _is_list_of(value: Any, batch: int, tensors: bool = False) -> bool:
    """True for a list or tuple of `batch` entries, one for each sample.

    Entries are numbers, strings or None, lists of these, or (in a list, not a tuple) objects that contain tensors (targets of a
    detector), unless all these tensors have k·B rows. With `tensors`, entries may also be tensors of any shape.
    """
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != batch or not batch:
        return False
    if all(_is_plain(item) for item in value) or (tensors and all(isinstance(item, Tensor) for item in value)):
        return True
    if not isinstance(value, list) or any(_is_plain(item) for item in value):
        return False
    inside = [_tensors_in(item) for item in value]
    return any(inside) and not all(_rows(t, batch) for found in inside for t in found)


def _tensors_in(value: Any) -> list[Tensor]:
    return [
        t for leaf in pytree.tree_leaves(value) for t in ([leaf] if isinstance(leaf, Tensor) else tensors_inside(leaf))
    ]


def _content(value: Any, number: int) -> int:
    """Hash of one sample's entry of a list, its tensors included; `number` is the seed of their fingerprints."""
    tensors = _tensors_in(value)
    scalars = [repr(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, SCALARS)]
    prints = [(str(t.dtype), *t.shape, int(Fingerprint.of(t[None], number).hashes_R[0])) for t in tensors]
    return hash((*scalars, *prints)) >> 1


def _is_plain(value: Any) -> bool:
    return isinstance(value, SCALARS) or (isinstance(value, list | tuple) and all(_is_plain(item) for item in value))


def _rows(leaf: Any, batch: int) -> int:
    if isinstance(leaf, Tensor):
        fits = not leaf.is_nested and leaf.dim() and batch and leaf.shape[0] % batch == 0
        return leaf.shape[0] // batch if fits else 0
    if isinstance(leaf, np.ndarray):
        return int(leaf.ndim > 0 and leaf.shape[0] == batch)
    return int(_is_list_of(leaf, batch, tensors=True))


def _taken(leaf: Any, index: Tensor, rows: int) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf[index.numpy()]
    if not isinstance(leaf, Tensor):
        return type(leaf)(pytree.tree_map(_own, leaf[i]) for i in index.tolist())
    grouped = leaf.detach().reshape(leaf.shape[0] // rows, rows, *leaf.shape[1:])
    taken = grouped.index_select(0, index.to(leaf.device)).flatten(0, 1)
    return taken.requires_grad_(leaf.requires_grad)


def _own(leaf: Any) -> Any:
    """A copy of an argument, which a forward may write into; plain values, generators and functions are not copied."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, (*SCALARS, *GENERATORS)) or callable(leaf):  # states of generators are put back by themselves
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # whatever cannot be copied is passed as it is
        return leaf
