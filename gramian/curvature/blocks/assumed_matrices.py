"""Verify matrices that were assumed from shapes: whether a layer multiplies by them, which is seen in a backward.

A parameter of a layer without a formula (`taps.sites.generic`) may be a matrix or not. Its products with inputs a and output
gradients g by token are recorded; if Σ g aᵀ is not its gradient it has no factors, but its exact diagonal. If there is no
product at all, it is a table whose rows every sample looks up once: with Y_i [r, c] the gradient of sample i,

    F ≈ diag(1/r) ⊗ (1/N) Σ_i Y_iᵀ Y_i,

K-FAC of an embedding of positions, which is what such parameters mostly are; the trace is exact for any.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.linalg.wide import wide
from gramian.taps.products.banks import BankPart, MatrixSides
from gramian.taps.products.parts import owner, part_of, view
from gramian.taps.products.sides import Sides
from gramian.taps.records import LayerRecord

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""By the narrowest dtype of a layer: largest difference, relative to the gradient, that counts as rounding."""


CANCELLED = 1e-2
"""Share of the tokens' gradients that rounding is measured by where these cancel in the sum."""


def turned(spec: Spec, layout: str) -> Spec:
    """The block of an assumed matrix that is stored in the other layout, "out_in" or "in_out", than was assumed."""
    inputs, outputs = spec.outputs + spec.has_bias, spec.inputs - spec.has_bias
    return replace(spec, layout="in_out" if layout == "in_out" else "out_in", inputs=inputs, outputs=outputs)


def sides_of(spec: Spec, key: str, record: LayerRecord) -> MatrixSides | None:
    """The inputs and output gradients of a block's matrix, called `key` inside the layer, or why it is none; None: unused."""
    return row_sides(spec, record) if spec.by_rows else record.sides().get(key)


def row_sides(spec: Spec, record: LayerRecord) -> Sides:
    """The number of each row of a parameter and its gradient, for every sample: B·r·c numbers."""
    parameter, rows = part_of(spec.parameters[0])
    gradient = record.gradients[parameter]
    y_B = gradient.per_sample()
    y_B = y_B if rows is None else y_B[:, rows]
    y_BRC = y_B.reshape(gradient.batch, spec.inputs, spec.outputs)
    index_BR = torch.arange(spec.inputs, device=y_BRC.device).expand(gradient.batch, -1)
    return Sides(index_BR, y_BRC, positions_BT=torch.full_like(index_BR, -1))


def checked(sides: MatrixSides) -> Sides:
    """`sides` by token of a form that was not assumed; a GramianError if they are a reason against it."""
    if isinstance(sides, BankPart):
        return sides.bank.part(sides.number)
    if isinstance(sides, str):
        raise GramianError(
            f"its site has no factors for a matrix that it declares: {sides}; expected inputs and gradients"
        )
    return sides


class Totals:
    """The gradients of a layer's parameters in one call, with which recorded products are compared."""

    def __init__(self, record: LayerRecord) -> None:
        """Reference the record; nothing is computed."""
        self._record = record
        self._totals: dict[str, Tensor] = {}

    def other_than(self, spec: Spec, sides: Sides) -> str:
        """Why Σ g aᵀ over tokens, or Σ g for a bias, is not the gradient of a block's parameters; "" if it is."""
        g_BTO = wide(sides.gradients_BTO)
        if sides.counted_BT is not None:
            g_BTO = g_BTO.masked_fill(~sides.counted_BT[..., None], 0.0)
        g_TO = g_BTO.flatten(0, 1)
        if self._record.layer in spec.tables:
            rows, width = (spec.inputs, spec.outputs) if spec.layout == "table" else (spec.outputs, spec.inputs)
            y = g_TO.new_zeros(rows, width).index_add_(0, sides.inputs_BT.flatten(), g_TO)
        else:
            y = g_TO.mT @ wide(sides.inputs_BT).flatten(0, 1).to(g_TO)
            y = y.mT if spec.layout == "in_out" else y
        both = (y, g_TO.sum(0)) if spec.has_bias else (y,)
        same = all(self._same(name, found) for name, found in zip(spec.parameters, both, strict=True))
        return "" if same else "the products of its layer with it do not sum to its gradient"

    def any(self, parameter: str) -> bool:
        """True if the gradient of a parameter is not zero."""
        return bool(self._total(parameter).any())

    def _total(self, parameter: str) -> Tensor:
        if parameter not in self._totals:
            self._totals[parameter] = wide(self._record.gradients[parameter].total())
        return self._totals[parameter]

    def _same(self, name: str, found: Tensor) -> bool:
        """True if `found` is the gradient of a parameter, or of the part of this name, up to rounding."""
        gradient = self._record.gradients.get(owner(name))
        if gradient is None:
            return False
        want = view(self._total(owner(name)), name).reshape(found.shape).to(found)
        size = torch.linalg.vector_norm(want) + CANCELLED * gradient.magnitude()
        near = torch.linalg.vector_norm(found - want) <= ROUNDING[gradient.dtype] * size
        return bool(near | ~size.isfinite())
