"""Assign every trainable parameter of a model to exactly one block of the Fisher.

Kinds of blocks:
- "kronecker": a weight that maps input tokens to output tokens, with the bias of its layer as one more input;
- "block": the exact Fisher, from per-sample gradients, of a parameter of at most `SMALL` elements;
- "diagonal": the exact diagonal, from per-sample gradients, of any other parameter.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.options import Options
from gramian.taps.model.find_layers import FoundLayer, discover
from gramian.taps.roles import ParameterInfo
from gramian.taps.sites.site import LayerForm

SMALL = 128
"""Largest number of elements of a parameter outside K-FAC that gets its exact Fisher block; a larger one gets a diagonal."""


@dataclass(frozen=True)
class Spec:
    """The parameters, layers and shape of one block of the Fisher, without data."""

    name: str
    """Name of the block: that of the first layer that uses its weight; outside K-FAC that of its parameter."""
    kind: Literal["kronecker", "block", "diagonal"]
    parameters: tuple[str, ...]
    """(weight, bias) or (weight,): names of the block's parameters; outside K-FAC the name of the one parameter."""
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

    @property
    def has_bias(self) -> bool:
        """True if the last column of the block's matrix [weight | bias] is a bias."""
        return len(self.parameters) == 2

    @property
    def approximation(self) -> str:
        """The name of this block's approximation in the coverage report: "K-FAC <layer>", "exact block" or "diagonal"."""
        if self.kind == "kronecker":
            return f"K-FAC {self.name}"
        return "exact block" if self.kind == "block" else "diagonal"

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
        y = weight.mT if self.layout in ("in_out", "table") else weight.flatten(1)
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
        rows, *rest = self.shapes[0]
        found = {self.parameters[0]: weight.unflatten(1, rest) if rest else weight.view(rows)}
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


def find_blocks(root: nn.Module, options: Options) -> dict[str, Spec]:
    """{name: `Spec`} of all blocks of a model without wrappers, in its order; layers below `min_layer_size` have no K-FAC."""
    layers, parameters = discover(root)
    users: dict[str, list[FoundLayer]] = {}
    for found in layers:
        for name in found.parameters.values():
            if name in parameters and found.site is not None:
                users.setdefault(name, []).append(found)
    specs: dict[str, Spec] = {}
    taken: set[str] = set()
    for name in parameters:
        if name not in taken:
            spec = _kronecker(name, users[name], users, parameters, options)
            if isinstance(spec, str):
                spec = _vector(name, parameters[name], why=spec)
            specs[spec.name] = spec
            taken.update(spec.parameters)
    return specs


def _kronecker(
    name: str,
    used_by: list[FoundLayer],
    users: dict[str, list[FoundLayer]],
    parameters: dict[str, ParameterInfo],
    options: Options,
) -> Spec | str:
    """The `Spec` of a weight that all its layers use as a matrix; else the reason, "" if it is not a weight matrix at all."""
    if any(found.parameters.get("weight") != name for found in used_by):
        return ""
    forms: list[LayerForm] = []
    for found in used_by:
        assert found.site is not None
        form = found.site.form(found.module)
        if form is None:
            return ""
        forms.append(form)
    form = next((f for f in forms if f.layout != "table"), forms[0])
    matrices = {_oriented(f, form) for f in forms}
    if len(matrices) > 1:
        return "its layers use it as matrices of different shapes"
    if min(form.inputs, form.outputs) < options.min_layer_size:
        return f"narrower than min_layer_size={options.min_layer_size}"
    bias = used_by[0].parameters.get("bias") if len(used_by) == 1 else None
    if bias is not None and (bias not in parameters or len(users[bias]) > 1):
        bias = None
    info = parameters[name]
    return Spec(
        name=used_by[0].name or "model",
        kind="kronecker",
        parameters=(name,) if bias is None else (name, bias),
        shapes=(info.shape,) if bias is None else (info.shape, parameters[bias].shape),
        layers=tuple(found.name for found in used_by),
        layout=form.layout,
        inputs=form.inputs + (bias is not None),
        outputs=form.outputs,
        dtype=info.dtype,
        device=info.device,
        tables=tuple(found.name for found, f in zip(used_by, forms, strict=True) if f.layout == "table"),
    )


def _oriented(form: LayerForm, main: LayerForm) -> tuple[int, int]:
    """(inputs, outputs) of the weight in one layer; those of an embedding table tied to a head are swapped to the head's.

    (0, 0) if such a head does not store its weight as [outputs, inputs].
    """
    if form.layout == "table" and main.layout != "table":
        return (form.outputs, form.inputs) if main.layout == "out_in" else (0, 0)
    return (form.inputs, form.outputs)


def _vector(name: str, info: ParameterInfo, why: str) -> Spec:
    size = torch.Size(info.shape).numel()
    return Spec(
        name=name,
        kind="block" if size <= SMALL else "diagonal",
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
