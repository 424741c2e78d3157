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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.loss import customized_loss_ops
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
        self.bounds: list[int] | None = None
        """Rows of the batch under way at which a process's share begins and ends, W + 1 numbers; None: even shares."""
        self._noted: list[tuple[str, Tensor, float]] = []
        """(layer, [projection, norm, and both of the output whose gradient it is], rounding relative to the norm) of tensors
        that must be equal on all processes, of the backward under way."""

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
        """The slice of the `batch` samples that each process is assigned: contiguous, with lengths that differ by at most 1.

        With `bounds`, the slices between these.
        """
        return self.exchange.features(batch) if self.bounds is None else [slice(*two) for two in pairwise(self.bounds)]

    def divide(self, ids: Tensor | None) -> None:
        """Set `bounds` of the next batch so that all rows of a unit are one process's, and shares as even as that allows.

        Args:
            ids: the unit of each row [B], or of each token [B, T], from 0; −1: of none. None: every row is a unit.
        """
        self.bounds = None
        if ids is None:
            return
        ids, rows = ids.cpu().long(), len(ids)
        row_of = torch.arange(rows).reshape(-1, *[1] * (ids.dim() - 1)).expand(ids.shape)[ids >= 0]
        unit_of = ids[ids >= 0]
        units = int(unit_of.max()) + 1 if len(unit_of) else 0
        first_U = torch.full((units,), rows).scatter_reduce(0, unit_of, row_of, "amin")
        last_U = torch.full((units,), -1).scatter_reduce(0, unit_of, row_of, "amax")
        begun = torch.bincount(first_U + 1, minlength=rows + 2) - torch.bincount(last_U + 1, minlength=rows + 2)
        whole = (begun.cumsum(0)[: rows + 1] == 0).nonzero()[:, 0]  # rows before which no unit is under way
        wanted = torch.arange(self.size + 1, dtype=torch.float64)[:, None] * rows / self.size
        self.bounds = whole[(whole - wanted).abs().argmin(1)].tolist()

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

    @contextmanager
    def comparing_labels(self, told: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Context manager: torch's `loss_parallel`, in which each process takes labels of its own, compares these first.

        `told()` makes a context whose errors the other processes raise too (`SharedRefusals.told`).
        """

        def compared(handler: Any, operation: Any, args: Any, kwargs: Any) -> Any:
            if args[0].device_mesh == self.mesh:
                with told():
                    self.require_same_inputs([args[1]], "labels")
            return handler(operation, args, kwargs)

        tables: Any = customized_loss_ops, DTensor._op_dispatcher._custom_op_handlers  # what is, and is being, entered
        losses = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default
        replaced = [(table, loss, table[loss]) for table in tables for loss in losses if loss in table]
        for table, loss, handler in replaced:
            table[loss] = partial(compared, handler)
        try:
            yield
        finally:
            for table, loss, handler in replaced:
                if loss in table:
                    table[loss] = handler

    def require_same_inputs(self, inputs: Sequence[Tensor], what: str = "inputs") -> None:
        """Raise on all processes if their batches differ, since sharded layers would mix unrelated samples. Collective.

        Compared are the shapes of the tensors and a projection of their values, that of numbers with a fraction to ε^¾ of the
        tensor's norm.

        Args:
            inputs: all tensors that the model is given.
            what: what they are, for the error.

        Raises:
            GramianError: names the first process whose batch differs from that of process 0.
        """
        found = [_projection(full_tensor(t)) for t in inputs if not t.is_meta]
        shapes = [[*t.shape] for t in inputs]
        reports = self.gather_messages([shapes, torch.stack([p for p, _ in found]).tolist() if found else []])
        first_shapes, first_projections = reports[0]
        for rank, (its_shapes, projections) in enumerate(reports):
            same = its_shapes == first_shapes and all(
                abs(projection - of_first) <= allowed * norm
                for (projection, _), (of_first, norm), (_, allowed) in zip(
                    projections, first_projections, found, strict=True
                )
            )
            if not same:
                raise GramianError(
                    f"model: process {rank} of a tensor-parallel group has other {what} than process 0; "
                    "expected the same batch on all processes of the group"
                )

    def note(self, layer: str, t: Tensor, of: Tensor | None = None) -> None:
        """Remember a projection of a tensor that is plain or replicated, for `require_same_noted`. One pass over it.

        `of`: the projection of an output whose gradient `t` is, and which need not be the same if the output is not.
        """
        if not isinstance(t, DTensor) or all(isinstance(placement, Replicate) for placement in t.placements):
            found, rounding = _projection(full_tensor(t))
            self._noted.append((layer, torch.cat([found, torch.zeros_like(found) if of is None else of]), rounding))

    def note_gradient(self, output: Tensor) -> None:
        """Let the backward note the gradient of an output of the model, on which labels of one process alone would show."""
        if output.requires_grad and not isinstance(output, DTensor):
            of, _ = _projection(waited(output))
            output.register_hook(lambda gradient: self.note("", gradient, of))

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
        found_N4 = torch.stack([found.to(noted[0][1].device) for _, found, _ in noted])
        found_N4 = torch.where(found_N4.isfinite(), found_N4, 0.0)  # a sample that is not finite is left out
        most_N4, least_N4 = self.exchange.largest(torch.cat([found_N4, -found_N4])).split(len(noted))
        apart_N4, allowed_N = most_N4 + least_N4, torch.tensor([rounding for *_, rounding in noted]).to(most_N4)
        differs_N = (apart_N4[:, 0] > allowed_N * most_N4[:, 1]) & (apart_N4[:, 2] <= allowed_N * most_N4[:, 3])
        for (layer, *_), differs in zip(noted, differs_N.tolist(), strict=True):
            if differs:
                raise GramianError(
                    f"{layer or 'model'}: its inputs or output gradients differ between processes of a tensor-parallel group, "
                    "and it is not sharded; expected the same batch, labels, dropout and whole weights on all of them, and no "
                    "whole layer on some of the features (one norm for every head)"
                )

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def take(self, t: Tensor, batch: int) -> Tensor:
        """The samples of a tensor [k·B, …] that this process is assigned, with all features. Collective if it is sharded.

        Args:
            t: tensor with k rows per sample, replicated or sharded over the group; [1, …] is all samples' and returned.
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

    def cuts(self, p: Tensor) -> bool:
        """True for a parameter of numbers with a fraction of which the processes of this group have different parts."""
        return self.spreads(p) and _is_shard(p.placements[-1]) and p.is_floating_point()  # type: ignore[attr-defined]

    def sum(self, t: Tensor) -> Tensor:
        """The elementwise sum of `t` over the tensor-parallel group; a new tensor unless the group has one process."""
        return t if self.size == 1 else self.exchange.sum(t)

    def gather_messages(self, message: Any) -> list[Any]:
        """The messages (JSON values) of all processes of the tensor-parallel group, in the order of ranks. Collective."""
        return [message] if self.size == 1 else self.exchange.gather_messages(message)


def _projection(t: Tensor) -> tuple[Tensor, float]:
    """([projection of a tensor on cosines, its norm], the rounding error to allow for relative to the norm); float64."""
    exact = torch.view_as_real(t) if t.is_complex() else t
    flat = exact.detach().double().flatten()
    place = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
    rounding = torch.finfo(exact.dtype).eps ** 0.75 if exact.is_floating_point() else 0.0
    return torch.stack([flat @ torch.cos(0.37 * place), flat.norm()]), rounding


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
