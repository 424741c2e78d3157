"""Per-sample gradients of rows, regrouped into units of different sizes without padding them to the largest unit.

Sequences packed into rows save the padding of short ones; unit by unit it would come back: U units × the largest unit's
tokens. Here all B·T tokens stay as they are, beside the unit of each.
"""

import torch
from torch import Tensor

from gramian.taps.gradients.grouped_indexed import GroupedIndexed
from gramian.taps.gradients.grouped_outer import GroupedOuter
from gramian.taps.gradients.grouped_rows import BITS, GroupedRows
from gramian.taps.gradients.grouped_sum import GroupedSum
from gramian.taps.gradients.indexed import Indexed
from gramian.taps.gradients.joined import Joined
from gramian.taps.gradients.outer import Outer
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.gradients.summed import Summed
from gramian.taps.units import Units


def regrouped(gradient: PerSampleGradient, units: Units) -> PerSampleGradient:
    """The gradients of units (groups of rows or tokens) instead of rows; padded to the largest unit unless `units.ragged`.

    Linear layers, sums over tokens and embedding tables then store their B·T tokens once. Layers without tokens of their own
    form the gradient of each row, and add up those of a unit.

    Raises:
        GramianError: if units are groups of tokens, and the layer has no tokens, or another number of them.
    """
    if not units.ragged:
        return gradient.regroup(units)
    if isinstance(gradient, Joined):
        return Joined([regrouped(part, units) for part in gradient.parts])
    if isinstance(gradient, Outer):
        rows = _rows(units, gradient.left_BTM)
        sides = gradient.left_BTM.flatten(0, 1), gradient.right_BTN.flatten(0, 1)
        return GroupedOuter(*sides, rows, gradient.shape, bool(gradient.input_left))
    if isinstance(gradient, Summed):
        rows, tokens_RN = _rows(units, gradient.tokens_BTN), gradient.tokens_BTN.flatten(0, 1)
        return GroupedSum(tokens_RN, rows, gradient.shape, gradient.dtype)
    if isinstance(gradient, Indexed):
        rows = _rows(units, gradient.index_BT)
        return GroupedIndexed(gradient.index_BT.flatten(), gradient.rows_BTD.flatten(0, 1), rows, gradient.shape[0])
    return gradient.regroup(units)


def _rows(units: Units, tokens_BT: Tensor) -> GroupedRows:
    """The unit of each token of a tensor [B, T, …], as rows of one group; one object for all layers with as many tokens."""
    key = tokens_BT.shape[1], tokens_BT.device

    def make() -> GroupedRows:
        owners_R = units.of_tokens(tokens_BT.shape[1]).reshape(-1).to(tokens_BT.device, torch.int64)
        return GroupedRows(
            (owners_R << BITS) + torch.arange(len(owners_R), device=owners_R.device), None, units.count, 1
        )

    return units.cached(key, make)
