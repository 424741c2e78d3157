"""The units of privacy in one batch: which rows, or which tokens of packed rows, belong to the same user or document.

Shapes: B rows of the batch, T tokens per row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramian.core.errors import GramianError

PADDING = -1
"""Id of rows and tokens that belong to no unit."""


def unit_ids(ids: Any) -> Tensor:
    """The unit of each row [B], or of each token [B, T], numbered 0, 1, 2 … in the order of their ids; −1: padding.

    The result is on the CPU. Waits for a device.

    Args:
        ids: any integers, [B] or [B, T], equal for rows or tokens of one unit; −1 for padding.

    Raises:
        GramianError: for another type or shape, or an id below −1.
    """
    if isinstance(ids, list | tuple | np.ndarray):
        try:
            ids = torch.as_tensor(ids) if len(ids) else torch.zeros(0, dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError) as error:
            raise GramianError(f"ids: expected integers, as many in each row: {error}") from None
    if not isinstance(ids, Tensor):
        raise GramianError(f"ids: expected a tensor of integers, [B] or [B, T], got {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.dim() not in (1, 2):
        raise GramianError(
            f"ids: expected integers of shape [B] (the unit of each row) or [B, T] (of each token), got {ids.dtype} of shape "
            f"{list(ids.shape)}"
        )
    given, numbers = ids.detach().cpu().long().unique(return_inverse=True)
    if len(given) and int(given[0]) < PADDING:
        raise GramianError(f"ids: expected at least 0, or {PADDING} for padding, got {int(given[0])}")
    padded = len(given) > 0 and int(given[0]) == PADDING
    found: Tensor = numbers - int(padded)
    return found
