"""Clipped sums over data-parallel processes: reduced once, in an order that no process decides by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from gramian.core.errors import GramianError


@dataclass(frozen=True)
class DataParallel:
    """How a model is spread over processes that hold different samples."""

    kind: str
    """"one", "ddp" or "fsdp2"."""
    group: Any = None
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, model: nn.Module, root: nn.Module) -> "DataParallel":
        """See how the user wrapped the model.

        Raises:
            GramianError: for placements that are not data parallel.
        """
        sharded = [(name, p) for name, p in root.named_parameters() if isinstance(p, DTensor)]
        if sharded:
            name, first = sharded[0]
            if any(not isinstance(p, DTensor) or p.device_mesh != first.device_mesh for p in root.parameters()):
                raise GramianError(
                    "module: some parameters are sharded otherwise than the rest; expected fully_shard on the root"
                )
            if not any(isinstance(module, FSDPModule) for module in root.modules()):
                raise GramianError(
                    f"module: {name} is sharded, but not by fully_shard; expected FSDP2, DDP or one process"
                )
            if first.device_mesh.ndim != 1 or any(p.placements != (Shard(0),) for _, p in sharded):
                raise GramianError(
                    f"module: {name} is placed as {first.placements}; expected fully_shard over one mesh dimension"
                )
            group = first.device_mesh.get_group()
            return cls("fsdp2", group, dist.get_rank(group), dist.get_world_size(group))
        while isinstance(model, nn.Module):
            if isinstance(model, DistributedDataParallel):
                group = model.process_group
                return cls("ddp", group, dist.get_rank(group), dist.get_world_size(group))
            inner = model._modules.get("_orig_mod")
            if inner is None:
                break
            model = inner
        return cls("one")

    # ---- agreement ---------------------------------------------------------------------------------------------------

    def differing(self, values: Mapping[str, int], device: torch.device) -> str | None:
        """The first of these numbers that is not the same on all processes, by name; None: all are. One all-reduce."""
        if self.world == 1:
            return None
        numbers = list(values.values())
        mine = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device=device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = mine[: len(numbers)].tolist(), (-mine[len(numbers) :]).tolist()
        return next((n for n, high, low in zip(values, highest, lowest, strict=True) if high != low), None)

    def from_first(self, data: bytes, device: torch.device) -> bytes:
        """The first process's bytes, on every process. One broadcast."""
        if self.world == 1:
            return data
        t = torch.tensor(list(data), dtype=torch.uint8, device=device)
        dist.broadcast(t, group=self.group, group_src=0)
        return bytes(t.cpu().tolist())

    # ---- sums ----------------------------------------------------------------------------------------------------------

    def start_sum(self, t: Tensor) -> Any:
        """Begin to add a tensor up over processes, in place; `wait()` on what is returned."""
        return None if self.world == 1 else dist.all_reduce(t, group=self.group, async_op=True)


def reduce_to_shard(full: Tensor, like: DTensor) -> DTensor:
    """Every process's sum of a whole parameter, added up and cut as the parameter is. One reduce-scatter, not waited for."""
    partial = DTensor.from_local(full, like.device_mesh, [Partial()], run_check=False)
    return partial.redistribute(like.device_mesh, like.placements, async_op=True)


def landed(shard: DTensor) -> DTensor:
    """What `reduce_to_shard` gave, waited for: its local part is a plain tensor again."""
    part = shard.to_local()
    if not isinstance(part, AsyncCollectiveTensor):
        return shard
    placed_ = placed(part.wait(), shard)
    assert isinstance(placed_, DTensor)
    return placed_


def reshard(root: nn.Module) -> None:
    """Let FSDP2 put its shards back where a forward without a backward (an evaluation) left whole parameters. No collective.

    A backward that is still to come gathers them again.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    if units and not all(isinstance(p, DTensor) for p in root.parameters()):
        for unit in units:
            unit.reshard()


class Gathered:
    """Parameters that FSDP2 gathers for a while: it frees their memory as soon as a unit's backward is over."""

    def __init__(self, root: nn.Module) -> None:
        """Look where parameters stand, if there is FSDP2 at all."""
        modules = list(root.modules())
        sharded = any(isinstance(module, FSDPModule) for module in modules)
        self._places = [(m._parameters, name) for m in modules for name in m._parameters] if sharded else []

    def kept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, copied where they are views of a parameter that is gathered now: they may be read later."""
        if not self._places:
            return list(tensors)
        now = [parameters[name] for parameters, name in self._places]
        lent = {_memory(p) for p in now if p is not None and not isinstance(p, DTensor)}
        return [t.clone() if _memory(t) in lent else t for t in tensors]


def _memory(t: Tensor) -> int:
    """The same number for tensors that share their memory."""
    return int(t.untyped_storage()._cdata)


def each_unsharded(root: nn.Module) -> Iterator[None]:
    """Gather the parameters of one FSDP2 group after the other, so that whole tensors stand in its modules. Collective."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            yield
            module.reshard()


def local_rows(p: Tensor) -> tuple[int, int] | None:
    """[start, stop) of dim 0 that this process holds; None: all of it."""
    if not isinstance(p, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)


def local(t: Tensor) -> Tensor:
    """This process's part."""
    return t.to_local() if isinstance(t, DTensor) else t


def placed(t: Tensor, like: Tensor) -> Tensor:
    """A local part as a tensor like a parameter."""
    if not isinstance(like, DTensor):
        return t
    return DTensor.from_local(
        t, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class ReducerOff:
    """DDP's own reduction, switched off for as long as somebody else owns it."""

    def __init__(self, model: nn.Module) -> None:
        """Find the wrapper, if there is one."""
        self._wrapper: DistributedDataParallel | None = None
        while isinstance(model, nn.Module):
            if isinstance(model, DistributedDataParallel):
                self._wrapper = model
                break
            inner = model._modules.get("_orig_mod")
            if inner is None:
                break
            model = inner
        self._before = True
        if self._wrapper is not None:
            self._before = self._wrapper.require_backward_grad_sync
            self._wrapper.require_backward_grad_sync = False

    def restore(self) -> None:
        """As it was."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._before
