"""Sum named tensors over the processes of a group: {name: local sum} in, {name: total} out."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_reduce(sums: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Sum every entry of {name: tensor} over the processes of a group; returns {name: total}.

    All processes pass the same keys in the same order, also those that saw no data. Traffic: one all-reduce of each entry.
    The input is not changed.
    """
    totals = {key: value.clone() for key, value in sums.items()}
    for value in totals.values():
        dist.all_reduce(value, group=group)
    return totals
