"""Shards of FSDP2 parameters, and a switch for DDP's gradient reduction, for code that reduces gradients itself.

Input is each process's gradient sum of a full parameter; one reduce-scatter gives each process the total of its shard.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from gramian.parallel.process_grid import ddp_wrapper


def reduce_to_shard(full: Tensor, like: DTensor) -> DTensor:
    """Start the reduction that sums a tensor of a parameter's full shape over processes and shards it like the parameter.

    One reduce-scatter, or all-reduce where the parameter is replicated. Over two mesh dimensions the last one is reduced first:
    of tensor parallelism, whose shards FSDP2 cut again, or the sharded one of HSDP.

    Args:
        full: this process's summand, in the parameter's full shape.
        like: the sharded parameter.

    Returns:
        The total as a DTensor whose local shard may still be in flight; pass it to `wait_for_shard` before use.
    """
    mesh, names = like.device_mesh, like.device_mesh.mesh_dim_names
    if mesh.ndim == 1:
        partial = DTensor.from_local(full, mesh, [Partial()], run_check=False)
        return partial.redistribute(mesh, like.placements, async_op=True)
    assert names is not None  # `grid_of` requires them
    part = full
    for dim in (1, 0):
        placed = like.placements[dim]
        target = Shard(placed.dim) if isinstance(placed, _StridedShard) else placed
        partial = DTensor.from_local(waited(part), mesh[names[dim]], [Partial()], run_check=False)
        part = partial.redistribute(mesh[names[dim]], [target], async_op=True).to_local()
    reduced = as_sharded(part, like)
    assert isinstance(reduced, DTensor)
    return reduced


def wait_for_shard(shard: DTensor) -> DTensor:
    """Wait for the result of `reduce_to_shard`; returns the DTensor with a plain local shard."""
    part = shard.to_local()
    if not isinstance(part, AsyncCollectiveTensor):
        return shard
    reduced = as_sharded(waited(part), shard)
    assert isinstance(reduced, DTensor)
    return reduced


def waited(t: Tensor) -> Tensor:
    """`t` as a plain tensor, after waiting for the asynchronous collective that produces it, if there is one."""
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


def reshard(root: nn.Module) -> None:
    """Make FSDP2 free the full parameters that a forward without a backward (an evaluation) left gathered. No collective.

    A backward that still follows gathers them again. Models without FSDP2 are not changed.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    if units and not all(isinstance(p, DTensor) for p in root.parameters()):
        for unit in units:
            unit.reshard()


class GatheredParameters:
    """Clones tensors that share memory with a gathered FSDP2 parameter, which is freed after its module's backward."""

    def __init__(self, root: nn.Module) -> None:
        """Record the modules and names of all parameters of an FSDP2 model; for any other model nothing is recorded."""
        modules = list(root.modules())
        sharded = any(isinstance(module, FSDPModule) for module in modules)
        self._places = [(m._parameters, name) for m in modules for name in m._parameters] if sharded else []

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The given tensors, with every view of a gathered parameter replaced by a clone that stays valid after the free."""
        if not self._places:
            return list(tensors)
        now = [parameters[name] for parameters, name in self._places]
        gathered = {_storage(local(p)) for p in now if p is not None}
        return [t.clone() if _storage(t) in gathered else t for t in tensors]


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def unsharded_units(root: nn.Module) -> Iterator[None]:
    """Gather the parameters of each FSDP2 module in turn; at each yield one module has full parameters. Collective."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            yield
            module.reshard()


def local_box(p: Tensor) -> tuple[slice, ...] | None:
    """The part of a sharded parameter that this process stores, as a slice of each axis; None for a plain or 0-dim tensor."""
    if not isinstance(p, DTensor) or not p.dim():
        return None
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(slice(start, start + size) if size else slice(0, 0) for start, size in zip(offset, shape, strict=True))


def local(t: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


def as_sharded(t: Tensor, like: Tensor) -> Tensor:
    """A DTensor made of this process's shard `t`, with mesh, placements and shape of `like`; `t` itself if `like` is plain."""
    if not isinstance(like, DTensor):
        return t
    return DTensor.from_local(
        t, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class ReducerOff:
    """Switches off DDP's gradient reduction until `restore`, for callers that reduce gradients themselves."""

    def __init__(self, model: nn.Module) -> None:
        """Switch off the gradient reduction of the model's DDP wrapper; a model without DDP is not changed."""
        self._wrapper = ddp_wrapper(model)
        self._before = True
        if self._wrapper is not None:
            self._before = self._wrapper.require_backward_grad_sync
            self._wrapper.require_backward_grad_sync = False

    def restore(self) -> None:
        """Restore DDP's gradient reduction to its setting before this object was made."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._before
