"""Collectives of one process group: sums, messages, and moves of rows between sharding by tokens and sharding by features.

Legend: W processes of a group, T this process's tokens, N features, n_r of them on process r, K columns.

All processes must call the same methods in the same order with the same `counts`, also those without rows; which collectives
run never depends on a local value. Tensors are copied to the device that the group's backend needs, and results back to the
caller's device. Rows that only move are sent as bytes, so every dtype works.

Bytes that leave this process (`sent`), counted by these models, where one tensor has B bytes:

| collective | model | bytes |
|---|---|---|
| all_reduce | ring: reduce-scatter, then all-gather | ⌊2·B·(W−1)/W⌋ |
| all_gather | this process's tensor, to each other rank | (W−1)·B |
| all_to_all | to each other rank its part | Σ_{d≠rank} T·n_d·itemsize; `to_samples`: Σ_{d≠rank} T_d·n·itemsize |
| broadcast | from the source, to each other rank | (W−1)·B |
"""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gramian.core.errors import GramianError

_all_gather: Any = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the old name warns since torch 2.13


class Meter:
    """Bytes sent by this process and seconds spent in collectives, by their names; each one synchronises the device."""

    def __init__(self) -> None:
        """Start with no bytes and no seconds."""
        self.sent: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def collective(self, kind: str, leaving: int, device: torch.device) -> Iterator[None]:
        """Context manager that times one collective and counts its bytes.

        Args:
            kind: name of the collective, such as "all_reduce".
            leaving: bytes that this process sends.
            device: device that is synchronised before and after.
        """
        started = _now(device)
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + _now(device) - started
        self.sent[kind] = self.sent.get(kind, 0) + leaving


