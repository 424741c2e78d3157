"""Rectangular parts of tensors: which part of a tensor this process has, and copying parts into tensors.

A state is {name: tensor}, DTensors under FSDP2. Everything here works on this process's own boxes; nothing is communicated.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gramian.core.errors import GramianError


@dataclass(frozen=True)
class Extent:
    """Index ranges of the rectangular part of a tensor that this process has: offsets and sizes along every axis."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sharded: bool = False
    """Whether the tensor is divided among processes; the same on all of them, also if one process has all rows."""


def full_extent(shape: Iterable[int]) -> Extent:
    """Index ranges that cover all of a tensor of this shape."""
    shape = tuple(shape)
    return Extent(shape, (0,) * len(shape), shape)


def extent_of(name: str, tensor: Tensor) -> Extent:
    """Index ranges of a tensor that this process has, for plain, replicated or sharded ones; raises for partial sums."""
    if not isinstance(tensor, DTensor):
        return full_extent(tensor.shape)
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
    """A rectangular part of a tensor: a copy in host memory, or a view of the tensor itself."""

    extent: Extent
    local: Tensor
    """Values of the part, of shape `extent.sizes`; memory of a copy is used again when its snapshot and parts are gone."""
    lease: object = field(default=None, repr=False)
    """Object that keeps the memory of a copy reserved while it is referenced."""

    def box(self, extent: Extent) -> Tensor | None:
        """View of the values in the index ranges `extent` of the same tensor; None if they are not all in this part."""
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
    """This process's parts of {name: tensor}, as views: writing into them writes into the tensors."""
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
                parts[name] = Part(full_extent(tensor.shape), tensor.detach())
    return parts


def copy_parts(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved parts, which must contain this process's index ranges, into the tensors of the same names, in place.

    All names, shapes and dtypes are checked before the first is written; a `GramianError` names the tensor that differs.
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
    """The values of a saved part that belong into the tensor part `target`; raises if dtype, shape or range do not fit."""
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
    """Wait for the copies from and to these tensors that are queued on the current streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
