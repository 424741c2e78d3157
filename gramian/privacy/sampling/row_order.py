"""Whether a collate function keeps records in their order: units are attributed to rows by it.

A function that sorts records, by length for instance, would give rows of one unit to other units, each of which is clipped by
itself: the unit would move the sum by several C.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramian.privacy.sampling.single_collation import tensors_of


def reorders(collate: Callable[[list[Any]], Any], records: Sequence[Any]) -> bool:
    """True if records collated backwards have the rows of those collated forwards, in an order that is not backwards.

    Not if some tensor's rows are in the right order, or change otherwise too, as by random masks: that shows nothing.
    """
    forwards, backwards = (tensors_of(collate(list(some))) for some in (records, records[::-1]))
    found = False
    for path, one in forwards.items():
        other = backwards.get(path)
        if other is None or one.is_nested or one.layout != torch.strided:
            continue
        if one.shape != other.shape or one.shape[:1] != (len(records),):
            continue
        rows_NK, others_NK = (t.reshape(len(records), -1) for t in (one, other))
        if torch.equal(rows_NK.flip(0), others_NK):
            if not torch.equal(rows_NK, others_NK):
                return False
        else:
            found = found or _sorted(rows_NK) == _sorted(others_NK)
    return found


def _sorted(rows_NK: Tensor) -> list[list[Any]]:
    return sorted(rows_NK.tolist())
