"""Copies of a run's state in host memory, for rollbacks and for the thread that writes checkpoints.

The state is `tensors`, flat names to tensors (DTensors under FSDP2), and `facts`, plain values. A copy has this process's own
part of every tensor; nothing is communicated.
"""

import json
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.eigendecomposition import free_bytes
from gramian.plan.host_memory import packed
from gramian.train.state.tensor_parts import Part, parts_of

STAGED_SHARE = 0.25
"""Fraction of a device's free memory; a state of at most that size is first copied on the device, then to the host."""


@dataclass(frozen=True, eq=False)
class Copied:
    """Tensors of a run after `step` steps, being copied to host memory, which is reused when nothing refers to the copy."""

    step: int
    buffers: dict[str, Part] = field(repr=False)
    """The host copies {name: part}, which may not have arrived yet; the property `parts` waits for them."""
    arrivals: tuple[torch.cuda.Event, ...] = field(repr=False)

    @property
    def parts(self) -> dict[str, Part]:
        """The host copies {name: part}, after waiting until all have arrived."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return self.buffers


@dataclass(frozen=True, eq=False)
class Snapshot(Copied):
    """The whole state of a run after `step` steps: tensors in host memory, and facts (JSON values)."""

    facts_text: str = field(repr=False)
    """The facts as JSON text, so that a rollback gets what a resume from disk would get."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts (plain values of the state), parsed anew from JSON at every call."""
        facts: dict[str, Any] = json.loads(self.facts_text)
        return facts

    @property
    def sharded(self) -> bool:
        """Whether tensors of the state are divided among processes; the same on all of them."""
        return any(part.extent.sharded for part in self.buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshot's tensors in this process's host memory."""
        return sum(part.local.nbytes for part in self.buffers.values())


class Snapshots:
    """The newest few snapshots (host copies) of a run's state.

    One copy costs the state's local bytes in host memory, in a few large pieces, pinned for tensors of a GPU. The host does not
    wait for it: steady tensors, such as weights, are copied on a side stream during the next forward and backward, and code
    that changes them calls `settle` before. That waits for the transfer, or, if the device has room, only for a copy on the
    device, which takes a hundredth of the time. Memory of released copies is used again: at most `keep` snapshots and an older
    one in the checkpoint writer exist, so `keep` + 1 copies are allocated (`gramian.plan.host_memory`).

    Args:
        keep: number of snapshots; one more drops the oldest first.

    Example:
        >>> snapshots = Snapshots(keep=2)
        >>> snapshots.take(100, {"w": torch.zeros(3)}, {"step": 100}).facts
        {'step': 100}
    """

    def __init__(self, keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise GramianError(f"keep: {keep!r}; expected an integer of at least 1")
        self.keep = keep
        self._ring: list[Snapshot] = []
        self._free: dict[_Shape, list[list[_Piece]]] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._unsettled: dict[torch.device, torch.cuda.Event] = {}

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def steps(self) -> list[int]:
        """Step numbers of the snapshots, oldest first."""
        return [snapshot.step for snapshot in self._ring]

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot; there must be at least one."""
        return self._ring[-1]

    def take(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], steady: Collection[str] = ()
    ) -> Snapshot:
        """Copy the state and make it the newest snapshot: `copy` and `keep_copy` in one call."""
        _plain("facts", facts)
        return self.keep_copy(self.copy(step, tensors, steady), facts)

    def copy(self, step: int, tensors: Mapping[str, Tensor], steady: Collection[str] = ()) -> Copied:
        """Copy the tensors of a state whose facts are not all known yet; drops the oldest snapshot if there are `keep`.

        Later changes of the state do not reach the copy; `keep_copy` makes a snapshot of it.

        Args:
            step: steps taken. A newest snapshot of the same step is replaced; one of a later step raises a GramianError.
            tensors: the state's tensors; of a DTensor the local shard is copied.
            steady: names of tensors that nothing changes before `settle`, and that stay allocated.
        """
        if self._ring and step < self._ring[-1].step:
            raise GramianError(
                f"step: {step}, but there is a snapshot of step {self._ring[-1].step}; expected drop_after before it"
            )
        views = parts_of(tensors)
        if self._ring and step == self._ring[-1].step:
            self._ring.pop()
        del self._ring[: max(0, len(self._ring) - self.keep + 1)]

        shape = tuple(
            (name, view.local.shape, view.local.dtype, view.local.device, view.local.is_cuda and name in steady)
            for name, view in views.items()
        )
        pieces = self._pieces(shape)
        lease = _Lease()
        weakref.finalize(lease, _give_back, self._free, shape, pieces).atexit = False
        arrivals = self._copy({name: view.local for name, view in views.items()}, pieces)
        buffers = {name: buffer for piece in pieces for name, buffer in piece.buffers.items()}
        return Copied(step, {name: Part(view.extent, buffers[name], lease) for name, view in views.items()}, arrivals)

    def keep_copy(self, copied: Copied, facts: Mapping[str, Any]) -> Snapshot:
        """Make the result of the last `copy` the newest snapshot.

        `facts` is the rest of the state; a `GramianError` names one that JSON cannot hold. Tuples come back as lists.
        """
        text = json.dumps(_plain("facts", facts))
        self._ring.append(Snapshot(copied.step, copied.buffers, copied.arrivals, text))
        return self._ring[-1]

    def settle(self) -> None:
        """Make device work queued from now on wait until background copies have read their tensors, which may then change."""
        for device, read in self._unsettled.items():
            torch.cuda.current_stream(device).wait_event(read)
        self._unsettled.clear()

    def before(self, step: int) -> Snapshot | None:
        """The newest snapshot of `step` or an earlier step; None if there is none."""
        return next((snapshot for snapshot in reversed(self._ring) if snapshot.step <= step), None)

    def drop_after(self, step: int) -> None:
        """Discard the snapshots of steps after `step`, as after a rollback to it."""
        self._ring = [snapshot for snapshot in self._ring if snapshot.step <= step]

    def _pieces(self, shape: "_Shape") -> "list[_Piece]":
        """Host memory for a state of this shape, reused or new; free memory for other shapes is released."""
        for other in list(self._free):  # at once: the thread that writes checkpoints gives memory back
            if other != shape:
                self._free.pop(other, None)
        try:
            return self._free[shape].pop()
        except (KeyError, IndexError):
            return _allocate(shape)

    def _copy(self, sources: Mapping[str, Tensor], pieces: "list[_Piece]") -> tuple[torch.cuda.Event, ...]:
        """Queue the copies of all tensors to the host; returns events after which they have arrived."""
        beside: dict[torch.device, list[_Piece]] = {}
        for piece in pieces:
            if piece.steady:
                beside.setdefault(piece.device, []).append(piece)
            else:
                for name, buffer in piece.buffers.items():
                    buffer.copy_(sources[name], non_blocking=True)
        at_once = {piece.device for piece in pieces if piece.device.type == "cuda" and not piece.steady}
        arrivals = [torch.cuda.current_stream(device).record_event() for device in at_once]
        arrivals += [self._copy_beside(device, sources, found) for device, found in beside.items()]
        return tuple(arrivals)

    def _copy_beside(
        self, device: torch.device, sources: Mapping[str, Tensor], pieces: "list[_Piece]"
    ) -> torch.cuda.Event:
        """Queue host copies on the device's side stream, after the work queued so far; returns the event of their arrival.

        A copy on the device is in the side stream's own memory, which is not reused before it was read.
        """
        side = self._sides.setdefault(device, torch.cuda.Stream(device))
        side.wait_stream(torch.cuda.current_stream(device))
        size = sum(piece.memory.nbytes for piece in pieces)
        with torch.cuda.stream(side), torch.no_grad():
            flat = _staged(sources, pieces) if size <= STAGED_SHARE * free_bytes(device) else None
            if flat is not None:
                self._unsettled[device] = side.record_event()
                for piece, values in zip(pieces, flat, strict=True):
                    piece.memory.copy_(values, non_blocking=True)
            else:
                for piece in pieces:
                    for name, buffer in piece.buffers.items():
                        buffer.copy_(sources[name], non_blocking=True)
            arrival: torch.cuda.Event = side.record_event()
        if flat is None:
            self._unsettled[device] = arrival
        return arrival


