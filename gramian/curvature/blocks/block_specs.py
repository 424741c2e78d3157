"""Assign every trainable parameter of a model to exactly one block of the Fisher.

Kinds of blocks:
- "kronecker": a weight that maps input tokens to output tokens, with the bias of its layer as one more input; of a parameter
  that is several matrices (a bank of experts, the groups of a convolution) each has its own; and a matrix that its layer does
  not multiply by (positions that are added, a weight that another is computed from), as a table whose rows every sample looks
  up once;
- "block": the exact Fisher, from per-sample gradients, of a parameter of at most `SMALL` elements, or that of each row of one
  whose rows are as small (the kernels of a depthwise convolution);
- "diagonal": the exact diagonal, from per-sample gradients, of any other parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.options import Options
from gramian.taps.model import user_names
from gramian.taps.model.find_layers import FoundLayer, discover
from gramian.taps.products.parts import SMALL, owner, part_shape, renamed
from gramian.taps.products.replay import CONTRADICTIONS
from gramian.taps.products.sides import LayerForm
from gramian.taps.records import LayerRecord
from gramian.taps.roles import ParameterInfo

MOST_ROWS = 2**26
"""Largest number of elements of all exact blocks of the rows of one parameter; one with more has a diagonal."""
LAYOUTS = ("out_in", "in_out", "kernel", "table")
"""How a matrix may be seen to be stored whose form was assumed; of these, only the first two are taken for each other."""


@dataclass(frozen=True)
class Spec:
    """The parameters, layers and shape of one block of the Fisher, without data."""

    name: str
    """Name of the block: that of the first layer that uses its weight, followed by the name of the weight or of the part of one
    that it is, unless this is "weight"; outside K-FAC the name of its parameter."""
    kind: Literal["kronecker", "block", "diagonal"]
    parameters: tuple[str, ...]
    """(weight, bias) or (weight,): names of the block's parameters, or of parts of parameters (`taps.products.parts`); outside
    K-FAC the name of the one parameter."""
    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[str, ...]
    layout: Literal["out_in", "in_out", "kernel", "table", "vector"]
    inputs: int
    """m: width of A, the bias included; 1 for a block that is not a Kronecker product."""
    outputs: int
    """o: width of G, the number of outputs; outside K-FAC the number of elements of the parameter."""
    dtype: torch.dtype
    device: torch.device
    tables: tuple[str, ...] = ()
    """Those of `layers` that look rows of the weight up by index (embeddings)."""
    why: str = ""
    """Why the block is not a Kronecker product although its layer could have one; "" otherwise."""
    rows: int = 1
    """Of kind "block": number of exact blocks, one for each row of the parameter, or 1 for all of it."""
    keys: tuple[str, ...] = ()
    """For each of `layers`, the name inside it of the weight, or of the part of one; empty: "weight" in all of them."""
    assumed: bool = False
    """True if it follows from shapes alone that its layer multiplies by this matrix, which every refresh then verifies."""
    by_rows: bool = False
    """True if its layer does not multiply by it: a table of which every sample looks up each row once."""

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the parameters that `parameters` are or are parts of."""
        return tuple(owner(name) for name in self.parameters)

    def key_of(self, layer: str) -> str:
        """The name of this block's weight, or part of one, inside one of `layers`."""
        return self.keys[self.layers.index(layer)] if self.keys else "weight"

    @property
    def has_bias(self) -> bool:
        """True if the last column of the block's matrix [weight | bias] is a bias."""
        return len(self.parameters) == 2

    @property
    def approximation(self) -> str:
        """The name of this block's approximation in the coverage report: "K-FAC <layer>", "exact block" or "diagonal"."""
        if self.kind == "kronecker":
            return f"K-FAC of the rows of {self.name}" if self.by_rows else f"K-FAC {self.name}"
        return "diagonal" if self.kind == "diagonal" else "exact block" if self.rows == 1 else "exact blocks of rows"

    def matrix(self, tensors: dict[str, Tensor]) -> Tensor:
        """The block's parameters {name: tensor} as one matrix Y [o, m]; a missing one counts as zero.

        At least one must be there. Another shape than at the capture raises a GramianError.
        """
        parts: list[Tensor | None] = []
        for name, shape in zip(self.parameters, self.shapes, strict=True):
            t = tensors.get(name)
            if t is not None and tuple(t.shape) != shape:
                raise GramianError(f"{name}: has shape {list(t.shape)}; expected {list(shape)}, as at the capture")
            parts.append(t)
        weight = parts[0]
        if weight is None:
            other = next(t for t in parts if t is not None)
            weight = other.new_zeros(self.shapes[0])
        if self.layout == "vector":
            return weight.reshape(-1, 1)
        turned = self.layout in ("in_out", "table")
        y = weight.reshape(self.inputs - self.has_bias if turned else self.outputs, -1)
        y = y.mT if turned else y
        if not self.has_bias:
            return y
        bias = parts[1] if parts[1] is not None else y.new_zeros(self.outputs)
        return torch.cat([y, bias.to(y)[:, None]], dim=1)

    def views(self, y_OM: Tensor) -> dict[str, Tensor]:
        """{parameter: view of its shape} into a block's matrix Y [o, m]: writing to a view writes to Y."""
        if self.layout == "vector":
            return {self.parameters[0]: y_OM.view(self.shapes[0])}
        weight = y_OM[:, :-1] if self.has_bias else y_OM
        weight = weight.mT if self.layout in ("in_out", "table") else weight
        found = {self.parameters[0]: weight.view(self.shapes[0])}
        if self.has_bias:
            found[self.parameters[1]] = y_OM[:, -1].view(self.shapes[1])
        return found

    def tensors(self, y_OM: Tensor) -> dict[str, Tensor]:
        """Split a block's matrix Y [o, m] into {parameter: tensor of its shape}."""
        if self.layout == "vector":
            return {self.parameters[0]: y_OM.reshape(self.shapes[0])}
        weight = y_OM[:, :-1] if self.has_bias else y_OM
        weight = weight.mT if self.layout in ("in_out", "table") else weight
        found = {self.parameters[0]: weight.reshape(self.shapes[0])}
        if self.has_bias:
            found[self.parameters[1]] = y_OM[:, -1].clone().reshape(self.shapes[1])  # a view would hold all of Y
        return found


