"""The units of privacy in one batch: which rows, or which tokens of packed rows, belong to the same user or document.

Shapes: B rows of the batch, T tokens per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError

PADDING = -1
"""Id of rows and tokens that belong to no unit."""
IGNORED = -100
"""Label of a token that has no loss term."""


@dataclass(frozen=True)
class UnitIds:
    """The unit of each row [B], or of each token [B, T], of one batch, numbered 0 … count − 1; −1: padding."""

    ids: Tensor
    count: int

    @classmethod
    def of(cls, ids: Any) -> "UnitIds":
        """Number the units of a batch anew, in the order of their ids; the result is on the CPU. Waits for a device.

        Args:
            ids: any integers, [B] or [B, T], equal for rows or tokens of one unit; −1 for padding.

        Raises:
            GramianError: for another type or shape, or an id below −1.
        """
        if isinstance(ids, list | tuple | np.ndarray):
            ids = torch.as_tensor(ids) if len(ids) else torch.zeros(0, dtype=torch.int64)
        if not isinstance(ids, Tensor):
            raise GramianError(f"ids: expected a tensor of integers, [B] or [B, T], got {type(ids).__name__}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.dim() not in (1, 2):
            raise GramianError(
                f"ids: expected integers of shape [B] (the unit of each row) or [B, T] (of each token), got {ids.dtype} of "
                f"shape {list(ids.shape)}"
            )
        given, numbers = ids.detach().cpu().long().unique(return_inverse=True)
        if len(given) and int(given[0]) < PADDING:
            raise GramianError(f"ids: expected at least 0, or {PADDING} for padding, got {int(given[0])}")
        padded = len(given) > 0 and int(given[0]) == PADDING
        return cls(numbers - int(padded), len(given) - int(padded))

    @property
    def by_token(self) -> bool:
        """True if several units may share a row."""
        return self.ids.dim() == 2

    def refuse_crossing_labels(self, arguments: Any) -> None:
        """Raise GramianError if labels among `arguments` let the loss of one unit depend on a token of another.

        Labels are integers [B, T] that repeat the first tensor of this shape inside of units: token by token (the model shifts
        them), or the token after each; or they are −100. A label that repeats the first token of the next unit is refused.
        Labels that the model does not see are not looked at. Cost: some passes over [B, T] on the host.
        """
        if not self.by_token:
            return
        found = list(_token_ids(arguments, tuple(self.ids.shape)))
        if len(found) < 2 or self.ids.shape[1] < 2:
            return
        tokens_BT, inside_BT = found[0], self.ids[:, 1:] == self.ids[:, :-1]
        for labels_BT in found[1:]:
            for label_BT in (labels_BT[:, :-1], labels_BT[:, 1:]):
                known_BT, repeats_BT = (label_BT != IGNORED) & inside_BT, label_BT == tokens_BT[:, 1:]
                crossing = (repeats_BT & ~inside_BT).nonzero().tolist()
                if crossing and bool(known_BT.any()) and bool(repeats_BT[known_BT].all()):
                    row, place = crossing[0]
                    raise GramianError(
                        f"ids: in row {row} token {place} is to predict token {place + 1}, which belongs to another unit; "
                        f"expected the label {IGNORED} where the next token is of another unit"
                    )


def _token_ids(arguments: Any, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The integer tensors [B, T] among `arguments`, on the CPU."""
    for leaf in pytree.tree_leaves(arguments):
        integers = isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
        if integers and leaf.dtype != torch.bool and tuple(leaf.shape) == shape:
            yield leaf.detach().cpu().long()