_Shape = tuple[tuple[str, torch.Size, torch.dtype, torch.device, bool], ...]
"""Name, shape, dtype and device of every tensor of a state, and whether it is copied on the side stream."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """One block of host memory for several tensors of one device and dtype, one after the other."""

    device: torch.device
    steady: bool
    memory: Tensor
    buffers: dict[str, Tensor]
    """Views into the block of memory, {name of the tensor: view}."""


def _staged(sources: Mapping[str, Tensor], pieces: list[_Piece]) -> list[Tensor] | None:
    """Copies of the tensors on the device, one flat tensor per block of host memory; None if device memory is fragmented."""
    try:
        return [torch.cat([sources[name].reshape(-1) for name in piece.buffers]) for piece in pieces]
    except torch.cuda.OutOfMemoryError:
        return None


def _allocate(shape: _Shape) -> list[_Piece]:
    """Allocate host memory for a state, in blocks of tensors with the same device and dtype."""
    groups: dict[Any, list[tuple[str, torch.Size]]] = {}
    for name, size, dtype, device, steady in shape:
        groups.setdefault((device, dtype, steady), []).append((name, size))
    pieces = []
    for (device, dtype, steady), found in groups.items():
        for places in packed([size.numel() * dtype.itemsize for _, size in found]):
            members = [found[place] for place in places]
            counts = [size.numel() for _, size in members]
            memory = torch.empty(sum(counts), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
            buffers = {name: flat.view(size) for (name, size), flat in zip(members, memory.split(counts), strict=True)}
            pieces.append(_Piece(device, steady, memory, buffers))
    return pieces


class _Lease:
    """Object that all parts of a copy refer to; when it is garbage-collected, the copy's host memory is free."""

    __slots__ = ("__weakref__",)


def _give_back(free: dict[_Shape, list[list[_Piece]]], shape: _Shape, pieces: list[_Piece]) -> None:
    """Put host memory of a copy that nothing refers to back into `free`; needs no lock, every operation is atomic."""
    free.setdefault(shape, []).append(pieces)


def _plain(path: str, value: Any) -> Any:
    """`value` as plain JSON values; raises `GramianError` with the path of one that JSON cannot represent."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise GramianError(f"{path}: has the key {key!r}; expected text keys")
        return {key: _plain(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{path}.{i}", inner) for i, inner in enumerate(value)]
    raise GramianError(f"{path}: is a {type(value).__name__}; expected numbers, text, lists and dicts of them")