def find_blocks(root: nn.Module, options: Options, observed: Mapping[str, str] | None = None) -> dict[str, Spec]:
    """{name: `Spec`} of all blocks of a model without wrappers, in its order; layers below `min_layer_size` have no K-FAC.

    `observed`: {parameter of an assumed form: the layout that was seen, or why it is not a matrix}; None: nothing was seen yet.
    """
    layers, parameters = discover(root)
    users: dict[str, list[FoundLayer]] = {}
    for found in layers:
        for name in found.parameters.values():
            if name in parameters and found.site is not None:
                users.setdefault(name, []).append(found)
    uses = {name: [_MatrixUse.of(found, name) for found in used_by] for name, used_by in users.items()}
    matrices = {name: _kronecker(name, uses[name], users, parameters, options, observed or {}) for name in parameters}
    taken = {owner(p) for specs in matrices.values() if not isinstance(specs, str) for s in specs for p in s.parameters}
    found_specs: dict[str, Spec] = {}
    for name, specs in matrices.items():
        if isinstance(specs, str):
            specs = [] if name in taken else [_vector(name, parameters[name], why=specs)]
        found_specs |= {spec.name: spec for spec in specs}
    return found_specs


@dataclass(frozen=True)
class _MatrixUse:
    """The use of a parameter in one layer: as matrices, whose names inside the layer begin with that of the parameter."""

    layer: FoundLayer
    forms: dict[str, LayerForm]
    """{name inside the layer: form}; one entry, or one for each part; empty if the layer does not use it as matrices."""

    @classmethod
    def of(cls, layer: FoundLayer, parameter: str) -> "_MatrixUse":
        local = {own for own, name in layer.parameters.items() if name == parameter}
        return cls(layer, {key: form for key, form in layer.forms.items() if owner(key) in local})

    def bias(self, key: str, users: dict[str, list[FoundLayer]], parameters: dict[str, ParameterInfo]) -> str | None:
        """Name in the model of the bias, or the part of one, of a matrix; None without one, or if it is frozen or tied."""
        local = self.forms[key].bias
        if local is None or owner(local) not in self.layer.parameters:
            return None
        name = renamed(local, self.layer.parameters.__getitem__)
        return name if owner(name) in parameters and len(users[owner(name)]) == 1 else None


