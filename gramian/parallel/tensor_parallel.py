"""Statistics of tensor-parallel layers: the processes that see the same batch divide its samples among them.

Legend: W processes of a tensor-parallel group, B samples of a batch, k rows of a sample.

A statistic over samples needs all features of every sample once. All W processes see the same B samples, so process r computes
the statistics of the samples `shares(B)[r]`: a replicated tensor is sliced, one that is sharded by features is redistributed by
one all-to-all. From then on the W processes are like data-parallel ones: nothing is computed or stored twice.

| placement of a tensor | how this process gets its samples | entries that leave a process |
|---|---|---|
| replicated (input of a column-wise layer, output gradient of a row-wise one) | a slice | 0 |
| sharded by features or by positions | an all-to-all | B/W·(W−1)·n/W for n entries per sample |
| a partial sum | an all-reduce, then a slice | 2·B·n·(W−1)/W |
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import waited
from gramian.parallel.exchange import Exchange


@dataclass(frozen=True)
class SampleAssignment:
    """Which samples a process sees: processes form `size` groups with different samples, and this one is in group `rank`."""

    rank: int
    size: int


class TensorParallel:
    """The group of processes over which the features of this process's layers are sharded; all see the same samples."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Use the process group of a device mesh.

        Args:
            mesh: one-dimensional device mesh of the tensor-parallel processes.
            device: where the model is.
        """
        self.mesh = mesh
        self.exchange = Exchange(mesh.get_group(), device)
        self.rank, self.size = self.exchange.rank, self.exchange.size
        self._noted: list[tuple[str, Tensor, float]] = []
        """(layer, [projection, norm], tolerance) of tensors that must be equal on all processes, of the backward under way."""

    @classmethod
    def of(cls, root: nn.Module) -> "TensorParallel | None":
        """The tensor-parallel group that follows from the placements of a model's parameters; None if there is none.

        Models on one process, in DDP or only in FSDP2 have none. Under FSDP2, the second of two mesh dimensions is the
        tensor-parallel one.

        Raises:
            GramianError: for layers that are sharded over different meshes, or over more than one mesh dimension.
        """
        if not dist.is_initialized():
            return None
        sharded = [(name, p) for name, p in root.named_parameters() if isinstance(p, DTensor)]
        by_fsdp = any(isinstance(module, FSDPModule) for module in root.modules())
        if by_fsdp:
            sharded = [(n, p) for n, p in sharded if p.device_mesh.ndim == 2 and _is_shard(p.placements[0])]
        if not sharded:
            return None
        name, first = sharded[0]
        mesh = first.device_mesh
        for other, p in sharded:
            if p.device_mesh != mesh:
                raise GramianError(
                    f"module: {other} is sharded over another mesh than {name}; expected one mesh for all layers"
                )
        if by_fsdp:
            assert mesh.mesh_dim_names is not None  # fully_shard requires names
            mesh = mesh[mesh.mesh_dim_names[1]]
        if mesh.ndim != 1:
            raise GramianError(
                f"module: {name} is placed as {first.placements}; expected tensor parallelism over one mesh dimension"
            )
        return cls(mesh, first.device)

    # ---- assignment of samples -------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """True for rank 0 of the group, which alone reports values that are equal on all its processes."""
        return self.rank == 0

    def shares(self, batch: int) -> list[slice]:
        """The slice of the `batch` samples that each process is assigned: contiguous, with lengths that differ by at most 1."""
        return self.exchange.features(batch)

    def share(self, batch: int) -> slice:
        """The slice of the `batch` samples that this process is assigned."""
        return self.shares(batch)[self.rank]

    def assignment(self, group: Exchange) -> SampleAssignment:
        """The index of this tensor-parallel group among those in `group`, each of which sees other samples, and their number.

        Args:
            group: all processes that sum their statistics.

        Raises:
            GramianError: if `group` does not consist of complete tensor-parallel groups with evenly spaced ranks.
        """
        ranks = self._ranks_in(group)
        step = ranks[1] - ranks[0] if self.size > 1 else 1
        regular = step > 0 and ranks == list(range(ranks[0], ranks[0] + step * self.size, step))
        if not regular or group.size % (step * self.size):
            raise GramianError(
                f"process_group: the tensor-parallel group is {ranks} in it; expected a mesh laid out row by row"
            )
        number = ranks[0] // (step * self.size) * step + ranks[0] % step
        return SampleAssignment(number, group.size // self.size)

    def _ranks_in(self, group: Exchange) -> list[int]:
        """The ranks of this tensor-parallel group's processes in the larger `group`; GramianError if one is not in it."""
        all_ranks = dist.get_process_group_ranks(group.group)
        members = dist.get_process_group_ranks(self.exchange.group)
        if not set(all_ranks).issuperset(members):
            raise GramianError(
                "process_group: has only some processes of a tensor-parallel group; expected all of them in it"
            )
        return [all_ranks.index(member) for member in members]

    def require_same_inputs(self, first: Tensor) -> None:
        """Raise on all processes if their batches differ, since sharded layers would mix unrelated samples. Collective.

        Compared are the shape of the first input and a projection of its values, the latter to 10⁻³ of the input's norm.

        Args:
            first: the model's first input tensor.

        Raises:
            GramianError: names the first process whose batch differs from that of process 0.
        """
        flat = full_tensor(first).detach().double().flatten()
        place = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
        norm, projection = float(flat.norm()), float(flat @ torch.cos(0.37 * place))
        reports = self.gather_messages([list(first.shape), projection])
        for rank, (shape, other) in enumerate(reports):
            if shape != reports[0][0] or not abs(other - reports[0][1]) <= 1e-3 * norm:
                raise GramianError(
                    f"model: process {rank} of a tensor-parallel group has other inputs than process 0; "
                    "expected the same batch on all processes of the group"
                )

    def note(self, layer: str, t: Tensor) -> None:
        """Remember a projection of a tensor that is plain or replicated, for `require_same_noted`. One pass over it."""
        if isinstance(t, DTensor) and not all(isinstance(placement, Replicate) for placement in t.placements):
            return
        flat = waited(t.to_local() if isinstance(t, DTensor) else t).detach().double().flatten()
        place = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
        found = torch.stack([flat @ torch.cos(0.37 * place), flat.norm()])
        self._noted.append((layer, found, torch.finfo(t.dtype).eps ** 0.75 if t.is_floating_point() else 0.0))

    def forget_noted(self) -> None:
        """Drop what was noted: the backward broke off."""
        self._noted.clear()

    def require_same_noted(self) -> None:
        """Raise on all processes if a tensor that was noted is not the same on all. One all-reduce.

        Compared are projections, to ε^¾ of the tensor's norm.

        Raises:
            GramianError: naming the first layer whose tensors differ.
        """
        noted, self._noted = self._noted, []
        if self.size == 1 or not noted:
            return
        found_N2 = torch.stack([found for _, found, _ in noted])
        found_N2 = torch.where(found_N2.isfinite(), found_N2, 0.0)  # not finite: the sample is left out
        most_N, least_N = self.exchange.largest(torch.cat([found_N2[:, 0], -found_N2[:, 0]])).split(len(noted))
        norms_N = self.exchange.largest(found_N2[:, 1])
        for (layer, *_, tolerance), apart, norm in zip(noted, (most_N + least_N).tolist(), norms_N.tolist(), strict=True):
            if apart > tolerance * norm:
                raise GramianError(
                    f"{layer or 'model'}: its inputs or output gradients differ between processes of a tensor-parallel group, "
                    "and it is not sharded; expected the same batch, labels and dropout on all of them, and no whole layer on "
                    "some of the features (one norm for every head)"
                )

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def take(self, t: Tensor, batch: int) -> Tensor:
        """The samples of a tensor [k·B, …] that this process is assigned, with all features. Collective if it is sharded.

        Args:
            t: tensor with k rows per sample, replicated or sharded over the group; [1, …] is shared by all samples and returned
                in full.
            batch: number of samples B.

        Raises:
            GramianError: if the number of rows is not a multiple of B, or the tensor is sharded over another mesh.
        """
        rows = t.shape[0] if t.dim() else 0
        if rows == 1 and batch != 1:
            return full_tensor(t)
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
                return self.exchange.to_samples(waited(t.to_local()), dim, widths, counts)
        return full_tensor(t)[mine.start * each : mine.stop * each]

    def spreads(self, p: Tensor) -> bool:
        """True if a parameter's placements have a part for this group: what each process sums of it is reduced with them."""
        return isinstance(p, DTensor) and (p.device_mesh.ndim > 1 or p.device_mesh == self.mesh)

    def sum(self, t: Tensor) -> Tensor:
        """The elementwise sum of `t` over the tensor-parallel group; a new tensor unless the group has one process."""
        return t if self.size == 1 else self.exchange.sum(t)

    def gather_messages(self, message: Any) -> list[Any]:
        """The messages (JSON values) of all processes of the tensor-parallel group, in the order of ranks. Collective."""
        return [message] if self.size == 1 else self.exchange.gather_messages(message)


def _is_shard(placement: Any) -> bool:
    """True for the placements that FSDP2 gives a parameter on its own mesh dimension."""
    return isinstance(placement, Shard | _StridedShard)


def full_tensor(t: Tensor) -> Tensor:
    """The full plain tensor of `t`, which may be a sharded DTensor. Collective if it is."""
    if not isinstance(t, DTensor):
        return waited(t)
    if all(isinstance(placement, Replicate) for placement in t.placements):
        return waited(t.to_local())
    return waited(t.full_tensor())
