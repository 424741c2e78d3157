"""Collectives of curvature: sums, and rows that move between processes which hold tokens and processes which hold features.

Legend: W processes of a group, T this process's tokens, N features, n_r of them on process r, K columns.

All processes call the same methods in the same order with the same `counts`, also those that hold nothing; nothing is decided
here that is not the same everywhere. Tensors go to the device that the group's backend wants and come back to their own; what
only moves travels as bytes, so every dtype does.

Bytes that leave this process (`sent`), with B for those of one tensor:

| kind | model | bytes |
|---|---|---|
| all_reduce | ring: reduce-scatter, then all-gather | ⌊2·B·(W−1)/W⌋ |
| all_gather | its own piece, to each of the others | (W−1)·B of the piece |
| all_to_all | to each of the others what is for it | Σ_{d≠rank} T·n_d·itemsize; `to_samples`: Σ_{d≠rank} T_d·n·itemsize |
| broadcast | from the one that has it, to each of the others | (W−1)·B |
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
    """What collectives of this process sent and how long they took, waiting for the device around each."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.sent: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def collective(self, kind: str, leaving: int, device: torch.device) -> Iterator[None]:
        """Measure one."""
        started = _now(device)
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + _now(device) - started
        self.sent[kind] = self.sent.get(kind, 0) + leaving


