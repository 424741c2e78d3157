"""Building a cache: shards over processes, each written by one of them, none begun twice.

Legend: B windows of a forward, T tokens.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_files import FileRecord, damage, refuse_damage, told_in_one_line, write_whole
from gramian.distill.cache.cache_kind import Kind
from gramian.distill.cache.hidden_cache import Hidden, stored_dtype
from gramian.distill.cache.layout import CacheLayout, shard_windows_for
from gramian.distill.cache.manifest import HEAD, Identity, Manifest, read_json, read_manifest
from gramian.distill.cache.shard_writer import ShardWriter
from gramian.distill.cache.storage_errors import Errors, added
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal
from gramian.parallel.world import World

ALONE = World(0, 1, torch.device("cpu"), "one")
Progress = Callable[[int, int], None]
"""Called with windows done, over all processes, and their number."""


class _Stream(Protocol):
    tokenizer: str


class WindowRows(Protocol):
    """What a builder asks of training windows; `gramian.data.Windows` is such."""

    length: int

    @property
    def stream(self) -> _Stream:
        """Of tokens."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str:
        """Of the tokens and the way they are cut."""

    def stack(self, index: npt.NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Windows as rows: "tokens" [B, T], maybe "documents" [B, T]."""


@dataclass(frozen=True)
class CacheOptions:
    """What is stored, and how it is computed."""

    kind: Kind = field(default_factory=Hidden)
    """`Hidden`, `TopK` or `Samples`."""
    layer_dtype: str = "auto"
    """Of the teacher's `layers`, as of `Hidden.dtype`."""
    batch: int = 8
    """Windows of a forward; the same on any number of processes."""
    shard_windows: int | None = None
    """None: 256 MiB or 2²⁰ tokens, whichever is less."""
    measure_every: int = 1
    """The error of every so-many-th window is measured; 1: the worst of all is known."""


def build_cache(
    folder: str | os.PathLike[str],
    teacher: LiveTeacher,
    windows: WindowRows,
    options: CacheOptions | None = None,
    world: World = ALONE,
    progress: Progress | None = None,
) -> Manifest:
    """Write a teacher's signal of all windows to disk, or what is missing of it.

    Processes take shards in turn and go on batch by batch together, so a failure of one is told by all within a batch, and a
    sharded teacher works. A shard's files get their names after they are synced, its record after them, the manifest's last
    word after all: a builder killed at any moment loses the shards under way, one per process, and the next call goes on. A
    file that is missing or short is made again, with the shard it belongs to. The folder comes out the same, byte by byte, for
    any number of processes.

    Cost: a forward per window, and what the kind does per token; bytes as of `CacheLayout.bytes_per_token`.

    Args:
        folder: of the cache; made if it is not there. All processes must see it.
        teacher: of whom the signal is; its `layers` are stored too.
        windows: the training data.
        options: default: hidden states.
        world: this process among the others.
        progress: called after every batch.

    Returns:
        The manifest.

    Raises:
        GramianError: one line that names the field in which the folder holds another cache, or what the disk refused.
    """
    options, path = options or CacheOptions(), Path(folder)
    for name, value in (("batch", options.batch), ("measure_every", options.measure_every)):
        if value < 1:
            raise GramianError(f"{name}: {value}; expected at least 1")
    identity = identity_of(teacher, windows, options)
    with _taken(path, world):
        missing = _missing_shards(path, identity, teacher, world)
        layout = identity.layout
        done, total = identity.count - sum(len(layout.rows(shard)) for shard in missing), identity.count
        if progress is not None:
            progress(done, total)
        for first in range(0, len(missing), world.size):
            for more in _round(path, teacher, windows, options, identity, missing[first : first + world.size], world):
                done += more
                if progress is not None:
                    progress(done, total)
        with _together(world, path):
            if world.rank == 0:
                _conclude(path, identity)
        manifest = read_manifest(path)
        assert manifest is not None
        return manifest


def identity_of(teacher: LiveTeacher, windows: WindowRows, options: CacheOptions) -> Identity:
    """What a cache of this teacher and these windows would be; called by all processes if the teacher is sharded.

    Raises:
        GramianError: naming an option that does not fit.
    """
    if options.shard_windows is not None and options.shard_windows < 1:
        raise GramianError(f"shard_windows: {options.shard_windows}; expected at least 1")
    identity = Identity(
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


# ---- one round: a shard for every process --------------------------------------------------------------------------------


def _round(
    path: Path,
    teacher: LiveTeacher,
    windows: WindowRows,
    options: CacheOptions,
    identity: Identity,
    shards: Sequence[int],
    world: World,
) -> Iterator[int]:
    """Write these shards, one per process; yields windows done, over all processes, after every batch."""
    layout = identity.layout
    plans = [_batches(layout.rows(shard), options.batch) for shard in shards]
    mine = plans[world.rank] if world.rank < len(plans) else []
    steps = max(len(plan) for plan in plans)
    # A sharded teacher needs every process in every forward: whoever has nothing left asks for the first window again.
    asked = mine + [range(1)] * (steps - len(mine)) if teacher.sharded else mine
    writer: ShardWriter | None = None
    errors: list[Errors] = []
    ahead = _batch(windows, asked[0], teacher) if asked else None
    try:
        for step in range(steps):
            with _together(world, path):
                if step == 0 and mine:
                    writer = ShardWriter(path, layout, shards[world.rank])
                if step < len(asked):
                    assert ahead is not None
                    batch, signal = ahead, teacher(ahead)
                    if step + 1 < len(asked):
                        ahead = _batch(windows, asked[step + 1], teacher)
                        teacher.upcoming(ahead)
                    if step < len(mine):
                        assert writer is not None
                        values, found = _encoded(signal, batch["windows"], options, identity)
                        writer.write(values)
                        errors.append(found)
                if writer is not None and step == len(mine) - 1:
                    measured = sum(row % options.measure_every == 0 for row in layout.rows(shards[world.rank]))
                    writer.finish(added(errors), measured)
            yield sum(len(plan[step]) for plan in plans if step < len(plan))
    finally:
        if writer is not None:
            writer.abandon()


def _batches(rows: range, size: int) -> list[range]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _batch(windows: WindowRows, rows: range, teacher: LiveTeacher) -> dict[str, Tensor]:
    index = np.arange(rows.start, rows.stop, dtype=np.int64)
    batch = {name: values for name, values in windows.stack(index).items() if name in ("tokens", "documents")}
    if teacher.device.type == "cuda":
        batch = {name: values.pin_memory().to(teacher.device, non_blocking=True) for name, values in batch.items()}
    return {**batch, "windows": torch.from_numpy(index)}


def _encoded(
    signal: DenseSignal, windows_B: Tensor, options: CacheOptions, identity: Identity
) -> tuple[dict[str, Tensor], Errors]:
    """Columns of all windows; errors of those that are measured, whose choice does not depend on batches."""
    measured_B = windows_B % options.measure_every == 0
    if bool(measured_B.all()):
        values, errors = options.kind.encode(signal, windows_B, identity.facts, True)
    else:
        values, _ = options.kind.encode(signal, windows_B, identity.facts, False)
        errors = Errors()
        if bool(measured_B.any()):
            some = measured_B.to(signal.hidden_BTD.device)
            part = DenseSignal(signal.hidden_BTD[some], signal.head)
            errors = options.kind.encode(part, windows_B[measured_B], identity.facts, True)[1]
    return {**values, **{f"layer-{layer}": stream for layer, stream in signal.layers.items()}}, errors


# ---- before and after ------------------------------------------------------------------------------------------------------


def _missing_shards(path: Path, identity: Identity, teacher: LiveTeacher, world: World) -> list[int]:
    """What rank 0 finds; it prepares the folder if there is anything to do."""
    layout = identity.layout
    missing = torch.zeros(layout.shards, device=world.device)
    with _together(world, path):
        if world.rank == 0:
            before = read_manifest(path)
            if before is not None and (told := before.identity.difference(identity)):
                raise GramianError(
                    f"cache: {path} holds another cache ({told}); expected another folder, or the same {told.split()[0]}"
                )
            if before is None and any(path.glob("shards/*")):
                raise GramianError(f"cache: {path} holds shards without a manifest; expected another folder")
            records = {shard: _shard_record(path, layout, shard) for shard in range(layout.shards)}
            found = [shard for shard, record in records.items() if record is None]
            whole = before is not None and before.complete and _head_is_whole(path, before)
            _refuse_damaged(
                path, [record for record in records.values() if record is not None], before if whole else None
            )
            if found or not whole:
                _prepare(path, identity, teacher, found)
            missing[found] = 1.0
    return [int(shard) for shard in world.sum_(missing).nonzero().flatten().tolist()]


def _prepare(path: Path, identity: Identity, teacher: LiveTeacher, missing: Sequence[int]) -> None:
    (path / "shards").mkdir(parents=True, exist_ok=True)
    layout, head = identity.layout, teacher.head
    whole = head.weight_VD.nbytes if identity.kind == Hidden.name else 0
    needed, free = sum(layout.shard_bytes(shard) for shard in missing) + whole, shutil.disk_usage(path).free
    if needed > free:
        raise GramianError(
            f"cache: {path} has {free / 1e9:.3g} GB free, {needed / 1e9:.3g} GB are needed "
            f"({layout.bytes_per_token} bytes per token); expected more space, or another kind of cache"
        )
    files = {HEAD: write_whole(path / HEAD, _head_bytes(teacher))} if whole else {}
    Manifest(identity, complete=False, files=files).write(path)


def _head_bytes(teacher: LiveTeacher) -> bytes:
    from safetensors.torch import save

    head = teacher.head
    tensors = {"weight": head.weight_VD} | ({} if head.bias_V is None else {"bias": head.bias_V})
    content: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return content


def _shard_record(path: Path, layout: CacheLayout, shard: int) -> dict[str, Any] | None:
    """The record of a shard that is there with all its files; None otherwise."""
    try:
        record = read_json(path / layout.record(shard))
    except GramianError:
        return None
    if record is None or set(record["files"]) != set(layout.files(shard).values()):
        return None
    for name, told in record["files"].items():
        if damage(path / name, FileRecord(*told), content=False) is not None:
            return None
    return record


def _refuse_damaged(path: Path, shards: Iterable[Mapping[str, Any]], manifest: Manifest | None) -> None:
    """Raise for a file of the right size whose content is not what was written. Cost: reads these files once.

    Args:
        path: of the cache.
        shards: records of those that are there.
        manifest: of a finished cache, whose head is there.

    Raises:
        GramianError: naming the file.
    """
    for record in shards:
        refuse_damage(path, {name: FileRecord(*told) for name, told in record["files"].items()}, content=True)
    if manifest is not None and HEAD in manifest.files:
        refuse_damage(path, {HEAD: manifest.files[HEAD]}, content=True)


def _head_is_whole(path: Path, manifest: Manifest) -> bool:
    return all(
        damage(path / name, record, content=False) is None for name, record in manifest.files.items() if name == HEAD
    )


def _conclude(path: Path, identity: Identity) -> None:
    """The last word: all records in one manifest."""
    before = read_manifest(path)
    assert before is not None
    if before.complete:
        return
    layout, files, errors, measured = identity.layout, dict(before.files), [], 0
    for shard in range(layout.shards):
        record = _shard_record(path, layout, shard)
        if record is None:
            raise GramianError(f"cache: {path / layout.record(shard)} is gone; expected nobody else in the folder")
        files |= {name: FileRecord(*told) for name, told in record["files"].items()}
        errors.append(Errors.from_plain(record["errors"]))
        measured += record["measured_windows"]
    Manifest(identity, True, files, added(errors), measured).write(path)


# ---- processes -------------------------------------------------------------------------------------------------------------


@contextmanager
def _together(world: World, path: Path) -> Iterator[None]:
    """All processes leave this block well, or none does: the one that failed says why."""
    problem: GramianError | None = None
    try:
        with told_in_one_line(path):
            yield
    except GramianError as mine:
        problem = mine
    if world.most(float(problem is not None)):
        raise problem or GramianError("cache: another process could not go on; its own line says why")


@contextmanager
def _taken(path: Path, world: World) -> Iterator[None]:
    """One group of builders at a time."""
    lock: int | None = None
    try:
        with _together(world, path):
            path.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise GramianError(f"cache: {path} is being built by others; expected them to end") from None
        yield
    finally:
        if lock is not None:
            os.close(lock)
