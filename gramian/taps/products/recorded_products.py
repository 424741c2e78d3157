"""Watch the code of a layer as it multiplies by its weights: a torch function mode that records every product y = x W.

A weight is followed through views (transpose, chunk, unbind, index, a view in another dtype) by a shadow: a tensor without data
that has its shape, strides and offset, to which the same functions are applied. The strides of the shadow that arrives at a
product say which rows and columns of the parameter take part, and whether it is stored as [out, in] or as [in, out].

Of each product the input x is kept, and a zero is added to the output y, whose gradient is that of y.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramian.taps.model.dropout import IN_PYTHON, python_body
from gramian.taps.products.contractions import Contraction, contraction
from gramian.taps.products.parts import owner, part_of
from gramian.taps.products.sides import LayerForm
from gramian.taps.products.unrolled import CELLS, unrolled

Layout = Literal["out_in", "in_out"]
COPIES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach")
)
"""Methods whose result has the values of the tensor, up to rounding."""


@dataclass(frozen=True)
class MatrixTokens:
    """Inputs a [B, T, in] and output gradients g [B, T, out] of one product with one matrix of a layer."""

    key: str
    a_BTI: Tensor
    """For a table the indices [B, T]."""
    g_BTO: Tensor
    layout: Layout | None
    """How the weight is seen to be stored; None for a table or a kernel."""
    counted_BT: Tensor | None = None


@dataclass
class Product:
    """One product of a layer with a weight, or with a part or several parts of one."""

    x: Tensor
    y: Tensor
    """The output before the zero was added."""
    zero: Tensor
    matrices: Callable[[Tensor, Tensor], Iterator[MatrixTokens]]
    """Function of x and of the gradient of y, each with a further first axis for samples, that returns the matrices' tokens."""


@dataclass(frozen=True)
class Weight:
    """A parameter with its matrices, each a range of its first axis."""

    forms: dict[str, LayerForm]
    """{name of the parameter, or of a part of it: form}."""
    shape: tuple[int, ...]

    def rows(self) -> Iterator[tuple[str, LayerForm, int, int]]:
        """(name, form, first row, number of rows) of each matrix, in units of rows of the matrix."""
        for key, form in self.forms.items():
            within = part_of(key)[1]
            count = form.inputs if form.layout in ("in_out", "table") else form.outputs
            first = 0 if within is None else within * count if isinstance(within, int) else within.start
            yield key, form, first, count


