"""One product or sum of rows in which a layer uses a weight, and the weight's per-sample gradients from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.taps.gradients import GroupedOuter, GroupedRows, GroupedSum, Outer, PerSampleGradient, Summed
from gramian.taps.gradients.grouped_rows import BITS
from gramian.taps.products.banks import BankPart, BankSides, MatrixSides
from gramian.taps.products.parts import part_of
from gramian.taps.products.sides import Sides
from gramian.taps.sites.products.row_owners import Owners, on_device
from gramian.taps.sites.products.weight_views import UnknownUse, WeightView

LINEAR = frozenset(["linear"])
PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm"])
GROUPED = frozenset(["grouped_mm", "_grouped_mm", "grouped_mm_fallback"])
SUMS = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])
SCALES = frozenset(["mul", "__mul__", "__rmul__"])


@dataclass(frozen=True)
class WeightUse:
    """A use of one weight: y_r = W_r x_r, y_r = x_r + b_r or y_r = s ⊙ x_r, for rows r; W_r is W or one of a stack."""

    view: WeightView
    form: str
    """"product", "sum" or "scale"."""
    x: Tensor
    """The tensor of rows [*rows, features], or [*rows, features, 1] (`columns`)."""
    out_first: bool = True
    """True if the parameter stores W as [out, in]."""
    columns: bool = False
    """True if features are on the axis before the last, which has one entry."""
    groups: Tensor | None = None
    """[*rows]: which matrix of a stack each row uses; None: the parameter is no stack."""


def find_uses(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], view_of: Callable[[Any], WeightView | None]
) -> list["WeightUse"]:
    """The uses of weights in a call of the function of this name, a list of `WeightUse`.

    Raises:
        UnknownUse: if a weight enters otherwise.
    """
    views = [view_of(t) for t in args[:3]]
    if name in LINEAR and views[0] is None and len(args) + len(kwargs) < 4:
        x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        of_weight, of_bias = view_of(weight), view_of(bias)
        uses = [] if of_weight is None else [_product(of_weight, x, not of_weight.transposed)]
        return uses if of_bias is None else [*uses, _sum(of_bias, x, "sum")]
    if name in PRODUCTS and len(args) == 2 and not kwargs and views[0] is None and views[1] is not None:
        return [_product(views[1], args[0], views[1].transposed)]
    if name == "bmm" and len(args) == 2 and not kwargs and views[0] is not None and args[1].shape[-1] == 1:
        return [_product(views[0], args[1], not views[0].transposed, columns=True)]
    if name in GROUPED and views[0] is None and views[1] is not None and views[1].index is None and len(args) < 4:
        ends = args[2] if len(args) > 2 else kwargs.get("offs")
        others = {k: v for k, v in kwargs.items() if k != "offs" and v is not None}
        if isinstance(ends, Tensor) and args[0].dim() == 2 and len(views[1].shape) == 3 and not others:
            rows = torch.arange(len(args[0]), device=ends.device, dtype=ends.dtype)
            groups = torch.searchsorted(ends, rows, right=True)
            return [WeightUse(views[1], "product", args[0], views[1].transposed, groups=groups)]
    if (name in SUMS or name in SCALES) and len(args) == 2 and not kwargs and views.count(None) == 1:
        (x, weight), view = (args, views[1]) if views[0] is None else (args[::-1], views[0])
        same = isinstance(x, Tensor) and weight.shape in (x.shape, x.shape[-1:])  # else it is broadcast over features
        if same and view is not None:
            return [_sum(view, x, "sum" if name in SUMS else "scale")]
    raise UnknownUse(f"{name} of a weight")


def _product(view: WeightView, x: Tensor, out_first: bool, columns: bool = False) -> WeightUse:
    if len(view.shape) == 2 and view.index is None and not columns and (out_first or view.first == 0):
        return WeightUse(view, "product", x, out_first)
    rows = x.shape[:-2] if columns else x.shape[:-1]
    if len(view.shape) == 3:
        return WeightUse(view, "product", x, out_first, columns, _groups(view, rows, x.device))
    raise UnknownUse("a product of a weight")


def _sum(view: WeightView, x: Tensor, form: str) -> WeightUse:
    if len(view.shape) == 1:
        return WeightUse(view, form, x)
    if len(view.shape) == 2 and view.index is not None and form == "sum":
        return WeightUse(view, form, x, groups=_groups(view, x.shape[:-1], x.device))
    raise UnknownUse("a sum with a weight")


def _groups(view: WeightView, rows: torch.Size, device: torch.device) -> Tensor:
    """The matrix, or vector, of a stack that each row uses: that of the view, or those of all in turn on axis 0."""
    index = (
        torch.arange(view.shape[0], device=device) if view.index is None else torch.as_tensor(view.index, device=device)
    )
    if index.dim() == 1 and (not rows or rows[0] != len(index)):
        raise UnknownUse("matrices of a stack beside other rows")
    return index.reshape(-1, *[1] * (len(rows) - 1)).expand(rows) if index.dim() else index.expand(rows)


@dataclass(frozen=True)
class UseLayout:
    """What is needed in the backward of a use beside its saved tensors."""

    view: WeightView
    form: str
    out_first: bool
    columns: bool
    has_groups: bool
    tokens: int
    """Number of rows per sample, 0 if not known: samples may have different numbers."""
    in_place: bool
    """True if the weight was added in place, so that the observer must be put there in place, too."""
    order: str
    """"samples": the rows of a sample next to each other; "tokens": the first rows of all samples next to each other, then
    the second; "owners": as the saved owners say."""

    def matrix_sides(self, keys: Iterable[str], saved: list[Tensor], g: Tensor, batch: int) -> dict[str, MatrixSides]:
        """Inputs and output gradients by token of each matrix of the weight, from what `save` returned and g.

        `keys`: names of the weight, or of its parts. Waits for the device where samples have different numbers
        of rows: once for all matrices of a stack.
        """
        saved = list(saved)
        groups = saved.pop() if self.has_groups else None
        owners = saved.pop() if self.order == "owners" else None
        if self.form != "product":
            return dict.fromkeys(keys, "its layer adds it to rows, or scales them with it")
        g_RO, a_RI = ((t.squeeze(-1) if self.columns else t).flatten(0, -2) for t in (g, saved[0]))
        layout: Literal["out_in", "in_out"] = "out_in" if self.out_first else "in_out"
        found: dict[str, MatrixSides] = {}
        bank: BankSides | None = None
        for key in keys:
            rows = part_of(key)[1]
            if isinstance(rows, int):
                assert owners is not None and groups is not None
                bank = bank or BankSides.of(a_RI, g_RO, owners, groups, batch, self.view.shape[0], layout)
                if bank.ends[rows] < bank.ends[rows + 1]:
                    found[key] = BankPart(bank, rows)
                continue
            here = slice(0, None) if rows is None else rows
            width = a_RI.shape[-1] if layout == "in_out" else g_RO.shape[-1]
            stop = self.view.shape[0] if here.stop is None else here.stop
            end = self.view.first + width
            if here.start >= end or stop <= self.view.first:
                continue
            if groups is not None or here.start < self.view.first or stop > end:
                found[key] = "a product of its layer is with some of its rows"
                continue
            part = slice(here.start - self.view.first, stop - self.view.first)
            a, g_part = (a_RI[:, part], g_RO) if layout == "in_out" else (a_RI, g_RO[:, part])
            if owners is not None:
                found[key] = BankSides.of(a, g_part, owners, torch.zeros_like(owners), batch, 1, layout).part(0)
            else:
                found[key] = Sides(self._by_sample(a, batch), self._by_sample(g_part, batch), layout=layout)
        return found

    def gradient(self, saved: list[Tensor], g: Tensor, batch: int) -> PerSampleGradient:
        """The per-sample gradients of the weight, of its shape, from what `save` returned and the output gradient g."""
        saved = list(saved)
        groups = saved.pop() if self.has_groups else None
        owners = saved.pop() if self.order == "owners" else None
        left = (g.squeeze(-1) if self.columns else g).flatten(0, -2)
        first, shape = self.view.first, self.view.shape
        right: Tensor | None = None
        if self.form == "product":
            x = saved[0].squeeze(-1) if self.columns else saved[0]
            right = x.flatten(0, -2)
        elif self.form == "scale":
            left = left * saved[0].flatten(0, -2)
        if first or (self.out_first and left.shape[-1] != shape[-2 if right is not None else -1]):
            left = F.pad(left, (first, shape[0] - first - left.shape[-1]))
        if right is not None and not self.out_first:
            left, right = right, left
        if owners is None and groups is None:
            left = self._by_sample(left, batch)
            return (
                Summed(left, shape) if right is None else Outer(left, self._by_sample(right, batch), not self.out_first)
            )
        assert owners is not None
        rows = GroupedRows(owners, groups, batch, 1 if groups is None else shape[0])
        if right is None:
            return GroupedSum(left, rows, shape)
        return GroupedOuter(left, right, rows, shape, input_left=not self.out_first)

    def _by_sample(self, rows: Tensor, batch: int) -> Tensor:
        if self.order == "samples":
            return rows.reshape(batch, self.tokens, rows.shape[-1])
        return rows.reshape(self.tokens, batch, rows.shape[-1]).transpose(0, 1)


def save(use: WeightUse, y: Tensor, owners: Owners, batch: int) -> tuple[list[Tensor], UseLayout]:
    """The tensors to save of a use for its backward, and how to read them; y is its result."""
    rows = owners.rows[..., 0] if use.columns else owners.rows
    saved = [] if use.form == "sum" else [use.x.to(y.dtype)]  # as autocast cast it
    order, tokens = "owners", 0
    if owners.fixed and rows.numel() and rows.numel() % batch == 0 and use.groups is None:
        samples, tokens = rows.flatten() >> BITS, rows.numel() // batch
        if torch.equal(samples, torch.arange(batch).repeat_interleave(tokens)):
            order = "samples"
        elif torch.equal(samples, torch.arange(batch).repeat(tokens)):
            order = "tokens"
    if order == "owners":
        saved.append(on_device(rows, use.x.device).flatten())
    if use.groups is not None:
        saved.append(use.groups.flatten())
    return saved, UseLayout(
        use.view, use.form, use.out_first, use.columns, use.groups is not None, tokens, y is use.x, order
    )
