"""Tensor parallelism: processes that hold one model between them, see the same samples, and have parts of the features.

Legend: W processes of a tensor-parallel group, B samples of a batch, b of them this process's share, k rows of a sample.

A statistic over samples wants whole features of every sample once. All W processes have the same B samples, so process r takes
the samples `shares(B)[r]` for its own: a tensor that is whole on all of them is cut, one of which each has some features is
exchanged by one all-to-all. From there on the group is W data-parallel processes: nothing is computed or held twice.

| a side that is | becomes this process's samples by | entries that leave a process |
|---|---|---|
| whole (input of a column-wise layer, output gradient of a row-wise one) | a cut | 0 |
| spread by features or by positions | an all-to-all | B/W·(W−1)·n/W for n entries a sample |
| a sum that is not added up yet | an all-reduce, then a cut | 2·B·n·(W−1)/W |
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gramian.core.errors import GramianError
from gramian.parallel.exchange import Exchange


@dataclass(frozen=True)
class Dealt:
    """How samples are dealt out to processes: this one is number `rank` of `size` that have different samples."""

    rank: int
    size: int


class TensorParallel:
    """The processes that hold this process's model between them."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Remember them.

        Args:
            mesh: one-dimensional.
            device: where the model is.
        """
        self.mesh = mesh
        self.exchange = Exchange(mesh.get_group(), device)
        self.rank, self.size = self.exchange.rank, self.exchange.size

    @classmethod
    def of(cls, root: nn.Module) -> "TensorParallel | None":
        """How the user spread the model; None: its layers are whole (one process, DDP, FSDP2 alone).

        FSDP2 puts its own mesh dimension in front of that of tensor parallelism.

        Raises:
            GramianError: for layers that are spread over different processes, or over more than one mesh dimension.
        """
        spread = [(name, p) for name, p in root.named_parameters() if isinstance(p, DTensor)]
        by_fsdp = any(isinstance(module, FSDPModule) for module in root.modules())
        if by_fsdp:
            spread = [(n, p) for n, p in spread if p.device_mesh.ndim == 2 and _is_cut(p.placements[0])]
        if not spread:
            return None
        name, first = spread[0]
        mesh = first.device_mesh
        for other, p in spread:
            if p.device_mesh != mesh:
                raise GramianError(
                    f"module: {other} is spread over another mesh than {name}; expected one for all layers"
                )
        if by_fsdp:
            assert mesh.mesh_dim_names is not None  # fully_shard wants names
            mesh = mesh[mesh.mesh_dim_names[1]]
        if mesh.ndim != 1:
            raise GramianError(
                f"module: {name} is placed as {first.placements}; expected tensor parallelism over one mesh dimension"
            )
        return cls(mesh, first.device)

    # ---- who has which samples -------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """True for the one process of the group that speaks for all where they would say the same."""
        return self.rank == 0

    def shares(self, batch: int) -> list[slice]:
        """The samples of each process: contiguous, even up to one."""
        return self.exchange.features(batch)

    def share(self, batch: int) -> slice:
        """This process's samples."""
        return self.shares(batch)[self.rank]

    def dealt(self, others: Exchange) -> Dealt:
        """How a group of whole tensor-parallel groups deals samples out: one number for each of those.

        Args:
            others: the processes that join their sums.

        Raises:
            GramianError: if it is no such group.
        """
        ranks = self._places(others)
        step = ranks[1] - ranks[0] if self.size > 1 else 1
        regular = step > 0 and ranks == list(range(ranks[0], ranks[0] + step * self.size, step))
        if not regular or others.size % (step * self.size):
            raise GramianError(
                f"process_group: the tensor-parallel group is {ranks} in it; expected a mesh laid out row by row"
            )
        number = ranks[0] // (step * self.size) * step + ranks[0] % step
        return Dealt(number, others.size // self.size)

    def _places(self, others: Exchange) -> list[int]:
        """Where the processes of this tensor-parallel group stand among the others; all must be there."""
        among = dist.get_process_group_ranks(others.group)
        members = dist.get_process_group_ranks(self.exchange.group)
        if not set(among).issuperset(members):
            raise GramianError(
                "process_group: has only some processes of a tensor-parallel group; expected all of them in it"
            )
        return [among.index(member) for member in members]

    def refuse_other_inputs(self, first: Tensor) -> None:
        """Raise, on all processes, if they do not see the same batch: their layers would mix unrelated samples. Collective.

        Args:
            first: the model's first tensor.

        Raises:
            GramianError: naming the process.
        """
        flat = whole(first).detach().double().flatten()
        place = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
        norm, projection = float(flat.norm()), float(flat @ torch.cos(0.37 * place))
        said = self.tell([list(first.shape), projection])
        for rank, (shape, other) in enumerate(said):
            if shape != said[0][0] or not abs(other - said[0][1]) <= 1e-3 * norm:
                raise GramianError(
                    f"model: process {rank} of a tensor-parallel group has other inputs than process 0; "
                    "expected the same batch on all processes of the group"
                )

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def take(self, t: Tensor, batch: int) -> Tensor:
        """This process's samples of [k·B, …], whole in every other axis. Collective if the tensor is spread.

        Args:
            t: the same on all processes, or spread over them; [1, …] belongs to all samples and stays.
            batch: B.

        Raises:
            GramianError: for rows that cannot be dealt out.
        """
        rows = t.shape[0] if t.dim() else 0
        if rows == 1 and batch != 1:
            return whole(t)
        if not t.dim() or (rows % batch if batch else rows):
            raise GramianError(
                f"saw {rows} rows for a batch of {batch}; expected {batch}, 1 (shared by all samples) or a multiple of {batch}"
            )
        each = rows // batch if batch else 1
        mine = self.share(batch)
        placement = t.placements[0] if isinstance(t, DTensor) else None
        if isinstance(placement, Shard) and self.size > 1:
            assert isinstance(t, DTensor)
            if t.device_mesh != self.mesh:
                raise GramianError(f"saw a tensor on {t.device_mesh}; expected {self.mesh}, as the parameters")
            dim = placement.dim % t.dim()
            if dim:
                widths = [
                    int(Shard.local_shard_size_and_offset(t.shape[dim], self.size, r)[0]) for r in range(self.size)
                ]
                counts = [(share.stop - share.start) * each for share in self.shares(batch)]
                return self.exchange.to_samples(_landed(t.to_local()), dim, widths, counts)
        return whole(t)[mine.start * each : mine.stop * each]

    def sum(self, t: Tensor) -> Tensor:
        """Σ over the group, a new tensor."""
        return t if self.size == 1 else self.exchange.sum(t)

    def tell(self, message: Any) -> list[Any]:
        """What each process says, as `Exchange.tell`."""
        return [message] if self.size == 1 else self.exchange.tell(message)


def _is_cut(placement: Any) -> bool:
    """True for the placement that FSDP2 gives a parameter, on its own mesh dimension."""
    return isinstance(placement, Shard | _StridedShard)


def whole(t: Tensor) -> Tensor:
    """All of a tensor that may be spread, as a plain one. Collective if it is."""
    if not isinstance(t, DTensor):
        return _landed(t)
    if all(isinstance(placement, Replicate) for placement in t.placements):
        return _landed(t.to_local())
    return _landed(t.full_tensor())


def _landed(t: Tensor) -> Tensor:
    """Waited for, if a collective still writes to it."""
    if not isinstance(t, AsyncCollectiveTensor):
        return t
    found: Any = t.wait()
    assert isinstance(found, Tensor)
    return found
