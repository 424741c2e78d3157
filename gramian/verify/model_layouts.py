"""A model over the processes of a run, as a user would spread it: DDP, FSDP2, tensor-parallel linears, or both of the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gramian.parallel.world import World


def spread(model: nn.Module, where: World) -> nn.Module:
    """Over all processes, each with samples of its own: DDP around it, or blocks and then the root with `fully_shard`."""
    if where.kind == "ddp":
        return DistributedDataParallel(model)
    return _sharded(model) if where.kind == "fsdp2" else model


def whole(t: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective if it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def _sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


@dataclass(frozen=True)
class ModelLayout:
    """Processes in a grid: those of a row hold parts of the same layers and see the same samples, those of a column do not."""

    where: World
    fsdp: bool
    tensor_parallel: bool

    @property
    def tensor(self) -> int:
        """Processes that share layers: all of them, or, with FSDP2 too, two of an even number; 1: no layer is shared."""
        if not self.tensor_parallel:
            return 1
        return 2 if self.fsdp and self.where.size % 2 == 0 else self.where.size

    @property
    def data(self) -> int:
        """Processes with samples of their own."""
        return self.where.size // self.tensor

    @property
    def rank(self) -> int:
        """This one's number among them."""
        return self.where.rank // self.tensor

    def __str__(self) -> str:
        """In words, for a title."""
        parts = [f"FSDP2 over {self.data}"] * self.fsdp + [f"tensor parallel over {self.tensor}"] * self.tensor_parallel
        return " × ".join(parts) or f"DDP over {self.data}"

    def place(self, model: nn.Module, linears: Mapping[str, str] | None) -> nn.Module:
        """The model on this grid.

        Args:
            model: whole, on this process's device.
            linears: {name or pattern of a linear layer: "outputs" or "inputs", by which it is cut}; None: no layer is.
        """
        if linears is None:
            return _sharded(model) if self.fsdp else DistributedDataParallel(model)
        device, styles = self.where.device.type, _styles(model, linears, self.tensor)
        if not self.fsdp:
            return parallelize_module(model, init_device_mesh(device, (self.tensor,)), styles)
        mesh = init_device_mesh(device, (self.data, self.tensor), mesh_dim_names=("data", "tensor"))
        return _sharded(parallelize_module(model, mesh["tensor"], styles), mesh["data"])


def _styles(model: nn.Module, linears: Mapping[str, str], size: int) -> dict[str, ParallelStyle]:
    """Outputs that cannot be cut evenly stay DTensors: local ones would not tell the next layer how many there are."""
    cut = [name for name, by in linears.items() if by == "outputs"]
    layers = [m for name, m in model.named_modules() for pattern in cut if fnmatchcase(name, pattern)]
    even = all(layer.out_features % size == 0 for layer in layers if isinstance(layer, nn.Linear))
    by_outputs = ColwiseParallel(use_local_output=even)
    return {name: by_outputs if by == "outputs" else RowwiseParallel() for name, by in linears.items()}
