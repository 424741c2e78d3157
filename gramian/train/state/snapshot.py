"""Copies of a run's state in host memory: what a rollback goes back to, what the checkpoint writer writes, what "best" holds.

The state is `tensors`, flat names to tensors (DTensors under FSDP2), and `facts`, plain values. A copy holds this process's own
part of every tensor; nothing is communicated.
"""

import itertools
import json
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gramian.core.errors import GramianError
from gramian.plan.host_memory import packed

STAGED_SHARE = 0.25
"""A state that takes at most this share of a device's free memory is copied there first: it may change again at once."""


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
class Copied:
    """The tensors after `step` steps. Their memory is used again once neither this nor one of its parts is held by anyone."""

    step: int
    held: dict[str, Part] = field(repr=False)
    """The copies, which may still be under way; `parts` waits for them."""
    arrivals: tuple[torch.cuda.Event, ...] = field(repr=False)

    @property
    def parts(self) -> dict[str, Part]:
        """The copies, once they are all here."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return self.held


@dataclass(frozen=True, eq=False)
class Snapshot(Copied):
    """The state after `step` steps."""

    facts_text: str = field(repr=False)
    """The facts as JSON: a rollback gets what a resume from disk would get."""

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

    One copy costs the state's local bytes in host memory, in few large pieces, pinned for tensors of a GPU. Nobody waits for
    it: tensors that are steady are copied on a stream of their own, beside the next forward and backward, and whoever changes
    them calls `settle` before, which waits for the transfer; or, where the device has room for it, for a copy on the device
    alone, which takes a hundredth of the time. Memory of copies that nobody holds any longer is used again: with `keep` copies,
    the newest of which may still wait to be kept, and an older one in the writer, `keep` + 1 are allocated
    (`gramian.plan.host_memory`).

    Args:
        keep: how many are kept; taking one more drops the oldest first.
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
        """Of the copies, oldest first."""
        return [snapshot.step for snapshot in self._ring]

    @property
    def newest(self) -> Snapshot:
        """There must be one."""
        return self._ring[-1]

    def take(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], steady: Collection[str] = ()
    ) -> Snapshot:
        """Copy the state, and keep the copy: `copy` and `keep` in one.

        Raises:
            GramianError: naming a fact that is no plain value, or a step that goes back.
        """
        _plain("facts", facts)
        return self.keep_copy(self.copy(step, tensors, steady), facts)

    def copy(self, step: int, tensors: Mapping[str, Tensor], steady: Collection[str] = ()) -> Copied:
        """Copy the tensors of a state whose facts are not all known yet; the oldest copy makes room for it.

        Args:
            step: steps done; not less than that of the newest copy, which an equal one replaces.
            tensors: the state's tensors; of a DTensor the local shard is copied.
            steady: names of tensors that nothing changes before `settle`, and that stay allocated.

        Returns:
            The copy: later changes of the state do not reach it. It is forgotten unless `keep_copy` gets it.

        Raises:
            GramianError: for a step that goes back.
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
        held = {name: Part(view.extent, buffers[name], lease) for name, view in views.items()}
        return Copied(step, held, arrivals)

    def keep_copy(self, copied: Copied, facts: Mapping[str, Any]) -> Snapshot:
        """Make a copy the newest snapshot.

        Args:
            copied: by `copy`, the last one.
            facts: the rest of the state, in values that JSON can hold; tuples come back as lists.

        Raises:
            GramianError: naming a fact that is no plain value.
        """
        text = json.dumps(_plain("facts", facts))
        self._ring.append(Snapshot(copied.step, copied.held, copied.arrivals, text))
        return self._ring[-1]

    def settle(self) -> None:
        """What is queued from here on waits, on the device, until steady tensors have been read and may change again."""
        for device, read in self._unsettled.items():
            torch.cuda.current_stream(device).wait_event(read)
        self._unsettled.clear()

    def before(self, step: int) -> Snapshot | None:
        """The newest copy of that step or an earlier one."""
        return next((snapshot for snapshot in reversed(self._ring) if snapshot.step <= step), None)

    def drop_after(self, step: int) -> None:
        """Forget the copies of later steps, as after a rollback to `step`."""
        self._ring = [snapshot for snapshot in self._ring if snapshot.step <= step]

    def _pieces(self, shape: "_Shape") -> "list[_Piece]":
        """Memory for a state of this shape; what states of other shapes left behind is let go."""
        for other in list(self._free):  # at once: the thread that writes checkpoints gives memory back
            if other != shape:
                self._free.pop(other, None)
        try:
            return self._free[shape].pop()
        except (KeyError, IndexError):
            return _allocate(shape)

    def _copy(self, sources: Mapping[str, Tensor], pieces: "list[_Piece]") -> tuple[torch.cuda.Event, ...]:
        """Queue all copies; events after which they have arrived."""
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
        """Queue copies on the device's side stream, after what was queued before them; the event of their arrival.

        A copy on the device is in the side stream's own memory: dropping it here lets nobody write there before it was read.
        """
        side = self._sides.setdefault(device, torch.cuda.Stream(device))
        side.wait_stream(torch.cuda.current_stream(device))
        size = sum(piece.memory.nbytes for piece in pieces)
        with torch.cuda.stream(side), torch.no_grad():
            flat = _staged(sources, pieces) if size <= STAGED_SHARE * _free_bytes(device) else None
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
"""Of a state: name, shape, dtype and device of every tensor, and whether it is copied beside the work."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """Host memory of a few tensors of one device and dtype, one behind the other."""

    device: torch.device
    steady: bool
    memory: Tensor
    buffers: dict[str, Tensor]
    """Views into it, by name."""


def _staged(sources: Mapping[str, Tensor], pieces: list[_Piece]) -> list[Tensor] | None:
    """Copies on the device, one for each piece; None if the memory that is free lies in too small parts."""
    try:
        return [torch.cat([sources[name].reshape(-1) for name in piece.buffers]) for piece in pieces]
    except torch.cuda.OutOfMemoryError:
        return None


def _allocate(shape: _Shape) -> list[_Piece]:
    """Room for a state."""
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


def _free_bytes(device: torch.device) -> int:
    """What can still be allocated there: free on the device, or held by torch and not in use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


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
    """Held by a snapshot's parts; when it goes, their memory is free."""

    __slots__ = ("__weakref__",)


def _give_back(free: dict[_Shape, list[list[_Piece]]], shape: _Shape, pieces: list[_Piece]) -> None:
    """Called by whichever thread let go last, so without a lock: every operation is atomic by itself."""
    free.setdefault(shape, []).append(pieces)


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
