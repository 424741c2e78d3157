"""A module spread over processes: DDP or FSDP2, and no reduction before the last micro-batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gramian.parallel.world import World


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the members of the module list that holds most parameters; none: []."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    return [] if found is None else list(found)


def spread(module: nn.Module, world: World, strategy: str) -> nn.Module:
    """The module as all processes run it.

    Args:
        module: model and loss, on its device.
        world: this process among the others.
        strategy: "one", "ddp" or "fsdp2" (every block a unit of its own, the rest another).
    """
    if strategy == "fsdp2":
        for block in blocks_of(module):
            fully_shard(block)
        fully_shard(module)
        return module
    if strategy == "ddp":
        devices = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
    return module


@contextmanager
def _held_back(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def reducing(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: gradients are reduced with the last one of a step alone."""
    if last:
        return nullcontext()
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    if isinstance(module, FSDPModule):
        return _held_back(module)
    return nullcontext()
