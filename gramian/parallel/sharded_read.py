"""Read rectangular slices of tensors from safetensors files in `torch.distributed.checkpoint`'s format, without collectives."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load


@dataclass(frozen=True)
class ShardedBox:
    """A rectangular slice of a saved tensor: the index where it begins, and a tensor with its shape."""

    offsets: Sequence[int]
    """First index of the slice along every axis of the full tensor."""
    local: Tensor
    """Buffer that the slice is read into; when saving, the entries of the slice."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes of this slice in the form that torch's checkpoint planners use."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)


def read_sharded_boxes(folder: Path, boxes: Mapping[str, ShardedBox]) -> None:
    """Read slices of saved tensors into the buffers of `boxes`. Each process reads by itself; nothing is unpickled.

    Args:
        folder: folder of safetensors files, written by any number of processes.
        boxes: {tensor name: slice to read, with a buffer in host memory}.

    Raises:
        CheckpointException: if a file or a tensor cannot be read; `first_failure` formats the reason.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads by itself
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(boxes), storage_reader=reader, planner=_Planner(), no_dist=True)


def file_header(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Metadata that torch's safetensors reader expects in a file: where each slice in the file begins in its full tensor.

    Args:
        offsets: {tensor name: first index of the slice along every axis}.
    """
    begins = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}


def first_failure(failure: CheckpointException) -> str:
    """One line from a CheckpointException: the lowest rank that failed, and its reason."""
    rank = min(failure.failures)
    reason = failure.failures[rank][0]
    return " ".join(f"rank {rank}: {type(reason).__name__}: {reason}".split())


class _Planner(DefaultLoadPlanner):
    """Plans the reads of `ShardedBox` slices, as torch's default planner does for DTensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, box in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [box.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        box: ShardedBox = self.state_dict[index.fqn]
        return box.local
