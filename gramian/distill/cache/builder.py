"""Build a teacher's cache: processes take shards (runs of consecutive windows) in turn; each shard is written by one process.

Legend: B windows of a forward, T tokens.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramian.core.durable_files import replace_file
from gramian.core.errors import GramianError
from gramian.data.windows import Windows
from gramian.distill.cache.builder_group import all_or_none, folder_lock
from gramian.distill.cache.cache_files import damage, refuse_damage
from gramian.distill.cache.cache_kind import CacheKind
from gramian.distill.cache.hidden_cache import Hidden, stored_dtype
from gramian.distill.cache.kind_registry import KINDS
from gramian.distill.cache.layout import CacheLayout, shard_windows_for
from gramian.distill.cache.manifest import HEAD, CacheIdentity, Manifest, read_manifest
from gramian.distill.cache.shard_writer import ShardWriter, read_shard_record
from gramian.distill.cache.storage_errors import StorageErrors
from gramian.distill.loss.head import Head
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal
from gramian.parallel.process_grid import ProcessGrid

SINGLE_PROCESS = ProcessGrid()
Progress = Callable[[int, int], None]
"""Callback of a build: called with the number of windows written so far, over all processes, and their total."""


@dataclass(frozen=True)
class CacheOptions:
    """What a cache of a teacher stores, and how it is computed.

    Example:
        >>> CacheOptions(TopK(k=16), batch=4)  # doctest: +SKIP
    """

    kind: CacheKind = field(default_factory=Hidden)
    """What is stored for each token: `Hidden`, `TopK` or `Samples`."""
    layer_dtype: str = "auto"
    """Dtype of stored residual streams: "bf16", "fp16", "fp32", "model" (the head's) or "auto" (bf16 if that is, else fp16)."""
    batch: int = 8
    """Windows per forward pass of the teacher on one process; the same for any number of processes."""
    shard_windows: int | None = None
    """Windows per shard; None: 256 MiB or 2²⁰ tokens, whichever is less."""
    measure_every: int = 1
    """Storage errors are measured on every n-th window; 1: on all windows."""


def build_cache(
    folder: str | os.PathLike[str],
    teacher: LiveTeacher,
    windows: Windows,
    options: CacheOptions | None = None,
    grid: ProcessGrid = SINGLE_PROCESS,
    progress: Progress | None = None,
) -> Manifest:
    """Write a teacher's signal for all windows to disk, or the missing shards of an interrupted build.

    Processes take shards in turn and advance batch by batch together, so a failure of one is raised by all within a batch, and
    a sharded teacher works. A shard's files get their names after they are synced, then its record is written, and the manifest
    is marked complete after all shards: a builder that is killed loses only the shards in progress, one per process, and the
    next call continues. If a file is missing or too short, its whole shard is written again. The folder is the same, byte by
    byte, for any number of processes.

    Cost: one forward per window, and the encoding of the kind per token; `CacheLayout.bytes_per_token` bytes per token.

    Args:
        folder: the cache's folder, visible to all processes; created if needed.
        teacher: the model whose signal is stored; the residual stream of its `layers` is stored too.
        windows: the training data.
        options: what is stored; None: hidden states.
        grid: the processes that build together; default: this one.
        progress: called after every batch; None: no report.

    Returns:
        The manifest of the complete cache.

    Raises:
        GramianError: if the folder has a cache of other data or options (the message names the field), a file with a wrong
            checksum or too little space, cannot be written, or is locked by other builders; or if an option is below 1.
    """
    options, path = options or CacheOptions(), Path(folder)
    for name, value in (("batch", options.batch), ("measure_every", options.measure_every)):
        if value < 1:
            raise GramianError(f"{name}: {value}; expected at least 1")
    identity = identity_of(teacher, windows, options)
    report = progress or (lambda done, total: None)
    build = _Build(path, teacher, windows, options, identity, identity.layout, grid)
    with folder_lock(path, grid):
        missing = build.missing_shards()
        done = identity.count - sum(len(build.layout.rows(shard)) for shard in missing)
        report(done, identity.count)
        for first in range(0, len(missing), grid.size):
            for more in build.write_shards(missing[first : first + grid.size]):
                done += more
                report(done, identity.count)
        with all_or_none(grid, path):
            if grid.rank == 0:
                build.complete()
        manifest = read_manifest(path)
        assert manifest is not None
        return manifest


def identity_of(teacher: LiveTeacher, windows: Windows, options: CacheOptions) -> CacheIdentity:
    """The `CacheIdentity` that a cache of this teacher, windows and options would have; raises if `shard_windows` is below 1.

    Collective for a sharded teacher.
    """
    if options.shard_windows is not None and options.shard_windows < 1:
        raise GramianError(f"shard_windows: {options.shard_windows}; expected at least 1")
    identity = CacheIdentity(
        kind=options.kind.name,
        teacher=teacher.hash,
        autocast=None if teacher.autocast is None else str(teacher.autocast).removeprefix("torch."),
        tokenizer=windows.stream.tokenizer,
        windows=windows.digest,
        count=len(windows),
        length=windows.length,
        layers=teacher.layers,
        layer_dtype=stored_dtype(options.layer_dtype, teacher.head),
        layer_width=teacher.layer_width,
        facts=options.kind.facts(teacher.head),
        shard_windows=options.shard_windows or 1,
    )
    if options.shard_windows is not None:
        return identity
    return replace(identity, shard_windows=shard_windows_for(identity.layout))


@dataclass(frozen=True)
class _Build:
    """State of one call of `build_cache` on one process."""

    path: Path
    teacher: LiveTeacher
    windows: Windows
    options: CacheOptions
    identity: CacheIdentity
    layout: CacheLayout
    grid: ProcessGrid

    # ---- one round: a shard for every process ------------------------------------------------------------------------

    def write_shards(self, shards: Sequence[int]) -> Iterator[int]:
        """Write these shards, one per process; after every batch yields its number of windows, over all processes."""
        plans = [_batches(self.layout.rows(shard), self.options.batch) for shard in shards]
        mine = plans[self.grid.rank] if self.grid.rank < len(plans) else []
        steps = max(len(plan) for plan in plans)
        # A sharded teacher needs every process in every forward: those without windows left repeat the first window.
        forwards = mine + [range(1)] * (steps - len(mine)) if self.teacher.sharded else mine
        writer: ShardWriter | None = None
        errors: list[StorageErrors] = []
        ahead = self._batch(forwards[0]) if forwards else None
        try:
            for step in range(steps):
                with all_or_none(self.grid, self.path):
                    if step == 0 and mine:
                        writer = ShardWriter(self.path, self.layout, shards[self.grid.rank])
                    if step < len(forwards):
                        assert ahead is not None
                        batch, signal = ahead, self.teacher(ahead)
                        if step + 1 < len(forwards):
                            ahead = self._batch(forwards[step + 1])
                            self.teacher.upcoming(ahead)
                        if step < len(mine):
                            assert writer is not None
                            values, found = self._encoded(signal, batch["windows"])
                            writer.write(values)
                            errors.append(found)
                    if writer is not None and step == len(mine) - 1:
                        rows = self.layout.rows(shards[self.grid.rank])
                        measured = sum(row % self.options.measure_every == 0 for row in rows)
                        writer.finish(StorageErrors.combined(errors), measured)
                yield sum(len(plan[step]) for plan in plans if step < len(plan))
        finally:
            if writer is not None:
                writer.abandon()

    def _batch(self, rows: range) -> dict[str, Tensor]:
        index, device = np.arange(rows.start, rows.stop, dtype=np.int64), self.teacher.device
        batch = {name: values for name, values in self.windows.stack(index).items() if name in ("tokens", "documents")}
        if device.type == "cuda":
            batch = {name: values.pin_memory().to(device, non_blocking=True) for name, values in batch.items()}
        return {**batch, "windows": torch.from_numpy(index)}

    def _encoded(self, signal: DenseSignal, windows_B: Tensor) -> tuple[dict[str, Tensor], StorageErrors]:
        """Encode a batch; returns {column: values to store} of all its windows, and the storage errors of every n-th window."""
        encode, facts = self.options.kind.encode, self.identity.facts
        measured_B = windows_B % self.options.measure_every == 0
        if bool(measured_B.all()):
            values, errors = encode(signal, windows_B, facts, True)
        else:
            values, _ = encode(signal, windows_B, facts, False)
            errors = StorageErrors()
            if bool(measured_B.any()):
                some = measured_B.to(signal.hidden_BTD.device)
                part = DenseSignal(signal.hidden_BTD[some], signal.head)
                errors = encode(part, windows_B[measured_B], facts, True)[1]
        return {**values, **{f"layer-{layer}": stream for layer, stream in signal.layers.items()}}, errors

    # ---- before and after --------------------------------------------------------------------------------------------

    def missing_shards(self) -> list[int]:
        """Numbers of the shards to write; rank 0 prepares the folder unless its cache is complete. Collective.

        Reads all stored files once. Raises a GramianError if the folder has another cache, shards without a manifest, or a file
        of the right size whose checksum differs.
        """
        path, missing = self.path, torch.zeros(self.layout.shards, device=self.grid.device)
        with all_or_none(self.grid, path):
            if self.grid.rank == 0:
                before = read_manifest(path)
                if before is not None and (difference := before.identity.difference(self.identity)):
                    name = difference.split()[0]
                    raise GramianError(
                        f"cache: {path} holds another cache ({difference}); expected another folder, or the same {name}"
                    )
                if before is None and any(path.glob("shards/*")):
                    raise GramianError(f"cache: {path} holds shards without a manifest; expected another folder")
                records = [read_shard_record(path, self.layout, shard) for shard in range(self.layout.shards)]
                found = [shard for shard, record in enumerate(records) if record is None]
                head = {} if before is None else {name: file for name, file in before.files.items() if name == HEAD}
                finished = before is not None and before.complete
                finished &= all(damage(path / name, file, content=False) is None for name, file in head.items())
                for files in [*(record.files for record in records if record), *([head] if finished else [])]:
                    refuse_damage(path, files, content=True)
                if found or not finished:
                    self._prepare(found)
                missing[found] = 1.0
        return [int(shard) for shard in self.grid.sum_(missing).nonzero().flatten().tolist()]

    def _prepare(self, missing: Sequence[int]) -> None:
        """Raise if the disk has no space for the missing shards, else write the teacher's head and an incomplete manifest."""
        (self.path / "shards").mkdir(parents=True, exist_ok=True)
        stores_head = KINDS[self.identity.kind].stores_head
        needed = sum(self.layout.shard_bytes(shard) for shard in missing)
        needed += stores_head * self.teacher.head.weight_VD.nbytes
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise GramianError(
                f"cache: {self.path} has {free / 1e9:.3g} GB free, {needed / 1e9:.3g} GB are needed "
                f"({self.layout.bytes_per_token} bytes per token); expected more space, or another kind of cache"
            )
        files = {HEAD: replace_file(self.path / HEAD, _head_bytes(self.teacher.head))} if stores_head else {}
        Manifest(self.identity, complete=False, files=files).write(self.path)

    def complete(self) -> None:
        """Write the manifest that marks the cache as complete, with the sizes, checksums and errors of all shards.

        Does nothing if the cache is marked already; raises a GramianError if the record of a shard is missing.
        """
        before = read_manifest(self.path)
        assert before is not None
        if before.complete:
            return
        files, errors, measured = dict(before.files), [], 0
        for shard in range(self.layout.shards):
            record = read_shard_record(self.path, self.layout, shard)
            if record is None:
                path = self.path / self.layout.record(shard)
                raise GramianError(f"cache: {path} is gone; expected nobody else in the folder")
            files |= record.files
            errors.append(record.errors)
            measured += record.measured_windows
        Manifest(self.identity, True, files, StorageErrors.combined(errors), measured).write(self.path)


def _batches(rows: range, size: int) -> list[range]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _head_bytes(head: Head) -> bytes:
    from safetensors.torch import save

    tensors = {"weight": head.weight_VD} | ({} if head.bias_V is None else {"bias": head.bias_V})
    content: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return content
