"""Wrap a module in DDP or FSDP2, and reduce its gradients once per step, in the backward of the last micro-batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gramian.parallel.process_grid import ProcessGrid


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, such as transformer blocks: the members of its largest `ModuleList`; [] without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    return [] if found is None else list(found)


def wrap_data_parallel(module: nn.Module, grid: ProcessGrid, *, ddp: bool = True) -> nn.Module:
    """Shard `module` by FSDP2 in place, or wrap it in DDP, or leave it unchanged, as `grid` says; returns the result.

    FSDP2 gathers the parameters of each repeated block (`blocks_of`) together, and all other parameters together.

    Args:
        module: model and loss, on its device.
        grid: this process's rank and device, and how processes share the module.
        ddp: False: do not wrap in DDP, for a copy of the model whose gradients are not reduced.
    """
    if grid.uses_fsdp2:
        for block in blocks_of(module):
            fully_shard(block)
        fully_shard(module)
        return module
    if grid.uses_ddp and ddp:
        devices = [grid.device.index] if grid.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
    return module


@contextmanager
def _without_gradient_sync(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def gradient_sync(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Context manager for forward and backward of one micro-batch; gradients are reduced over processes only if `last`."""
    if last:
        return nullcontext()
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    if isinstance(module, FSDPModule):
        return _without_gradient_sync(module)
    return nullcontext()
