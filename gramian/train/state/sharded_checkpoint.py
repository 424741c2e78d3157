"""Checkpoints of states that are sharded over processes, in safetensors files, planned by `torch.distributed.checkpoint`.

Its planner decides which process writes which box (part of a tensor; replicated ones are written once) and which boxes a
process reads, so a checkpoint of any number of processes is read by any number. Its safetensors reader is used unchanged, its
safetensors writer with another `write_data`: torch's own copies all of a process's shards into one more buffer, syncs a file
while the last of it may still be in Python's buffer, leaves the file's mode to the umask, and does not hash. Its default reader
and writer, which pickle, are not used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gramian.core.durable_files import FileRecord
from gramian.core.errors import GramianError
from gramian.parallel.sharded_read import ShardedBox, file_header, first_failure, read_sharded_boxes
from gramian.train.state.checkpoint_files import write_tensors
from gramian.train.state.snapshot import Snapshot
from gramian.train.state.tensor_parts import Extent, Part

Complete = Callable[[Snapshot, Path, dict[str, FileRecord]], None]


def write_shards(
    snapshot: Snapshot, group: dist.ProcessGroup, begin: Callable[[int], Path], complete: Complete
) -> None:
    """Write a sharded snapshot, every process its shards (collective); raises on all processes if one of them failed.

    Args:
        snapshot: the same step and names on every process.
        group: a gloo group for this purpose alone.
        begin: creates the folder; called on rank 0 before any process writes.
        complete: makes a checkpoint of the folder; called on rank 0 after all processes have written and synced.
    """
    writer = _ShardWriter(snapshot, begin, complete)
    try:
        save(dict(snapshot.parts), storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as failure:
        raise GramianError(first_failure(failure)) from None


def read_parts(folder: Path, needed: Mapping[str, Extent], dtypes: Mapping[str, torch.dtype]) -> dict[str, Part]:
    """Read boxes (index ranges) of a checkpoint's tensors into host memory, without communication; returns {name: part}."""
    parts = {name: Part(box, torch.empty(box.sizes, dtype=dtypes[name])) for name, box in needed.items()}
    try:
        read_sharded_boxes(folder, {name: _box(part) for name, part in parts.items()})
    except CheckpointException as failure:
        reason = first_failure(failure)
        raise GramianError(f"{folder}: cannot be read ({reason}); expected a verified checkpoint") from None
    return parts


def _box(part: Part) -> ShardedBox:
    return ShardedBox(part.extent.offsets, part.local)


class _SavePlanner(DefaultSavePlanner):
    """Plans which process writes which parts of tensors, as torch's default planner does for DTensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, part) for name, part in self.state_dict.items()])
        return self.plan

    def _item(self, name: str, part: Part) -> WriteItem:
        chunk = _box(part).chunk
        return WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD if part.extent.sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties(dtype=part.local.dtype), size=torch.Size(part.extent.shape)
            ),
        )


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes one safetensors file for each process, in a folder that rank 0 creates and completes."""

    def __init__(self, snapshot: Snapshot, begin: Callable[[int], Path], complete: Complete) -> None:
        super().__init__("", save_distributed=True)
        self._snapshot, self._begin, self._complete = snapshot, begin, complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the checkpoint's folder and add its path to all plans; runs on rank 0 while all other ranks wait."""
        self.path = self._begin(self._snapshot.step)
        return [
            replace(plan, storage_data={**plan.storage_data, "folder": str(self.path)})
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the safetensors file of this process and sync it."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        if plan.items:
            name = f"state-{plan.storage_data['shard_index']:05d}.safetensors"
            tensors = {item.index.fqn: self._snapshot.parts[item.index.fqn].local for item in plan.items}
            header = file_header({item.index.fqn: _offsets(item) for item in plan.items})
            record = write_tensors(Path(plan.storage_data["folder"]) / name, tensors, header)
            done = Future()
            done.set_result([WriteResult(item.index, record.bytes, (name, record)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint on rank 0, with the sizes and checksums of all files."""
        strange = metadata.state_dict_metadata.keys() ^ self._snapshot.parts.keys()
        if strange:
            raise GramianError(f"{min(strange)}: is not on every process; expected the same names")
        files = dict(result.storage_data for written in results for result in written)
        self._complete(self._snapshot, Path(self.path), files)


def _offsets(item: WriteItem) -> Sequence[int]:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.offsets
