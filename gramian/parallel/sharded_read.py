"""Boxes of tensors that safetensors files of `torch.distributed.checkpoint` hold, read by any number of processes."""

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
    """A part of a tensor."""

    offsets: Sequence[int]
    """Where it begins, along every axis."""
    local: Tensor
    """Its numbers, or room for them."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """As torch's planners know it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)


def read_boxes(folder: Path, boxes: Mapping[str, ShardedBox]) -> None:
    """Fill boxes of saved tensors; every process by itself, nothing is unpickled.

    Args:
        folder: of safetensors files, written by any number of processes.
        boxes: {tensor: the box that is needed of it}, in host memory.

    Raises:
        CheckpointException: if a file or a tensor cannot be read; `first_failure` says why.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(boxes), storage_reader=reader, planner=_Planner(), no_dist=True)


def first_failure(failure: CheckpointException) -> str:
    """Who failed, and why, in one line."""
    rank = min(failure.failures)
    reason = failure.failures[rank][0]
    return " ".join(f"rank {rank}: {type(reason).__name__}: {reason}".split())


class _Planner(DefaultLoadPlanner):
    """Plans for boxes as the default does for DTensors."""

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
