"""Copies of a run's state in host memory: what a rollback goes back to, what the checkpoint writer writes, what "best" holds.

The state is `tensors`, flat names to tensors (DTensors under FSDP2), and `facts`, plain values. A copy holds this process's own
part of every tensor; nothing is communicated.
"""

import itertools
import json
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gramian.errors import GramianError

_Key = tuple[torch.Size, torch.dtype, bool]
"""Shape, dtype and whether the buffer is pinned."""


@dataclass(frozen=True)
class Extent:
    """The box of a tensor that this process holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sharded: bool = False
    """Whether other processes hold the rest; the same on all of them, also where one holds everything."""


def whole(shape: Iterable[int]) -> Extent:
    """All of a tensor."""
    shape = tuple(shape)
    return Extent(shape, (0,) * len(shape), shape)


def extent_of(name: str, tensor: Tensor) -> Extent:
    """What this process holds of a tensor.

    Args:
        name: for the message.
        tensor: plain, or a DTensor that is replicated or sharded.

    Raises:
        GramianError: for other placements.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    if any(not isinstance(placement, Replicate) and type(placement) is not Shard for placement in tensor.placements):
        raise GramianError(f"{name}: is placed as {tensor.placements}; expected Shard or Replicate")
    chunk = tensor.__create_chunk_list__()[0]
    sharded = any(
        isinstance(placement, Shard) and tensor.device_mesh.size(dim) > 1
        for dim, placement in enumerate(tensor.placements)
    )
    return Extent(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes), sharded)


@dataclass(frozen=True, eq=False)
class Part:
    """A box of a tensor in host memory, or a view of the tensor itself."""

    extent: Extent
    local: Tensor
    """Of shape `extent.sizes`. A copy's belongs to its snapshot: hold the snapshot or the part for as long as you read it."""
    lease: object = field(default=None, repr=False)

    def box(self, extent: Extent) -> Tensor | None:
        """The part of this that another process, or a DTensor of another mesh, holds; None if it is not all in here."""
        if extent.shape != self.extent.shape:
            return None
        box = self.local
        for dim, (offset, size) in enumerate(zip(extent.offsets, extent.sizes, strict=True)):
            start = offset - self.extent.offsets[dim]
            if size > 0 and (start < 0 or start + size > self.extent.sizes[dim]):
                return None
            box = box.narrow(dim, start if size > 0 else 0, size)
        return box


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Views of this process's parts of tensors; writing into them writes into the tensors."""
    known: dict[Any, Extent] = {}  # few shapes among many tensors
    parts = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                key = (tensor.shape, tensor.device_mesh, tensor.placements)
                if key not in known:
                    known[key] = extent_of(name, tensor)
                parts[name] = Part(known[key], tensor.to_local())
            else:
                parts[name] = Part(whole(tensor.shape), tensor.detach())
    return parts


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after `step` steps. Its memory is used again once neither it nor one of its parts is held by anyone."""

    step: int
    held: dict[str, Part] = field(repr=False)
    """The copies, which may still be under way; `parts` waits for them."""
    facts_text: str = field(repr=False)
    """The facts as JSON: a rollback gets what a resume from disk would get."""
    arrivals: tuple[torch.cuda.Event, ...] = field(default=(), repr=False)

    @property
    def parts(self) -> dict[str, Part]:
        """The copies, once they are all here."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return self.held

    @property
    def facts(self) -> dict[str, Any]:
        """The facts, new ones at every call."""
        facts: dict[str, Any] = json.loads(self.facts_text)
        return facts

    @property
    def sharded(self) -> bool:
        """Whether other processes hold parts of it; the same on all of them."""
        return any(part.extent.sharded for part in self.held.values())

    @property
    def nbytes(self) -> int:
        """Host memory of the tensors."""
        return sum(part.local.nbytes for part in self.held.values())


