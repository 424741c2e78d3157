"""Processes that gather weights for each other (FSDP2) run as many forwards and backwards as the busiest of them needs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def sharing_group(root: nn.Module) -> Any:
    """The processes that hold shards of a model's first parameter; None if it is whole, or spread over several dimensions."""
    first = next(root.parameters(), None)
    if not isinstance(first, DTensor) or first.device_mesh.ndim != 1:
        return None
    return first.device_mesh.get_group()


class Lockstep:
    """Agreement before every run; without a group, nobody waits for anybody. One all-reduce of one number on the host."""

    def __init__(self, group: Any = None) -> None:
        """Set who agrees.

        Args:
            group: processes that share weights; None: this one alone.
        """
        self._group = None
        if group is not None and dist.get_world_size(group) > 1:
            ranks = dist.get_process_group_ranks(group)
            is_gloo = dist.get_backend(group) == "gloo"
            self._group = group if is_gloo else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def alone(self) -> bool:
        """True if there is nobody to agree with."""
        return self._group is None

    def any(self, wanted: bool) -> bool:
        """True if any of the processes wants something."""
        if self._group is None:
            return wanted
        number = torch.tensor([int(wanted)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return bool(number.item())

    def announce(self) -> None:
        """This process begins a run; those who are done keep it company."""
        self.any(True)

    def keep_company(self, run: Callable[[], None]) -> None:
        """This process is done: run along as long as another one has a run to do."""
        while not self.alone and self.any(False):
            run()