class Exchange:
    """One group of more than one process."""

    meter: ClassVar[Meter | None] = None
    """Measures all exchanges of this process while it is set (`metered`)."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Remember who is in it.

        Args:
            group: a process group that this process belongs to; None: the default one.
            device: where tensors mostly are.
        """
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.sent = {"all_reduce": 0, "all_gather": 0, "all_to_all": 0}
        self._wire = _device_for(group, device)

    def features(self, n: int) -> list[slice]:
        """Who holds which of n features: contiguous, even up to one, those with one more first."""
        each, more = divmod(n, self.size)
        bounds = [r * each + min(r, more) for r in range(self.size + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    # ---- sums ------------------------------------------------------------------------------------------------------

    def sum(self, t: Tensor) -> Tensor:
        """Σ over processes, a new tensor like this one. Half precision is added up in float32."""
        wide = t.dtype if t.dtype.itemsize > 2 else torch.promote_types(t.dtype, torch.float32)
        return self._all_reduce(t, wide, dist.ReduceOp.SUM).to(t.dtype)

    def largest(self, t: Tensor) -> Tensor:
        """The largest over processes, entry by entry, a new tensor. NaN: of no fixed outcome."""
        return self._all_reduce(t, t.dtype, dist.ReduceOp.MAX)

    def _all_reduce(self, t: Tensor, dtype: torch.dtype, op: Any) -> Tensor:
        total = torch.empty(t.shape, dtype=dtype, device=self._wire).copy_(t.detach())
        with self._sending("all_reduce", 2 * total.nbytes * (self.size - 1) // self.size):
            dist.all_reduce(total, op=op, group=self.group)
        return total.to(t.device)

    # ---- moves -----------------------------------------------------------------------------------------------------

    def tell(self, message: Any) -> list[Any]:
        """What each process says, in the order of ranks. Two all-gathers: of lengths, of texts padded to the longest.

        Args:
            message: what JSON can say (tuples arrive as lists, numbers as they are).
        """
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        lengths = self._gather_even(torch.tensor([len(text)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = self._gather_even(padded).view(self.size, -1)
        return [json.loads(bytes(said[:length].tolist())) for said, length in zip(texts, lengths, strict=True)]

    def gather_rows(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        """All rows, [ΣT, N], in the order of ranks. One all-gather; where counts differ, one broadcast of each piece.

        Args:
            rows_TN: this process's rows; [0, N] in the same dtype where it has none.
            counts: rows of each process.
        """
        self._check(rows_TN, counts)
        if len({*counts}) == 1:
            return self._gather_even(rows_TN)
        whole = torch.empty(sum(counts), *rows_TN.shape[1:], dtype=rows_TN.dtype, device=self._wire)
        pieces = whole.split(counts)
        pieces[self.rank].copy_(rows_TN.detach())
        with self._sending("all_gather", (self.size - 1) * rows_TN.nbytes):
            broadcasts = [
                dist.broadcast(_bytes(piece), group=self.group, group_src=r, async_op=True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
            for broadcast in broadcasts:
                broadcast.wait()
        return whole.to(rows_TN.device)

    def reshard(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        """This process's features of all tokens, [ΣT, n_r], tokens in the order of ranks. One all-to-all.

        Args:
            rows_TN: this process's tokens with all features; [0, N] in the same dtype where it has none.
            counts: tokens of each process.
        """
        self._check(rows_TN, counts)
        tokens, n = rows_TN.shape
        widths = [part.stop - part.start for part in self.features(n)]
        item = rows_TN.dtype.itemsize
        given = torch.cat([part.flatten() for part in rows_TN.detach().to(self._wire).split(widths, dim=1)])
        taken = torch.empty(sum(counts), widths[self.rank], dtype=rows_TN.dtype, device=self._wire)
        leaving = [tokens * width * item for width in widths]
        arriving = [count * widths[self.rank] * item for count in counts]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(taken), _bytes(given), arriving, leaving, group=self.group)
        return taken.to(rows_TN.device)

    def to_samples(self, part: Tensor, dim: int, widths: list[int], counts: list[int]) -> Tensor:
        """This process's rows with all features, from its features of all rows: `reshard` the other way. One all-to-all.

        Args:
            part: [Σ rows, …] with this process's features along `dim`; rows in the order of ranks.
            dim: the axis that is spread, not 0.
            widths: features of each process.
            counts: rows that each process takes.
        """
        entries = part.numel() // max(len(part), 1) if part.numel() else 0
        given = part.detach().to(self._wire).contiguous()
        mine, item = counts[self.rank], part.dtype.itemsize
        shapes = [(mine, *part.shape[1:dim], width, *part.shape[dim + 1 :]) for width in widths]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        taken = torch.empty(sum(sizes), dtype=part.dtype, device=self._wire)
        leaving = [count * entries * item for count in counts]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(taken), _bytes(given), [n * item for n in sizes], leaving, group=self.group)
        pieces = [piece.view(shape) for piece, shape in zip(taken.split(sizes), shapes, strict=True)]
        return torch.cat(pieces, dim=dim).to(part.device)

    def deal_rows(self, rows_TN: Tensor, before: list[int], after: list[int]) -> Tensor:
        """Rows that lie one way over the processes, in the order of ranks, another way. One all-to-all of what changes hands.

        Args:
            rows_TN: this process's rows.
            before: rows of each process.
            after: rows that each process gets, as many in all.
        """
        self._check(rows_TN, before)
        if before == after:
            return rows_TN
        given = rows_TN.detach().to(self._wire).contiguous()
        taken = torch.empty(after[self.rank], *rows_TN.shape[1:], dtype=rows_TN.dtype, device=self._wire)
        size = rows_TN.shape[1:].numel() * rows_TN.dtype.itemsize
        leaving = [common * size for common in _common(before, after, self.rank)]
        arriving = [common * size for common in _common(after, before, self.rank)]
        with self._sending("all_to_all", sum(leaving) - leaving[self.rank]):
            dist.all_to_all_single(_bytes(taken), _bytes(given), arriving, leaving, group=self.group)
        return taken.to(rows_TN.device)

    def gather_features(self, part_nK: Tensor, n: int) -> Tensor:
        """The whole [n, K] of each process's rows `features(n)[rank]`. One all-gather of pieces of ⌈n/W⌉ rows."""
        each, more = divmod(n, self.size)
        if not more:
            return self._gather_even(part_nK)
        piece = part_nK.new_zeros(each + 1, *part_nK.shape[1:])
        piece[: len(part_nK)] = part_nK
        whole = self._gather_even(piece)
        pieces = whole.split(each + 1)
        return torch.cat([whole[: more * (each + 1)], *(piece[:each] for piece in pieces[more:])])

    def hand(self, t: Tensor | None, shape: Sequence[int], like: Tensor, source: int) -> Tensor:
        """What one process has, on all of them. One broadcast.

        Args:
            t: the tensor; read on the process that has it.
            shape: its shape, the same everywhere.
            like: of its dtype, on the device where it is wanted.
            source: the process that has it.
        """
        whole = torch.empty(tuple(shape), dtype=like.dtype, device=self._wire)
        leaving = 0
        if t is not None and source == self.rank:
            whole.copy_(t.detach())
            leaving = (self.size - 1) * whole.nbytes
        if whole.numel():
            with self._sending("broadcast", leaving):
                dist.broadcast(_bytes(whole), group=self.group, group_src=source)
        return whole.to(like.device)

    def _gather_even(self, piece: Tensor) -> Tensor:
        """Pieces of one shape, joined along dim 0."""
        whole = torch.empty(self.size * len(piece), *piece.shape[1:], dtype=piece.dtype, device=self._wire)
        if piece.numel():
            given = piece.detach().to(self._wire).contiguous()
            with self._sending("all_gather", (self.size - 1) * piece.nbytes):
                _all_gather(_bytes(whole), _bytes(given), group=self.group)
        return whole.to(piece.device)

    @contextmanager
    def _sending(self, kind: str, leaving: int) -> Iterator[None]:
        """Count the bytes that leave this process."""
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
    """Measure what this process exchanges inside the block: for profiles, since every collective then waits for the device."""
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
    """What joins this process with the others now.

    Args:
        group: a process group; None: the default one, if there is one.
        device: where tensors mostly are.

    Returns:
        None if there is one process only.

    Raises:
        GramianError: if this process does not belong to the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise GramianError("process_group: torch.distributed is not initialised; expected None")
        return None
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise GramianError(f"process_group: got {group!r}; expected a group that this process belongs to, or None")
    return Exchange(group, device) if dist.get_world_size(group) > 1 else None


def _device_for(group: Any, device: torch.device) -> torch.device:
    """Where the group's backend wants tensors: on this device if it serves it, and on the CPU for gloo."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if backends.get(device.type, "gloo") != "gloo":
        return device
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def _common(mine: list[int], theirs: list[int], rank: int) -> list[int]:
    """Rows that one process has in one cut and each process in another."""
    first, last = sum(mine[:rank]), sum(mine[: rank + 1])
    bounds = [0, *itertools.accumulate(theirs)]
    return [max(0, min(last, stop) - max(first, start)) for start, stop in pairwise(bounds)]


def _bytes(contiguous: Tensor) -> Tensor:
    """The same memory, [bytes]."""
    return contiguous.view(-1).view(torch.uint8)