class Snapshots:
    """The newest few copies.

    One copy costs the state's local bytes in host memory, pinned for tensors of a GPU (torch rounds each pinned buffer up to a
    power of two), and one transfer per tensor. Nobody waits for it: tensors that are steady are copied on a stream of their
    own, beside the next forward and backward, and whoever changes them calls `settle` before. Buffers of copies that nobody
    holds any longer are used again: with `keep` copies, one in the writer and one best, there are `keep` + 2 sets of them.

    Args:
        keep: how many are kept; taking one more drops the oldest first.
    """

    def __init__(self, keep: int) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise GramianError(f"keep: {keep!r}; expected an integer of at least 1")
        self.keep = keep
        self._ring: list[Snapshot] = []
        self._free: dict[_Key, list[Tensor]] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._unsettled: dict[torch.device, torch.cuda.Event] = {}

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def steps(self) -> list[int]:
        """Of the copies, oldest first."""
        return [snapshot.step for snapshot in self._ring]

    def take(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], steady: Collection[str] = ()
    ) -> Snapshot:
        """Copy the state.

        Args:
            step: steps done; not less than that of the newest copy, which an equal one replaces.
            tensors: the state's tensors; of a DTensor the local shard is copied.
            facts: the rest of the state, in values that JSON can hold; tuples come back as lists.
            steady: names of tensors that nothing changes before `settle`, and that stay allocated.

        Returns:
            The copy: later changes of the state do not reach it.

        Raises:
            GramianError: naming a fact that is no plain value, or a step that goes back.
        """
        text = json.dumps(_plain("facts", facts))
        if self._ring and step < self._ring[-1].step:
            raise GramianError(
                f"step: {step}, but there is a snapshot of step {self._ring[-1].step}; expected drop_after before it"
            )
        views = parts_of(tensors)
        if self._ring and step == self._ring[-1].step:
            self._ring.pop()
        del self._ring[: max(0, len(self._ring) - self.keep + 1)]

        buffers: list[tuple[_Key, Tensor]] = []
        lease = _Lease()
        weakref.finalize(lease, _give_back, self._free, buffers).atexit = False
        parts = {}
        self._begin({view.local.device for view in views.values() if view.local.is_cuda})
        for name, view in views.items():
            key = (view.local.shape, view.local.dtype, view.local.is_cuda)
            buffer = self._buffer(key)
            buffers.append((key, buffer))
            with self._stream(view.local.device, beside=name in steady):
                buffer.copy_(view.local, non_blocking=True)
            parts[name] = Part(view.extent, buffer, lease)
        self._forget_all_but({key for key, _ in buffers})
        self._ring.append(Snapshot(step, parts, text, self._arrivals()))
        return self._ring[-1]

    def settle(self) -> None:
        """What is queued from here on waits, on the device, for the copies under way: steady tensors may change again."""
        for device, arrival in self._unsettled.items():
            torch.cuda.current_stream(device).wait_event(arrival)
        self._unsettled.clear()

    def _begin(self, devices: set[torch.device]) -> None:
        """Copies beside the work wait for what was queued before them."""
        for device in devices:
            side = self._sides.setdefault(device, torch.cuda.Stream(device))
            side.wait_stream(torch.cuda.current_stream(device))

    def _stream(self, device: torch.device, beside: bool) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._sides[device]) if beside and device in self._sides else nullcontext()

    def _arrivals(self) -> tuple[torch.cuda.Event, ...]:
        """Events after which every copy is here: those on the side, and those among the work."""
        found = []
        for device, side in self._sides.items():
            self._unsettled[device] = side.record_event()
            found += [self._unsettled[device], torch.cuda.current_stream(device).record_event()]
        return tuple(found)

    def before(self, step: int) -> Snapshot | None:
        """The newest copy of that step or an earlier one."""
        return next((snapshot for snapshot in reversed(self._ring) if snapshot.step <= step), None)

    def drop_before(self, step: int) -> None:
        """Forget the copies of earlier steps."""
        self._ring = [snapshot for snapshot in self._ring if snapshot.step >= step]

    def drop_after(self, step: int) -> None:
        """Forget the copies of later steps, as after a rollback to `step`."""
        self._ring = [snapshot for snapshot in self._ring if snapshot.step <= step]

    def _buffer(self, key: _Key) -> Tensor:
        try:
            return self._free[key].pop()
        except (KeyError, IndexError):
            shape, dtype, pinned = key
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)

    def _forget_all_but(self, used: set[_Key]) -> None:
        """Free buffers of shapes that the state no longer has."""
        for key in list(self._free):
            if key not in used:
                self._free.pop(key, None)


def restore_into(snapshot: Snapshot, tensors: Mapping[str, Tensor]) -> None:
    """Copy a snapshot back, bit for bit; all names and shapes are checked before the first is written.

    Args:
        snapshot: taken from tensors of these names, shapes, dtypes and placements.
        tensors: written in place.

    Raises:
        GramianError: naming a tensor that is missing, unexpected or of another shape or dtype.
    """
    copy_parts(snapshot.parts, tensors)


def copy_parts(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Copy parts into the tensors of the same names, in place; checks all of them first.

    Raises:
        GramianError: naming a tensor that is missing, unexpected or of another shape or dtype.
    """
    for name in itertools.chain(parts, tensors):
        if name not in tensors:
            raise GramianError(f"{name}: is in the saved state, but not here; expected the same state")
        if name not in parts:
            raise GramianError(f"{name}: is not in the saved state; expected the same state")
    targets = parts_of(tensors)
    boxes = {name: _fitting(name, parts[name], target) for name, target in targets.items()}
    with torch.no_grad():
        for name, target in targets.items():
            target.local.copy_(boxes[name], non_blocking=True)
    synchronize(target.local for target in targets.values())


def _fitting(name: str, part: Part, target: Part) -> Tensor:
    """The values that go into a tensor."""
    if part.local.dtype != target.local.dtype:
        raise GramianError(f"{name}: has dtype {part.local.dtype} in the saved state; expected {target.local.dtype}")
    if part.extent.shape != target.extent.shape:
        raise GramianError(
            f"{name}: has shape {list(part.extent.shape)} in the saved state; expected {list(target.extent.shape)}"
        )
    box = part.box(target.extent)
    if box is None:
        raise GramianError(f"{name}: this process's shard is not in the saved part; expected the same placement")
    return box


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait until copies from and to these tensors, begun on the current streams, are done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class _Lease:
    """Held by a snapshot's parts; when it goes, their buffers are free."""

    __slots__ = ("__weakref__",)


def _give_back(free: dict[_Key, list[Tensor]], buffers: list[tuple[_Key, Tensor]]) -> None:
    """Called by whichever thread let go last, so without a lock: every operation is atomic by itself."""
    for key, buffer in buffers:
        free.setdefault(key, []).append(buffer)


def _plain(path: str, value: Any) -> Any:
    """The value as JSON holds it.

    Raises:
        GramianError: with the path of what it cannot hold.
    """
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
