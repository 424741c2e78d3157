"""Processes that gather weights for each other (FSDP2) run as many forwards and backwards as the busiest of them needs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def sharing_group(root: FSDPModule) -> Any:
    """The processes that hold shards of a root's parameters, as FSDP2 knows them; None if it has none of its own.

    Meshes of parameters that compare equal are one object to DTensor, whatever their groups are, so they are not asked.
    """
    assert isinstance(root, nn.Module)
    units = [unit for module in root.modules() if isinstance(module, FSDPModule) for unit in fsdp_groups(module)]
    return getattr(units[0].mesh_info, "shard_process_group", None) if units else None


def fsdp_groups(unit: FSDPModule) -> list[Any]:
    """What FSDP2 gathers and reduces at once: several of a unit, in older releases of torch one or none."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


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