def _kronecker(
    name: str,
    uses: list[_MatrixUse],
    users: dict[str, list[FoundLayer]],
    parameters: dict[str, ParameterInfo],
    options: Options,
    observed: Mapping[str, str],
) -> list[Spec] | str:
    """The `Spec` of each matrix of a parameter; else the reason, "" if a layer does not use it as matrices at all."""
    if not all(use.forms for use in uses):
        return ""
    if len({len(use.forms) for use in uses}) > 1 or (len(uses) > 1 and len(uses[0].forms) > 1):
        return "its layers use it as different matrices"
    assumed = any(form.assumed for use in uses for form in use.forms.values())
    seen = observed.get(name) if assumed else None
    specs: list[Spec] = []
    for key, form in uses[0].forms.items():
        keys = (key, *(next(iter(use.forms)) for use in uses[1:]))
        forms = (form, *(next(iter(use.forms.values())) for use in uses[1:]))
        main = next((f for f in forms if f.layout != "table"), forms[0])
        if len({_oriented(f, main) for f in forms}) > 1:
            return "its layers use it as matrices of different shapes"
        if min(main.inputs, main.outputs) < options.min_layer_size:
            return f"narrower than min_layer_size={options.min_layer_size}"
        main = stored_as(main, seen) if seen in LAYOUTS else main
        info, weight = parameters[name], renamed(key, lambda _: name)
        bias = uses[0].bias(key, users, parameters) if len(uses) == 1 else None
        both = (weight,) if bias is None else (weight, bias)
        found = uses[0].layer
        specs.append(
            Spec(
                name=(found.name or "model") if key == "weight" else user_names.join(found.name, key),
                kind="kronecker",
                parameters=both,
                shapes=tuple(part_shape(parameters[owner(p)].shape, p) for p in both),
                layers=tuple(use.layer.name for use in uses),
                layout=main.layout,
                inputs=main.inputs + (bias is not None),
                outputs=main.outputs,
                dtype=info.dtype,
                device=info.device,
                tables=tuple(use.layer.name for use, f in zip(uses, forms, strict=True) if f.layout == "table"),
                keys=keys if set(keys) != {"weight"} else (),
                assumed=assumed,
            )
        )
    if seen is None or seen in LAYOUTS:
        return specs
    tables = [table_of_rows(spec, parameters[name], seen) for spec in specs]
    return seen if None in tables else [table for table in tables if table is not None]


def table_of_rows(spec: Spec, info: ParameterInfo, why: str) -> Spec | None:
    """The block of an assumed matrix that its layer does not multiply by: a table of the rows as they are stored.

    None if some of its uses are products, several layers use it, or its rows are short enough for exact blocks. `info`: of the
    whole parameter.
    """
    if why in CONTRADICTIONS or len(spec.layers) > 1 or _vector(info.name, info, why).kind != "diagonal":
        return None
    columns, rows = spec.inputs - spec.has_bias, spec.outputs
    if spec.layout in ("in_out", "table"):
        columns, rows = rows, columns
    first = {"parameters": spec.parameters[:1], "shapes": spec.shapes[:1], "tables": spec.layers}
    return replace(spec, layout="table", inputs=rows, outputs=columns, by_rows=True, why=why, **first)  # type: ignore[arg-type]


def blocks_by_layer(specs: Mapping[str, Spec]) -> dict[str, dict[str, str]]:
    """{layer: {name of a weight, or of a part of one, inside it: its block}} of Kronecker blocks."""
    found: dict[str, dict[str, str]] = {}
    for name, spec in specs.items():
        for layer in spec.layers:
            found.setdefault(layer, {})[spec.key_of(layer)] = name
    return found


def trained_blocks(
    by_layer: Mapping[str, Mapping[str, str]], specs: Mapping[str, Spec], record: LayerRecord
) -> dict[str, str]:
    """The entry of `blocks_by_layer` for the layer of a record, of the weights that have a gradient in it."""
    known = by_layer.get(record.layer, {})
    return {key: name for key, name in known.items() if specs[name].owners[0] in record.gradients}


def stored_as(form: LayerForm, layout: str) -> LayerForm:
    """A form, "out_in" or "in_out", as it is if the weight is stored in this layout; other forms stay as they are."""
    if form.layout not in LAYOUTS[:2] or form.layout == layout:
        return form
    return replace(form, layout="in_out" if layout == "in_out" else "out_in", inputs=form.outputs, outputs=form.inputs)


def _oriented(form: LayerForm, main: LayerForm) -> tuple[int, int]:
    """(inputs, outputs) of the weight in one layer; those of an embedding table tied to a head are swapped to the head's.

    (0, 0) if such a head does not store its weight as [outputs, inputs].
    """
    if form.layout == "table" and main.layout != "table":
        return (form.outputs, form.inputs) if main.layout == "out_in" else (0, 0)
    return (form.inputs, form.outputs)


def _vector(name: str, info: ParameterInfo, why: str) -> Spec:
    size, rows = torch.Size(info.shape).numel(), 1
    if (
        not why.startswith("narrower")
        and size > SMALL
        and size <= SMALL * info.shape[0]
        and info.shape[0] < size
        and size**2 <= MOST_ROWS * info.shape[0]
    ):
        rows = info.shape[0]
    return Spec(
        name=name,
        kind="block" if size <= SMALL or rows > 1 else "diagonal",
        rows=rows,
        parameters=(name,),
        shapes=(info.shape,),
        layers=info.layers,
        layout="vector",
        inputs=1,
        outputs=size,
        dtype=info.dtype,
        device=info.device,
        why=why,
    )