class Exchange:
    """The collectives of one group of two or more processes; `sent` counts the bytes that left this process, by collective."""

    meter: ClassVar[Meter | None] = None
    """The meter of all exchanges of this process while `metered` is active; None: nothing is measured."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Look up this process's rank and the device that the backend needs.

        Args:
            group: a process group that this process belongs to; None: the default one.
            device: where the caller's tensors usually are.
        """
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.sent = {"all_reduce": 0, "all_gather": 0, "all_to_all": 0}
        self._wire = _device_for(group, device)

    def features(self, n: int) -> list[slice]:
        """The slice of n features that each rank has: contiguous, with lengths that differ by at most 1, longer ones first."""
        each, more = divmod(n, self.size)
        bounds = [r * each + min(r, more) for r in range(self.size + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    # ---- sums ------------------------------------------------------------------------------------------------------

    def sum(self, t: Tensor) -> Tensor:
        """The elementwise sum of `t` over processes, a new tensor of the same dtype; half precision is summed in float32."""
        wide = t.dtype if t.dtype.itemsize > 2 else torch.promote_types(t.dtype, torch.float32)
        return self._all_reduce(t, wide, dist.ReduceOp.SUM).to(t.dtype)

    def largest(self, t: Tensor) -> Tensor:
        """The elementwise maximum of `t` over processes, a new tensor; undefined where a value is NaN."""
        return self._all_reduce(t, t.dtype, dist.ReduceOp.MAX)

    def _all_reduce(self, t: Tensor, dtype: torch.dtype, op: Any) -> Tensor:
        total = torch.empty(t.shape, dtype=dtype, device=self._wire).copy_(t.detach())
        with self._sending("all_reduce", 2 * total.nbytes * (self.size - 1) // self.size):
            dist.all_reduce(total, op=op, group=self.group)
        return total.to(t.device)

    # ---- moves -----------------------------------------------------------------------------------------------------

    def gather_messages(self, message: Any) -> list[Any]:
        """The messages of all processes, in rank order. Two all-gathers: of lengths, and of JSON texts padded to the longest.

        Args:
            message: any JSON value; tuples arrive as lists.
        """
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        lengths = self._gather_even(torch.tensor([len(text)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = self._gather_even(padded).view(self.size, -1)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(texts, lengths, strict=True)]

    def gather_rows(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        """The rows of all processes, [ΣT, N], in rank order. One all-gather; if `counts` differ, a broadcast per process.

        Args:
            rows_TN: this process's rows; [0, N] in the same dtype if it has none.
            counts: number of rows of each process.

        Raises:
            GramianError: if `counts` does not fit this process's rows.
        """
        self._check(rows_TN, counts)
        if len({*counts}) == 1:
            return self._gather_even(rows_TN)
        rows = torch.empty(sum(counts), *rows_TN.shape[1:], dtype=rows_TN.dtype, device=self._wire)
        pieces = rows.split(counts)
        pieces[self.rank].copy_(rows_TN.detach())
        with self._sending("all_gather", (self.size - 1) * rows_TN.nbytes):
            broadcasts = [
                dist.broadcast(_bytes(piece), group=self.group, group_src=r, async_op=True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
            for broadcast in broadcasts:
                broadcast.wait()
        return rows.to(rows_TN.device)

    def reshard(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        """From sharding by tokens to sharding by features; returns this process's n_r features of all ΣT tokens, [ΣT, n_r].

        One all-to-all. Process r receives the features `features(N)[r]`.

        Args:
            rows_TN: this process's tokens with all features; [0, N] in the same dtype if it has none.
            counts: number of tokens of each process.

        Raises:
            GramianError: if `counts` does not fit this process's rows.
        """
        self._check(rows_TN, counts)
        tokens, n = rows_TN.shape
        widths = [part.stop - part.start for part in self.features(n)]
        item = rows_TN.dtype.itemsize
        send = torch.cat([part.flatten() for part in rows_TN.detach().to(self._wire).split(widths, dim=1)])
        received = torch.empty(sum(counts), widths[self.rank], dtype=rows_TN.dtype, device=self._wire)
        leaving = [tokens * width * item for width in widths]
        arriving = [count * widths[self.rank] * item for count in counts]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(received), _bytes(send), arriving, leaving, group=self.group)
        return received.to(rows_TN.device)

    def to_samples(self, part: Tensor, dim: int, widths: list[int], counts: list[int]) -> Tensor:
        """From sharding by features to sharding by samples; returns this process's rows with all features. One all-to-all.

        Args:
            part: all rows, [Σ counts, …], with only this process's features along axis `dim`. The first counts[0] rows go to
                rank 0, the next counts[1] to rank 1, and so on.
            dim: the axis that is sharded, not 0.
            widths: number of features of each process.
            counts: number of rows that each process receives.
        """
        entries = part.numel() // max(len(part), 1) if part.numel() else 0
        send = part.detach().to(self._wire).contiguous()
        mine, item = counts[self.rank], part.dtype.itemsize
        shapes = [(mine, *part.shape[1:dim], width, *part.shape[dim + 1 :]) for width in widths]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = torch.empty(sum(sizes), dtype=part.dtype, device=self._wire)
        leaving = [count * entries * item for count in counts]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(received), _bytes(send), [n * item for n in sizes], leaving, group=self.group)
        pieces = [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]
        return torch.cat(pieces, dim=dim).to(part.device)

    def redistribute_rows(self, rows_TN: Tensor, before: list[int], after: list[int]) -> Tensor:
        """Move rows between processes to new counts per process, order preserved; returns this process's rows. One all-to-all.

        If the counts do not change, `rows_TN` itself is returned.

        Args:
            rows_TN: this process's rows.
            before: number of rows of each process now.
            after: number of rows of each process afterwards, with the same total.

        Raises:
            GramianError: if `before` does not fit this process's rows.
        """
        self._check(rows_TN, before)
        if before == after:
            return rows_TN
        send = rows_TN.detach().to(self._wire).contiguous()
        received = torch.empty(after[self.rank], *rows_TN.shape[1:], dtype=rows_TN.dtype, device=self._wire)
        size = rows_TN.shape[1:].numel() * rows_TN.dtype.itemsize
        leaving = [common * size for common in _common(before, after, self.rank)]
        arriving = [common * size for common in _common(after, before, self.rank)]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(received), _bytes(send), arriving, leaving, group=self.group)
        return received.to(rows_TN.device)

    def gather_features(self, part_nK: Tensor, n: int) -> Tensor:
        """The full tensor [n, K] on every process, from the rows `features(n)[rank]` of each. One all-gather of ⌈n/W⌉ rows."""
        each, more = divmod(n, self.size)
        if not more:
            return self._gather_even(part_nK)
        piece = part_nK.new_zeros(each + 1, *part_nK.shape[1:])
        piece[: len(part_nK)] = part_nK
        padded = self._gather_even(piece)
        pieces = padded.split(each + 1)
        return torch.cat([padded[: more * (each + 1)], *(piece[:each] for piece in pieces[more:])])

    def broadcast(self, t: Tensor | None, shape: Sequence[int], like: Tensor, source: int) -> Tensor:
        """Send one process's tensor to all processes; returns it on each.

        Args:
            t: the tensor; ignored, and may be None, on all ranks but `source`.
            shape: the shape of the tensor, the same on all processes.
            like: any tensor with the dtype of the tensor, on the device where the result is wanted.
            source: rank in the group that has the tensor.
        """
        received = torch.empty(tuple(shape), dtype=like.dtype, device=self._wire)
        leaving = 0
        if t is not None and source == self.rank:
            received.copy_(t.detach())
            leaving = (self.size - 1) * received.nbytes
        if received.numel():
            with self._sending("broadcast", leaving):
                dist.broadcast(_bytes(received), group=self.group, group_src=source)
        return received.to(like.device)

    def _gather_even(self, piece: Tensor) -> Tensor:
        """The tensors of all processes, which have the same shape, concatenated along dimension 0. One all-gather."""
        joined = torch.empty(self.size * len(piece), *piece.shape[1:], dtype=piece.dtype, device=self._wire)
        if piece.numel():
            send = piece.detach().to(self._wire).contiguous()
            with self._sending("all_gather", (self.size - 1) * piece.nbytes):
                _all_gather(_bytes(joined), _bytes(send), group=self.group)
        return joined.to(piece.device)

    @contextmanager
    def _sending(self, kind: str, leaving: int) -> Iterator[None]:
        """Context manager around the collective named `kind`: adds `leaving`, the bytes sent, to `sent` and to the meter."""
        if self.meter is None:
            yield
        else:
            with self.meter.collective(kind, leaving, self._wire):
                yield
        self.sent[kind] = self.sent.get(kind, 0) + leaving

    def _check(self, rows_TN: Tensor, counts: list[int]) -> None:
        if len(counts) != self.size or len(rows_TN) != counts[self.rank]:
            raise GramianError(f"counts: {len(rows_TN)} rows on process {self.rank} of {self.size}; expected {counts}")


@contextmanager
def metered() -> Iterator[Meter]:
    """Context manager that yields a `Meter` of all exchanges of this process; every collective then synchronises the device."""
    Exchange.meter = meter = Meter()
    try:
        yield meter
    finally:
        Exchange.meter = None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def exchange_of(group: Any, device: torch.device) -> Exchange | None:
    """The `Exchange` of a process group; None if the group has one process or torch.distributed is not initialised.

    Args:
        group: a process group; None: the default one, if there is one.
        device: where the caller's tensors usually are.

    Raises:
        GramianError: if this process does not belong to the group, or a group is given without torch.distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise GramianError("process_group: torch.distributed is not initialised; expected None")
        return None
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise GramianError(f"process_group: got {group!r}; expected a group that this process belongs to, or None")
    return Exchange(group, device) if dist.get_world_size(group) > 1 else None


def _device_for(group: Any, device: torch.device) -> torch.device:
    """Device that the group's collectives need: `device` if its backend is not gloo, else the CPU if the group supports it."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if backends.get(device.type, "gloo") != "gloo":
        return device
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def _common(mine: list[int], theirs: list[int], rank: int) -> list[int]:
    """For each process p, the number of rows that `rank` has under the row counts `mine` and p under the counts `theirs`."""
    first, last = sum(mine[:rank]), sum(mine[: rank + 1])
    bounds = [0, *itertools.accumulate(theirs)]
    return [max(0, min(last, stop) - max(first, start)) for start, stop in pairwise(bounds)]


def _bytes(contiguous: Tensor) -> Tensor:
    """A contiguous tensor's memory as a uint8 tensor [number of bytes]."""
    return contiguous.view(-1).view(torch.uint8)
