"""Sum named tensors over the processes of a group: {name: local sum} in, {name: total} out."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_reduce(sums: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Sum every entry of {name: tensor} over the processes of a group; returns {name: total}, new tensors.

    All processes pass the same keys in the same order, with tensors of the same shapes, also those that have no data. One
    all-reduce per entry. `group`: a process group; None: the default one.
    """
    totals = {key: value.clone() for key, value in sums.items()}
    for value in totals.values():
        dist.all_reduce(value, group=group)
    return totals
