"""The process grid: rank and size of the group of processes that train one model on different samples.

`ProcessGrid` is made by `gramian.parallel.world.world` from torchrun's environment, or by `model_grid.grid_of` from the way a
model is wrapped. Tensor parallelism has a process group of its own (`gramian.parallel.tensor_parallel`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class DataParallelKind(StrEnum):
    """How the parameters of one model are shared by processes with different samples. The values are written to run records."""

    SINGLE = "one"
    """One process that has all parameters."""
    DDP = "ddp"
    """Every process has all parameters, and gradients are all-reduced."""
    FSDP2 = "fsdp2"
    """Parameters, gradients and optimizer state are sharded along dimension 0."""
    TENSOR = "tp"
    """Layers are sharded over processes that see the same samples."""


@dataclass(frozen=True)
class ProcessGrid:
    """This process's rank and device, the number of processes (`size`), and how they share the model (`kind`)."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    kind: DataParallelKind = DataParallelKind.SINGLE
    store: Any = None
    """Key-value store in which a process that fails reports why; None: nothing is reported, and `wait` does not wait."""
    group: Any = None
    """The process group of all processes of the grid; None: the default one."""

    tensor: int = 1
    """Number of processes that see the same samples, because they share tensor-parallel layers."""
    data_rank: int | None = None
    """Number of this process's group among those with other samples; None: `rank`, each process has samples of its own."""

    @property
    def data(self) -> tuple[int, int]:
        """(number of this process, or of its tensor-parallel group, among those with other samples; how many these are)."""
        return self.rank if self.data_rank is None else self.data_rank, self.size // self.tensor

    @property
    def uses_ddp(self) -> bool:
        """True if every process has all parameters and gradients are all-reduced."""
        return self.kind == DataParallelKind.DDP

    @property
    def uses_fsdp2(self) -> bool:
        """True if parameters, gradients and optimizer state are sharded by FSDP2."""
        return self.kind == DataParallelKind.FSDP2

    @property
    def spreads(self) -> bool:
        """True if layers are tensor parallel, so that several processes see the same samples."""
        return self.tensor > 1 or self.kind == DataParallelKind.TENSOR

    @property
    def shards(self) -> bool:
        """True if processes store different parts of the parameters."""
        return self.kind in (DataParallelKind.FSDP2, DataParallelKind.TENSOR)

    @property
    def label(self) -> str:
        """A short description such as "DDP over 4" (processes); "" for a single process."""
        if self.kind == DataParallelKind.SINGLE:
            return ""
        by_data = [] if self.kind == DataParallelKind.TENSOR else [f"{self.kind.upper()} over {self.data[1]}"]
        return " × ".join([*by_data, f"tensor parallel over {self.tensor}"] if self.spreads else by_data)

    # ---- failures and waiting ----------------------------------------------------------------------------------------

    def first_failure(self, mine: str) -> str:
        """Report this process's failure message `mine` in the store; returns the first message that any process reported.

        Of several processes, each reports "process R: `mine`". If the store cannot be reached, this report is returned; without
        a store, `mine`.
        """
        if self.store is None:
            return mine
        report = mine if self.size == 1 else f"process {self.rank}: {mine}"
        try:
            return bytes(self.store.compare_set("failure", "", report)).decode()
        except RuntimeError:  # the process that hosts the store has exited
            return report

    def wait(self) -> None:
        """Barrier over all processes, an error if one of them has exited; nothing happens without a store."""
        if self.store is not None:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def sum_(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place, and return them. One all-reduce."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def start_sum(self, t: Tensor) -> Any:
        """Start an all-reduce (sum) of `t` in place; returns the handle to `wait()` on, or None if there is one process."""
        return None if self.size == 1 else dist.all_reduce(t, group=self.group, async_op=True)

    def most(self, value: float) -> float:
        """The maximum of `value` over all processes, the same on each. One all-reduce."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return float(values)

    def differing(self, values: Mapping[str, int], device: torch.device) -> str | None:
        """The first name in {name: number} whose number differs between processes; None if all agree. One all-reduce.

        All processes pass the same names in the same order; `device`: where the numbers are reduced.
        """
        if self.size == 1:
            return None
        numbers = list(values.values())
        mine = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device=device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = mine[: len(numbers)].tolist(), (-mine[len(numbers) :]).tolist()
        return next((n for n, high, low in zip(values, highest, lowest, strict=True) if high != low), None)

    def from_first(self, data: bytes, device: torch.device) -> bytes:
        """Return the `data` of rank 0, which must have the same length on every process. One broadcast, on `device`."""
        if self.size == 1:
            return data
        t = torch.tensor(list(data), dtype=torch.uint8, device=device)
        dist.broadcast(t, group=self.group, group_src=0)
        return bytes(t.cpu().tolist())


ONE_PROCESS = ProcessGrid()


def ddp_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module around a model, also inside torch.compile's wrappers; None if there is none."""
    inner: nn.Module | None = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel):
            return inner
        inner = inner._modules.get("_orig_mod")
    return None
