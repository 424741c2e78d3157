"""The products and sums of rows in which a layer uses a weight, found in the calls of functions of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
