"""Adding sums up over processes."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_reduce(sums: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Sum every entry over the processes of a group.

    All processes hold the same keys in the same order, also those that saw no data, so the sequence of collectives does
    not depend on anything local. Traffic: one all-reduce of each entry.

    Args:
        sums: named sums of this process.
        group: the process group.

    Returns:
        Named sums of all processes; the input is not changed.
    """
    totals = {key: value.clone() for key, value in sums.items()}
    for value in totals.values():
        dist.all_reduce(value, group=group)
    return totals
