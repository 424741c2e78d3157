"""Placement of a model on the processes of a check, as a user would do it: DDP, FSDP2, tensor-parallel linears, or both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gramian.parallel.process_grid import DataParallelKind, ProcessGrid

GPT_LINEARS = {"blocks.*.fc": "outputs", "blocks.*.mlp_out": "inputs"}
"""Linear layers of the reference GPT that are tensor parallel in checks and profiles, and the side by which each is split."""


def with_tensor_parallel(grid: ProcessGrid, fsdp: bool) -> ProcessGrid:
    """The grid of the same processes with tensor-parallel layers, beside FSDP2 if `fsdp`; see `ModelLayout`."""
    layout = ModelLayout(grid, fsdp, tensor_parallel=True)
    kind = DataParallelKind.FSDP2 if fsdp else DataParallelKind.TENSOR
    return replace(grid, kind=kind, tensor=layout.tensor, data_rank=layout.rank)


def spread(model: nn.Module, grid: ProcessGrid, linears: Mapping[str, str] = GPT_LINEARS) -> nn.Module:
    """Place a model on all processes: in DDP, with `fully_shard` on the blocks and then on the root, or tensor parallel.

    `linears`: the layers that are, {name or pattern: "outputs" or "inputs", the side that is split}.
    """
    if grid.spreads:
        return ModelLayout(grid, grid.uses_fsdp2, tensor_parallel=True).place(model, linears)
    if grid.uses_ddp:
        return DistributedDataParallel(model)
    return _sharded(model) if grid.uses_fsdp2 else model


def gathered(t: Tensor) -> Tensor:
    """The full tensor of a tensor that may be sharded (DTensor). Collective if it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def _sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


@dataclass(frozen=True)
class ModelLayout:
    """A grid of processes: those of a row have the same samples and share tensor-parallel layers; rows have other samples."""

    grid: ProcessGrid
    fsdp: bool
    tensor_parallel: bool

    @property
    def tensor(self) -> int:
        """Number of processes that share tensor-parallel layers; 1 without tensor parallelism.

        With tensor parallelism: 2 if FSDP2 is used too and the number of processes is even, else all processes.
        """
        if not self.tensor_parallel:
            return 1
        return 2 if self.fsdp and self.grid.size % 2 == 0 else self.grid.size

    @property
    def data(self) -> int:
        """Number of groups of processes that have samples of their own."""
        return self.grid.size // self.tensor

    @property
    def rank(self) -> int:
        """Number of this process's group among the groups that have samples of their own."""
        return self.grid.rank // self.tensor

    def __str__(self) -> str:
        """Text for a title that describes the grid, such as "FSDP2 over 2 × tensor parallel over 2"."""
        parts = [f"FSDP2 over {self.data}"] * self.fsdp + [f"tensor parallel over {self.tensor}"] * self.tensor_parallel
        return " × ".join(parts) or f"DDP over {self.data}"

    def place(self, model: nn.Module, linears: Mapping[str, str] | None) -> nn.Module:
        """Place an unsharded model on this grid: DDP, FSDP2, tensor-parallel layers, or both.

        `linears` is {name or pattern of a linear layer: "outputs" or "inputs", the side that is split}; None: no layer is.
        """
        if linears is None:
            return _sharded(model) if self.fsdp else DistributedDataParallel(model)
        device, styles = self.grid.device.type, _styles(model, linears, self.tensor)
        if not self.fsdp:
            return parallelize_module(model, init_device_mesh(device, (self.tensor,)), styles)
        mesh = init_device_mesh(device, (self.data, self.tensor), mesh_dim_names=("data", "tensor"))
        return _sharded(parallelize_module(model, mesh["tensor"], styles), mesh["data"])


def _styles(model: nn.Module, linears: Mapping[str, str], size: int) -> dict[str, ParallelStyle]:
    """Torch's parallel style of every layer in `linears`.

    Outputs that cannot be split evenly stay DTensors: local tensors do not carry the full number of features.
    """
    cut = [name for name, by in linears.items() if by == "outputs"]
    layers = [m for name, m in model.named_modules() for pattern in cut if fnmatchcase(name, pattern)]
    even = all(layer.out_features % size == 0 for layer in layers if isinstance(layer, nn.Linear))
    by_outputs = ColwiseParallel(use_local_output=even)
    return {name: by_outputs if by == "outputs" else RowwiseParallel() for name, by in linears.items()}
