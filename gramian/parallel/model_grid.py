"""The process grid of a model as the user has wrapped it: FSDP2, HSDP, tensor parallelism, DDP, or one process.

| wrapped by | parameters are | processes with other samples |
|---|---|---|
| nothing | plain | 1 |
| DDP | plain | all |
| `fully_shard` | Shard(0) over one mesh dimension | all |
| `fully_shard` over two dimensions (HSDP) | Replicate × Shard(0) | all |
| `parallelize_module` | DTensors over one mesh dimension, or plain | 1: all see the same samples |
| both | sharded over data × tensor, those of whole layers over data | one for each row of the mesh |
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.parallel.lockstep import fsdp_groups
from gramian.parallel.process_grid import DataParallelKind, ProcessGrid, ddp_wrapper
from gramian.parallel.tensor_parallel import TensorParallel

OTHER_DIMENSIONS = ("pp", "pipe", "pipeline", "cp", "context", "ep", "expert")
"""Names of mesh dimensions over which parts of one sample's gradient lie on several processes, which nobody here adds up."""


def grid_of(model: nn.Module, root: nn.Module) -> ProcessGrid:
    """The grid that follows from the way a model is wrapped.

    Args:
        model: the module as the user calls it, which may be wrapped in DDP and compiled.
        root: the module inside these wrappers, whose parameters are read.

    Raises:
        GramianError: for any other sharding than that of the table above, by name.
    """
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    sharded = [(name, p) for name, p in root.named_parameters() if isinstance(p, DTensor)]
    wrapper = ddp_wrapper(model)
    local = [name for name, p in root.named_parameters() if hasattr(p, "_st_info")]
    if (sharded and wrapper is not None) or local:
        raise GramianError(
            f"module: {(local or [sharded[0][0]])[0]} is tensor parallel inside DistributedDataParallel; expected fully_shard "
            "over the data-parallel dimension of the mesh"
        )
    if any("replicate" in (_get_registry(module) or ()) for module in root.modules()):
        raise GramianError(
            "module: replicate() reduces its gradients by hooks of its own; expected DistributedDataParallel around the model, "
            "or fully_shard, also over (replicate, shard)"
        )
    if not sharded:
        if wrapper is None:
            return ProcessGrid(device=device)
        group = wrapper.process_group
        return ProcessGrid(dist.get_rank(group), dist.get_world_size(group), device, DataParallelKind.DDP, group=group)
    for name, p in sharded:
        _refuse_dimensions(name, p.device_mesh)
    if not any(isinstance(module, FSDPModule) for module in root.modules()):
        return _tensor_parallel(root, device)
    return _sharded(root, sharded, device)


def _tensor_parallel(root: nn.Module, device: torch.device) -> ProcessGrid:
    tensor = TensorParallel.of(root)
    assert tensor is not None
    size, everyone = tensor.size, dist.get_world_size()
    if size != everyone:
        raise GramianError(
            f"module: is tensor parallel over {size} of {everyone} processes; expected all of them, or fully_shard over the "
            "data-parallel dimension of one mesh"
        )
    for name, p in root.named_parameters():
        if isinstance(p, DTensor) and not isinstance(p.placements[0], Replicate | Shard):
            raise GramianError(f"module: {name} is placed as {p.placements}; expected Shard or Replicate")
    kind = DataParallelKind.TENSOR
    return ProcessGrid(tensor.rank, size, device, kind, group=tensor.exchange.group, tensor=size, data_rank=0)


def _sharded(root: nn.Module, sharded: list[tuple[str, Any]], device: torch.device) -> ProcessGrid:
    """The grid of a model with `fully_shard`, over one mesh dimension, over two (HSDP), or beside tensor parallelism."""
    _restore_meshes(root)
    name, first = max(sharded, key=lambda pair: pair[1].device_mesh.ndim)
    mesh, tensor = first.device_mesh, TensorParallel.of(root)
    if len(sharded) < len(list(root.parameters())):
        raise GramianError(
            "module: some parameters are sharded otherwise than the rest; expected fully_shard on the root"
        )
    for name, p in sharded:
        own, placed = p.device_mesh, p.placements
        rows = Shard | _StridedShard
        fits = own == mesh and isinstance(placed[-1], Shard) and placed[-1].dim == 0
        if mesh.ndim == 2 and tensor is None:
            fits = fits and isinstance(placed[0], Replicate)
        elif mesh.ndim == 2:
            fits = isinstance(placed[0], rows) and placed[0].dim == 0
            fits = fits and (own == mesh[_names(mesh)[0]] or (own == mesh and isinstance(placed[1], Shard | Replicate)))
        if not fits or mesh.ndim > 2:
            raise GramianError(
                f"module: {name} is placed as {placed} over a mesh of {own.ndim} dimensions; expected fully_shard along axis 0 "
                "over one mesh for all parameters, of one dimension, replicate × shard, or data × tensor"
            )
    everyone = mesh._get_root_mesh().size() if mesh.ndim == 1 else dist.get_world_size()
    if mesh.size() != everyone:
        raise GramianError(
            f"module: is sharded over {mesh.size()} of {everyone} processes; expected a mesh of all of them, with "
            "fully_shard over every data-parallel dimension"
        )
    if mesh.ndim == 1:
        group = mesh.get_group()
        return ProcessGrid(dist.get_rank(group), mesh.size(), device, DataParallelKind.FSDP2, group=group)
    data_rank = None if tensor is None else mesh.get_local_rank(_names(mesh)[0])
    tensors = 1 if tensor is None else tensor.size
    kind = DataParallelKind.FSDP2
    return ProcessGrid(dist.get_rank(), mesh.size(), device, kind, tensor=tensors, data_rank=data_rank)


def _restore_meshes(root: nn.Module) -> None:
    """Give parameters the mesh, with its groups, that FSDP2 has for them: DTensor takes the object of an equal earlier mesh."""
    for unit in (module for module in root.modules() if isinstance(module, FSDPModule)):
        for one in (one for group in fsdp_groups(unit) for one in group.fsdp_params):
            one.sharded_param._spec = one._sharding_spec


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise GramianError("module: its mesh has dimensions without names; expected mesh_dim_names in init_device_mesh")
    return mesh.mesh_dim_names


def _refuse_dimensions(name: str, mesh: DeviceMesh) -> None:
    """Raise a `GramianError` for a mesh that was cut from one with pipeline, context or expert parallelism."""
    root = mesh._get_root_mesh()
    for dimension, size in zip(root.mesh_dim_names or (), root.shape, strict=False):
        if size > 1 and any(dimension.lower().startswith(other) for other in OTHER_DIMENSIONS):
            raise GramianError(
                f'module: the mesh of {name} has a dimension "{dimension}", over which one sample\'s gradient is spread; '
                "expected data and tensor parallelism alone (no pipeline, context or expert parallelism)"
            )


def refuse_context_parallel() -> None:
    """Raise a `GramianError` inside `context_parallel`, where each process sees some tokens of every sample."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", {}):
        raise GramianError(
            "module: runs in context_parallel, where a process sees some tokens of every sample; expected whole samples on "
            "each process (tensor parallelism with SequenceParallel splits them inside the model)"
        )
