"""Labels that let the last token of one unit predict the first token of the next, so that its loss depends on both units.

Shapes: B rows of the batch, T tokens per row.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.privacy.sampling.unit_ids import PADDING

IGNORED = -100
"""Label of a token that has no loss term."""
CHANCE = 4
"""Number of labels that all have to be the first token of the next unit: fewer may equal it by chance."""


class CrossingLabels:
    """Looks at the labels that a model gets, batch by batch.

    Labels are integers [B, T] that repeat the first tensor of this shape inside of units. If they repeat it token by token, the
    model shifts them, and that of the first token of a unit has to be −100. If they repeat the token after each, the one of the
    last token of a unit is −100 or the unit's own, which may equal the next unit's first token by chance.
    """

    def __init__(self) -> None:
        """No label was seen."""
        self._equal = 0
        self._own = False
        """True once a unit's last label was seen that is not the next token: such labels are then the units' own."""

    def refuse(self, ids: Tensor, arguments: Any) -> None:
        """Raise GramianError for labels among `arguments` that cross from one unit into the next.

        `ids` is the unit of each row [B], where none can cross, or of each token [B, T]; −1: padding. Labels that the model
        does not see are not looked at. Cost: some passes over [B, T] on the host, until a unit's own last label was seen.
        """
        looks = ids.dim() == 2 and not self._own
        found = list(_token_ids(arguments, tuple(ids.shape))) if looks else []
        if len(found) < 2 or ids.shape[1] < 2:
            return
        next_BT = found[0][:, 1:]
        inside_BT = ids[:, 1:] == ids[:, :-1]
        border_BT = ~inside_BT & (ids[:, 1:] != PADDING)
        for labels_BT in found[1:]:
            counts, shifts = (t != IGNORED for t in (labels_BT[:, :-1], labels_BT[:, 1:]))
            repeats = _all(labels_BT[:, :-1] == next_BT, counts & inside_BT)
            if repeats == _all(labels_BT[:, 1:] == next_BT, shifts & inside_BT):
                continue  # no labels; or one token everywhere, which says nothing
            if not repeats:
                _refuse_any(shifts & border_BT)
                continue
            equal_BT = counts & border_BT & (labels_BT[:, :-1] == next_BT)
            self._equal += int(equal_BT.sum())
            self._own = bool((counts & border_BT & ~equal_BT).any())
            if not self._own and self._equal >= CHANCE:
                _refuse_any(equal_BT)


def _all(equal_BT: Tensor, where_BT: Tensor) -> bool:
    """True if `equal_BT` is true in some places of `where_BT`, and false in none."""
    return bool(where_BT.any()) and bool(equal_BT[where_BT].all())


def _refuse_any(crossing_BT: Tensor) -> None:
    for row, place in crossing_BT.nonzero()[:1].tolist():
        raise GramianError(
            f"ids: in row {row} token {place} is to predict token {place + 1}, which belongs to another unit; expected the "
            f"label {IGNORED} where the next token is of another unit"
        )


def _token_ids(arguments: Any, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The integer tensors [B, T] among `arguments`, on the CPU."""
    for leaf in pytree.tree_leaves(arguments):
        integers = isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
        if integers and leaf.dtype != torch.bool and tuple(leaf.shape) == shape:
            yield leaf.detach().cpu().long()
