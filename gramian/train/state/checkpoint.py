"""Checkpoints on disk: complete or absent, verified before they are used, read without running code.

A checkpoint is a folder `step-00000123` of safetensors files, `facts.json` and `manifest.json`, which lists every file with its
size and SHA-256 and has a checksum of its own. It is written as `.tmp-00000123`: every file is synced, the manifest last; then
the folder is renamed, and its parent synced. Files have mode 0600, folders 0700, because the key of a private run is inside.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from gramian.core.durable_files import TEMPORARY, FileRecord, sync_path
from gramian.core.errors import GramianError
from gramian.parallel.exchange import Exchange
from gramian.train.state.checkpoint_files import (
    DTYPES,
    MANIFEST,
    read_manifest,
    read_tensors,
    write_file,
    write_manifest,
    write_tensors,
)
from gramian.train.state.snapshot import Snapshot
from gramian.train.state.tensor_parts import Extent, Part, full_extent

FACTS, STATE = "facts.json", "state.safetensors"
NOT_MEANT, FOREIGN = "", f"{MANIFEST}: has config hash"
"""Reasons to skip a checkpoint that is not damaged: it is not the best, or its config hash differs."""
_FOLDER = re.compile(r"(step|best)-(\d{8,})(?:\.(\d+))?")

Event = dict[str, Any]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint on disk whose files match its manifest; its tensors are read on demand."""

    folder: Path
    step: int
    best: bool
    facts: dict[str, Any] = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Shapes of the full saved tensors, {name: shape}."""
    dtypes: dict[str, torch.dtype] = field(repr=False)
    sharded: bool = False

    def parts(self, extents: Mapping[str, Extent] | None = None) -> dict[str, Part]:
        """Read saved tensors into host memory: the boxes (index ranges) of `extents`, and all of a tensor not named there.

        A checkpoint of any number of processes is read by any number; nothing is communicated. Raises a GramianError if a file
        cannot be read.
        """
        needed = {name: (extents or {}).get(name, full_extent(shape)) for name, shape in self.shapes.items()}
        try:
            if self.sharded or any(extent.sharded for extent in needed.values()):
                from gramian.train.state.sharded_checkpoint import read_parts

                return read_parts(self.folder, needed, self.dtypes)
            tensors = read_tensors(self.folder / STATE)
            return {name: Part(extent, tensors[name]) for name, extent in needed.items()}
        except OSError as reason:
            raise GramianError(f"{self.folder}: {reason}; expected the checkpoint that was verified") from None

    def tensors(self) -> dict[str, Tensor]:
        """Read all saved tensors in full into host memory, {name: tensor}."""
        return {name: part.local for name, part in self.parts().items()}


class CheckpointStore:
    """The checkpoints of a run on disk; they are written in the background.

    One thread writes. It works on host copies, and hashing, `write` and `fsync` release the interpreter lock, so training goes
    on; another process would need a second copy of the state in shared memory, and starting it beside CUDA costs seconds. One
    save runs at a time: the next `write` waits for it, so no checkpoint is lost and all processes write the same ones. A save
    that fails is reported, the run goes on, and older checkpoints stay.

    Rank 0 alone writes states that are not sharded. For a state sharded by FSDP2 every process writes its shards, with
    `torch.distributed.checkpoint` over a gloo group of the store's own: then the constructor, `write`, `newest`, `best` and
    `close` are called by all processes in the same order, and all must see the folder. Before the first `write` nothing is
    created, and nothing that killed saves left is removed.

    Args:
        folder: folder of the checkpoints; created if it does not exist.
        keep: number of newest checkpoints that are kept, beside the best.
        rank: rank of this process.
        world_size: number of processes.
        on_event: called with {"event": "checkpoint_…", …}, also from the writing thread: written, failed, waited (by `write`),
            skipped (by `newest` or `best`, with the reason), dropped, not_pruned.

    Raises:
        GramianError: if `keep` is below 1, or rank and world_size are not those of torch.distributed.

    Example:
        >>> with CheckpointStore(folder, keep=3) as store:  # doctest: +SKIP
        ...     store.write(snapshots.take(100, tensors, facts))
        ...     store.newest().step
        100
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise GramianError(f"keep: {keep!r}; expected an integer of at least 1")
        if world_size > 1 and not (
            dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        ):
            raise GramianError(
                f"world_size: {world_size}, but torch.distributed has not that many; expected its rank and world size"
            )
        self.folder, self.keep, self.rank, self.world_size = Path(folder), keep, rank, world_size
        self._on_event = on_event or (lambda event: None)
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._save: Future[None] | None = None
        self._errors: list[GramianError] = []
        self._damaged: set[str] = set()
        self.refused: dict[str, str] = {}
        """{folder: reason} of checkpoints that the last search skipped as damaged or of another config, newest first."""
        self._clean = False

    # ---- writing -------------------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, *, best: bool = False) -> None:
        """Start to write a snapshot to disk, after the previous save is done; the caller need not keep the snapshot.

        Its fact `config_hash` is written into the manifest. The best checkpoint so far is kept until a better one is complete.
        Raises a GramianError if the snapshot is sharded and the store has one process.
        """
        if snapshot.sharded and self.world_size == 1:
            raise GramianError(
                "world_size: 1, but the snapshot is sharded over several processes; expected their number"
            )
        if self._save is not None and not self._save.done():
            started = time.perf_counter()
            self._finish_save()
            seconds = time.perf_counter() - started
            self._on_event({"event": "checkpoint_waited", "step": snapshot.step, "seconds": seconds})
        self._finish_save()
        if snapshot.sharded or self.rank == 0:
            self._save = self._thread.submit(self._write, snapshot, best)

    def wait(self) -> list[GramianError]:
        """Wait until no checkpoint is being written; returns the errors of saves since the last call."""
        self._finish_save()
        errors, self._errors = self._errors, []
        return errors

    def close(self) -> list[GramianError]:
        """Finish the save that is running, and end the writing thread; returns the errors of saves since the last `wait`."""
        errors = self.wait()
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        return errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def drop_after(self, step: int) -> None:
        """Remove checkpoints of later steps, as after a rollback to `step` or a resume from an older checkpoint.

        The best of them stays for `best`, under the name `best-…`; `newest` ignores it.
        """
        self._finish_save()
        if self.rank != 0:
            return
        try:
            for path in self._folders():
                kind, number, _ = _parsed(path.name)
                if kind == "step" and number > step:
                    self._abandon(path)
                    self._on_event({"event": "checkpoint_dropped", "folder": path.name, "reason": f"after step {step}"})
        except OSError as reason:
            raise GramianError(f"{self.folder}: {reason}; expected a folder that can be written") from None

    def _abandon(self, path: Path) -> None:
        manifest = read_manifest(path)[0] if path.name not in self._damaged else None
        if manifest is not None and manifest["best"]:
            os.rename(path, path.with_name(path.name.replace("step", "best", 1)))
        else:
            self._remove(path)
        sync_path(self.folder)

    def _finish_save(self) -> None:
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def _write(self, snapshot: Snapshot, best: bool) -> None:
        """Write one checkpoint; runs in the writing thread. A failure becomes an event and an error for `wait`."""
        started = time.perf_counter()
        try:
            if snapshot.sharded:
                from gramian.train.state.sharded_checkpoint import write_shards

                assert self._group is not None
                write_shards(snapshot, self._group, self._begin, lambda *made: self._complete(*made, best=best))
            else:
                temporary = self._begin(snapshot.step)
                record = write_tensors(temporary / STATE, {name: part.local for name, part in snapshot.parts.items()})
                self._complete(snapshot, temporary, {STATE: record}, best=best)
        except Exception as reason:  # a run goes on without this checkpoint, whatever failed in the thread
            error = GramianError(
                f"{self.folder}: step {snapshot.step} was not saved ({_one_line(reason)}); expected a disk with room for it"
            )
            self._errors.append(error)
            if self.rank == 0:
                shutil.rmtree(self._temporary(snapshot.step), ignore_errors=True)
            self._on_event({"event": "checkpoint_failed", "step": snapshot.step, "error": str(error)})
            return
        event: Event = {"event": "checkpoint_written", "step": snapshot.step, "best": best, "bytes": snapshot.nbytes}
        self._on_event({**event, "seconds": time.perf_counter() - started})

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{TEMPORARY}{step:08d}"

    def _begin(self, step: int) -> Path:
        """Create the empty temporary folder of a step's checkpoint (rank 0); first call: remove those of killed processes."""
        temporary = self._temporary(step)
        if not self.folder.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_path(self.folder.parent)
        if not self._clean:
            for path in self.folder.glob(f"{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)
            self._clean = True
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        return temporary

    def _complete(self, snapshot: Snapshot, temporary: Path, files: dict[str, FileRecord], *, best: bool) -> None:
        """Write facts and manifest of a checkpoint, give its folder the final name, and remove older checkpoints (rank 0)."""
        files[FACTS] = write_file(temporary / FACTS, [snapshot.facts_text.encode()])
        shapes = {name: [DTYPES[part.local.dtype], list(part.extent.shape)] for name, part in snapshot.parts.items()}
        write_manifest(temporary, snapshot.step, best, snapshot.facts.get("config_hash"), files, shapes)
        sync_path(temporary)
        attempts = [attempt for _, step, attempt in map(_parsed, self._names()) if step == snapshot.step]
        suffix = f".{max(attempts) + 1}" if attempts else ""
        final = self.folder / f"step-{snapshot.step:08d}{suffix}"
        os.rename(temporary, final)
        sync_path(self.folder)
        try:
            self._prune(final)
        except OSError as reason:  # the new one is complete all the same
            self._on_event({"event": "checkpoint_not_pruned", "folder": str(self.folder), "error": str(reason)})

    def _prune(self, written: Path) -> None:
        """Remove all checkpoints of this run but the newest `keep`, the best and damaged ones."""
        manifests = {path: read_manifest(path)[0] for path in self._folders() if path.name not in self._damaged}
        mine = manifests[written]
        assert mine is not None
        own = [path for path, body in manifests.items() if body and body["config_hash"] == mine["config_hash"]]
        latest = {_parsed(path.name)[1]: path for path in own if path.name.startswith("step")}
        stay = {written, *list(latest.values())[-self.keep :]}
        bests = [path for path in own if (manifests[path] or {})["best"]]
        if bests and not mine["best"]:
            stay.add(bests[-1])
        for path in own:
            if path not in stay:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint's folder, then remove it: a process killed in between leaves nothing that looks like one."""
        doomed = path.with_name(f"{TEMPORARY}dropped-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        self._damaged.discard(path.name)  # the next one of that name is another
        shutil.rmtree(doomed)

    # ---- reading -------------------------------------------------------------------------------------------------------

    def newest(self, config_hash: str | None = None, upto: int | None = None) -> LoadedCheckpoint | None:
        """The newest intact checkpoint with this config hash, of step `upto` or before; None if there is none.

        `config_hash` or `upto` None: any. The result is the same on all processes, which divide the verification. Events report
        the checkpoints that were skipped, and why.
        """
        return self._first("step", config_hash, upto)

    def best(self, config_hash: str | None = None) -> LoadedCheckpoint | None:
        """The newest intact checkpoint that was written as the best, with this config hash (None: any); None without one."""
        return self._first("best", config_hash)

    def _first(self, wanted: str, config_hash: str | None, upto: int | None = None) -> LoadedCheckpoint | None:
        self._finish_save()
        self.refused = {}
        for name in reversed(self._share(self._names())[0]):
            if wanted == "step" and not name.startswith("step"):
                continue
            if upto is not None and _parsed(name)[1] > upto:
                continue
            path = self.folder / name
            body, problem = read_manifest(path)
            if body is not None and wanted == "best" and not body["best"]:
                problem = NOT_MEANT
            elif body is not None and config_hash is not None and body["config_hash"] != config_hash:
                problem = f"{FOREIGN} {body['config_hash']}; expected {config_hash}"
            elif body is not None:
                problem = self._damage(path, body)
            problems = [found for found in self._share(problem) if found is not None]
            if not problems:
                assert body is not None
                return _loaded(path, body)
            if problems[0] != NOT_MEANT:
                self.refused[name] = problems[0]
                self._on_event({"event": "checkpoint_skipped", "folder": name, "reason": problems[0]})
                if not problems[0].startswith(FOREIGN):
                    self._damaged.add(name)
        return None

    def _damage(self, path: Path, body: dict[str, Any]) -> str | None:
        """The first difference from the manifest in the checkpoint files that this process verifies; None if there is none."""
        for name in sorted(body["files"])[self.rank :: self.world_size]:
            problem = FileRecord(**body["files"][name]).difference(path / name)
            if problem is not None:
                return f"{name}: {problem}"
        return None

    def _share(self, value: Any) -> list[Any]:
        """The `value` of every process, in the order of ranks (collective)."""
        return [value] if self._group is None else Exchange(self._group, torch.device("cpu")).gather_messages(value)

    def _names(self) -> list[str]:
        """Names of checkpoint folders, oldest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as reason:
            raise GramianError(f"{self.folder}: {reason.strerror}; expected a folder of checkpoints") from None
        return sorted((name for name in names if _FOLDER.fullmatch(name)), key=lambda name: _parsed(name)[1:])

    def _folders(self) -> list[Path]:
        """Checkpoint folders that exist as folders, oldest first."""
        return [path for name in self._names() if (path := self.folder / name).is_dir()]


def _loaded(path: Path, body: dict[str, Any]) -> LoadedCheckpoint:
    known = {name: dtype for dtype, name in DTYPES.items()}
    return LoadedCheckpoint(
        folder=path,
        step=body["step"],
        best=body["best"],
        facts=json.loads((path / FACTS).read_bytes()),
        shapes={name: tuple(shape) for name, (_, shape) in body["tensors"].items()},
        dtypes={name: known[dtype] for name, (dtype, _) in body["tensors"].items()},
        sharded=STATE not in body["files"],
    )


def _parsed(name: str) -> tuple[str, int, int]:
    """Kind ("step" or "best"), step and attempt in a checkpoint folder's name; a step's second checkpoint is attempt 1."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return match[1], int(match[2]), int(match[3] or 0)


def _one_line(reason: Exception) -> str:
    return str(reason) if isinstance(reason, GramianError) else " ".join(f"{type(reason).__name__}: {reason}".split())