class RecordedProducts(TorchFunctionMode):
    """Torch function mode that records the products of what runs inside it with some weights."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        forms: Mapping[str, LayerForm],
        zeros: Sequence[Tensor] | None = None,
    ) -> None:
        """Begin without a product.

        Args:
            parameters: {name: the tensor that the layer uses as this parameter}.
            forms: {name of a parameter, or of a part of one: its form}.
            zeros: for each product, in their order, the zero to add to its output; None: new ones that require gradients.
        """
        super().__init__()
        self.products: list[Product] = []
        self._zeros = zeros
        self._weights: dict[str, Weight] = {}
        self._shadows: dict[int, tuple[Tensor, str, Tensor]] = {}
        """{id of a tensor: (the tensor, name of the parameter that it is a view of, its shadow)}."""
        for name, p in parameters.items():
            own = {key: form for key, form in forms.items() if owner(key) == name}
            if own:
                self._weights[name] = Weight(own, tuple(p.shape))
                self._shadows[id(p)] = (p, name, torch.empty(p.shape, dtype=p.dtype, device="meta"))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_PYTHON:
            with self:
                return python_body(func)(*args, **kwargs)
        if func in CELLS and not isinstance(args[2], Tensor):
            with self:
                return unrolled(func, *args)
        result = func(*args, **kwargs)
        if len(args) == 1 and isinstance(kwargs.get("weight"), Tensor):
            args, kwargs = (args[0], kwargs["weight"]), {n: value for n, value in kwargs.items() if n != "weight"}
        known = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and id(arg) in self._shadows]
        if not known:
            return result
        found = contraction(func, args, kwargs, known[0]) if len(known) == 1 else None
        if found is not None and isinstance(result, Tensor):
            return self._recorded(found, result)
        self._follow(func, args, kwargs, result)
        return result

    # ---- views of weights ----------------------------------------------------------------------------------------------

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Apply a function to the shadow of its first argument, and note the shadows of results that are views of it."""
        if id(args[0]) not in self._shadows:
            return
        _, name, shadow = self._shadows[id(args[0])]
        if func in COPIES:
            if isinstance(result, Tensor) and result.shape == shadow.shape:
                self._shadows[id(result)] = (result, name, shadow)
            return
        try:
            seen = func(shadow, *args[1:], **kwargs)
        except Exception:  # of a function that needs data, or another device
            return
        results, shadows = (t if isinstance(t, tuple | list) else (t,) for t in (result, seen))
        for view, of_shadow in zip(results, shadows, strict=False):
            both = isinstance(view, Tensor) and isinstance(of_shadow, Tensor)
            if both and of_shadow.is_meta and of_shadow.untyped_storage()._cdata == shadow.untyped_storage()._cdata:
                self._shadows[id(view)] = (view, name, of_shadow)

    # ---- products ------------------------------------------------------------------------------------------------------

    def _recorded(self, found: Contraction, y: Tensor) -> Tensor:
        _, name, shadow = self._shadows[id(found.weight)]
        try:
            pairs = [*self._matched(self._weights[name], found, shadow)]
        except (RuntimeError, ValueError, IndexError):  # axes that no view of the shadow has
            pairs = []
        if not pairs:
            return y
        given = self._zeros
        zero = torch.zeros_like(y).requires_grad_() if given is None else given[len(self.products)]

        def matrices(x: Tensor, g: Tensor) -> Iterator[MatrixTokens]:
            for pair in pairs:
                yield pair(x, g)

        self.products.append(Product(found.x, y, zero, matrices))
        return y + zero

    def _matched(
        self, weight: Weight, found: Contraction, shadow: Tensor
    ) -> Iterator[Callable[[Tensor, Tensor], MatrixTokens]]:
        """For each matrix of the parameter that takes part whole: the function from (x, gradient of y) to its tokens."""
        for index, matrix_KN in found.weight_matrices(shadow):
            for key, form, first, count in weight.rows():
                columns = form.outputs if form.layout in ("in_out", "table") else form.inputs
                place = _place(matrix_KN, columns)
                if place is None or found.lookup != (form.layout == "table"):
                    continue
                layout, start, rows = place
                if first < start or first + count > start + rows or (form.layout == "kernel" and layout != "out_in"):
                    continue
                yield _tokens(found, index, key, form.layout, layout, slice(first - start, first - start + count))


def _tokens(
    found: Contraction, index: int | None, key: str, form: str, layout: Layout, rows: slice
) -> Callable[[Tensor, Tensor], MatrixTokens]:
    """The function from (x, gradient of y) to the tokens of a matrix, some rows of a weight that is stored in this layout."""

    def tokens(x: Tensor, g: Tensor) -> MatrixTokens:
        a_BTK, g_BTN, counted_BT = found.tokens(x, g, index)
        if layout == "in_out" and form != "table":
            a_BTK = a_BTK[..., rows]
        elif form != "table":
            g_BTN = g_BTN[..., rows]
        return MatrixTokens(key, a_BTK, g_BTN, layout if form in ("in_out", "out_in") else None, counted_BT)

    return tokens


def _place(matrix_KN: Tensor, columns: int) -> tuple[Layout, int, int] | None:
    """(layout, first row, number of rows) of a matrix [in, out] inside its parameter; None if it is not whole rows of it.

    `columns` is the number of columns of the parameter's matrix, whose rows lie one after the other in memory.
    """
    (ins, outs), (step_in, step_out), offset = matrix_KN.shape, matrix_KN.stride(), matrix_KN.storage_offset()
    if offset % columns:
        return None
    if (step_out == 1 or outs == 1) and (step_in == columns or ins == 1) and outs == columns:
        return "in_out", offset // columns, ins
    if (step_in == 1 or ins == 1) and (step_out == columns or outs == 1) and ins == columns:
        return "out_in", offset // columns, outs
    return None
