"""Make FSDP2 processes run the same number of forwards and backwards: as many as the process with the most work needs.

Every forward gathers weights from all processes, so a process that has finished keeps running until all have.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gramian.parallel.exchange import Exchange

_of_hosts: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""{process group: the gloo group of its processes}, which all captures and private models on it share."""


def gloo_group(group: Any) -> Any:
    """The gloo group of a group's processes: itself if it is one, else made on the first call, on all of them together."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _of_hosts:
        ranks = dist.get_process_group_ranks(group)
        _of_hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _of_hosts[group]


def sharing_group(root: FSDPModule) -> Any:
    """The process group over which FSDP2 shards the parameters of the model `root`; None if FSDP2 shards none.

    It is not read from the parameters' meshes: DTensor shares one mesh object between equal meshes, whatever their groups.
    """
    assert isinstance(root, nn.Module)
    units = [unit for module in root.modules() if isinstance(module, FSDPModule) for unit in fsdp_groups(module)]
    return getattr(units[0].mesh_info, "shard_process_group", None) if units else None


def fsdp_groups(unit: FSDPModule) -> list[Any]:
    """The internal parameter groups of a module wrapped by `fully_shard`, each gathered and reduced in one collective.

    Older releases of torch have at most one per module.
    """
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class Lockstep:
    """Keeps processes in step: before every forward and backward, an all-reduce finds out whether any process has one left.

    With one process, or without a group, there is no communication.
    """

    def __init__(self, group: Any = None) -> None:
        """Use the gloo group of the same processes for these all-reduces.

        Args:
            group: process group of the processes that share weights; None: this process only.
        """
        self._group = None
        if group is not None and dist.get_world_size(group) > 1:
            self._group = gloo_group(group)

    @property
    def alone(self) -> bool:
        """True if there is no other process to wait for."""
        return self._group is None

    def any(self, wanted: bool) -> bool:
        """True if `wanted` is true on any process of the group. One all-reduce."""
        if self._group is None:
            return wanted
        number = torch.tensor([int(wanted)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return bool(number.item())

    def first_reason(self, error: Exception | None) -> str:
        """Return "process R: reason" of the first process with an `error`, "" if none has. One all-reduce; then two gathers."""
        if self._group is None or not self.any(error is not None):
            return str(error or "")
        reasons = Exchange(self._group, torch.device("cpu")).gather_messages(str(error or ""))
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        return f"process {dist.get_global_rank(self._group, rank)}: {reasons[rank]}"

    def announce(self) -> None:
        """Announce a forward and backward of this process; processes that have finished then run one too. One all-reduce."""
        self.any(True)

    def join_remaining_runs(self, run: Callable[[], None]) -> None:
        """Call `run`, one forward and backward, as long as another process announces one; for use after this process's work."""
        while not self.alone and self.any(False):
            run()
