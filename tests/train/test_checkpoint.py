"""Checkpoints: whole or not there, the newest that verifies, older ones where one is damaged, and a run that goes on."""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from gramian.core import durable_files
from gramian.core.errors import GramianError
from gramian.train.state.checkpoint import CheckpointStore, LoadedCheckpoint
from gramian.train.state.sharded_checkpoint import read_parts
from gramian.train.state.snapshot import Snapshot, Snapshots
from gramian.train.state.tensor_parts import Extent, full_extent
from tests.kit.matrix import FULL, examples
from tests.kit.waiting import PATIENCE
from tests.train.test_snapshot import DTYPES, addresses, filled, raw

HASH = "abc"


def state(step: int, size: int = 50) -> dict[str, Tensor]:
    """A state that only this step has."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(size, 3, generator=generator),
        "model.half": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.w.step": torch.tensor(float(step)),
        "model.empty": torch.zeros(0, 2),
    }


def snapshot(step: int, config_hash: str | None = HASH, **facts: Any) -> Snapshot:
    return Snapshots(1).take(step, state(step), {"step": step, "config_hash": config_hash, **facts})


def assert_is(loaded: LoadedCheckpoint | None, step: int) -> None:
    assert loaded is not None and loaded.step == step and loaded.facts["step"] == step
    tensors = loaded.tensors()
    assert tensors.keys() == state(step).keys()
    for name, t in state(step).items():
        assert tensors[name].dtype == t.dtype and tensors[name].shape == t.shape and raw(tensors[name]) == raw(t), name


def folders(path: Path) -> list[str]:
    return sorted(os.listdir(path))


class Store(CheckpointStore):
    """One that remembers its events."""

    def __init__(self, folder: Path, keep: int = 3, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        super().__init__(folder, keep, on_event=self.events.append, **options)

    def reasons(self, kind: str = "checkpoint_skipped") -> list[str]:
        return [
            f"{e.get('folder', e.get('step'))}: {e.get('reason', e.get('error'))}"
            for e in self.events
            if e["event"] == kind
        ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run" / "checkpoints") as store:
        yield store


def written(store: CheckpointStore, *steps: int, **options: Any) -> None:
    for step in steps:
        store.write(snapshot(step), **options)
    assert store.wait() == []


# ---- what is written is read -------------------------------------------------------------------------------------------


def test_the_newest_is_read_back_bit_for_bit(store: Store) -> None:
    assert store.newest() is None and store.best() is None
    assert not store.folder.exists()  # nothing is made by looking
    written(store, 1, 2)
    loaded = store.newest(HASH)
    assert_is(loaded, 2)
    assert loaded.facts["config_hash"] == HASH and not loaded.best and loaded.folder.name == "step-00000002"
    assert loaded.shapes["model.w"] == (50, 3) and loaded.dtypes["model.half"] == torch.bfloat16
    assert [(e["event"], e["step"]) for e in store.events if e["event"] != "checkpoint_waited"] == [
        ("checkpoint_written", 1),
        ("checkpoint_written", 2),
    ]
    assert_is(Store(store.folder).newest(HASH), 2)


@settings(max_examples=examples(25))
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 999)),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=4), st.integers() | st.floats(allow_nan=False) | st.text(max_size=4), max_size=3),
)
def test_any_state_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    spec: dict[str, tuple[tuple[int, ...], torch.dtype, int]],
    facts: dict[str, Any],
) -> None:
    tensors = {name: filled(*parts) for name, parts in spec.items()}
    with Store(tmp_path_factory.mktemp("any")) as store:
        store.write(Snapshots(1).take(5, tensors, facts))
        loaded = store.newest()
        assert store.wait() == [] and loaded is not None
        assert loaded.facts == facts
        back = loaded.tensors()
    assert {name: (t.dtype, t.shape, raw(t)) for name, t in back.items()} == {
        name: (t.dtype, t.shape, raw(t)) for name, t in tensors.items()
    }


def test_the_files_are_plain_safetensors_and_json_in_large_pieces_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "CHUNK", 100)
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:64]))  # a write may take less than it got
    written(store, 3)
    folder = store.newest().folder
    assert all(raw(t) == raw(state(3)[name]) for name, t in load_file(folder / "state.safetensors").items())
    assert json.loads((folder / "facts.json").read_text()) == {"step": 3, "config_hash": HASH}
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert body["step"] == 3 and body["config_hash"] == HASH and set(body["tensors"]) == set(state(3))
    for name in ("state.safetensors", "facts.json"):
        data = (folder / name).read_bytes()
        assert body["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Store(tmp_path / "checkpoints") as store:
            written(store, 1)
            folder = store.newest().folder
    finally:
        os.umask(before)
    for path in (store.folder, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_unpickled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written(store, 4)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    loaded = store.newest()
    assert_is(loaded, 4)
    parts = read_parts(  # the way of sharded states
        loaded.folder, {name: full_extent(shape) for name, shape in loaded.shapes.items()}, loaded.dtypes
    )
    assert all(raw(part.local) == raw(state(4)[name]) for name, part in parts.items())


def test_a_part_of_a_tensor_can_be_read(store: Store) -> None:
    written(store, 2)
    loaded = store.newest()
    parts = loaded.parts({"model.w": Extent((50, 3), (20, 0), (7, 3), True)})
    assert torch.equal(parts["model.w"].local, state(2)["model.w"][20:27])
    assert raw(parts["model.half"].local) == raw(state(2)["model.half"])
    assert parts["optimizer.w.step"].local == 2 and parts["optimizer.w.step"].local.shape == ()


# ---- in the background -------------------------------------------------------------------------------------------------


class Gate:
    """Stops the writer inside `fsync`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real = os.fsync

        def fsync(handle: int) -> None:
            self.reached.set()
            assert self.go.wait(PATIENCE)
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


def test_write_returns_before_the_file_is_there_and_the_next_one_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.mkdir(parents=True)
    gate = Gate(monkeypatch)
    store.write(snapshot(1))
    assert gate.reached.wait(PATIENCE)
    assert folders(store.folder) == [".tmp-00000001"]
    finish = store._finish_save
    monkeypatch.setattr(store, "_finish_save", lambda: (gate.go.set(), finish()))  # it goes on once it is waited for
    store.write(snapshot(2))
    assert "step-00000001" in folders(store.folder)  # nothing is left out
    assert [e["step"] for e in store.events if e["event"] == "checkpoint_waited"] == [2]
    store.close()
    assert folders(store.folder) == ["step-00000001", "step-00000002"]


def test_training_and_dropping_go_on_under_a_save(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.folder.mkdir(parents=True)
    gate = Gate(monkeypatch)
    monkeypatch.setattr(durable_files, "CHUNK", 16)
    snapshots, tensors = Snapshots(1), state(1)
    store.write(snapshots.take(1, tensors, {"step": 1}))
    assert gate.reached.wait(PATIENCE)
    seen = set()
    for step in range(2, 6):
        for t in tensors.values():
            t.add_(1)
        seen |= addresses(snapshots.take(step, tensors, {}))
    gate.go.set()
    store.wait()
    assert_is(store.newest(), 1)
    more = seen | addresses(snapshots.take(6, tensors, {})) | addresses(snapshots.take(7, tensors, {}))
    assert len(more) <= len(seen) + len(tensors)  # the writer has let go of its snapshot


def test_the_snapshot_is_let_go_of_after_the_save(store: Store) -> None:
    mine = snapshot(1)
    watched = weakref.ref(mine)
    store.write(mine)
    del mine
    assert store.wait() == []
    assert watched() is None


def test_close_finishes_what_was_begun(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=9)
    for step in range(4):
        store.write(snapshot(step))
    assert store.close() == []
    assert [name for name in folders(tmp_path)] == [f"step-{step:08d}" for step in range(4)]


def test_the_order_on_disk_is_files_then_manifest_then_rename_then_parent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(store, 1)
    log: list[str] = []
    real_sync, real_rename, real_open = os.fsync, os.rename, os.open

    def fsync(handle: int) -> None:
        log.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_sync(handle)

    def rename(old: Any, new: Any) -> None:
        log.append(f"rename {Path(old).name} {Path(new).name}")
        real_rename(old, new)

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            log.append(f"create {Path(path).name}")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "open", opened)
    written(store, 2)
    assert log == [
        "create state.safetensors",
        "sync state.safetensors",
        "create facts.json",
        "sync facts.json",
        "create manifest.json",
        "sync manifest.json",
        "sync .tmp-00000002",
        "rename .tmp-00000002 step-00000002",
        "sync checkpoints",
    ]


# ---- which are kept ----------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    with Store(tmp_path, keep=2) as store:
        written(store, 10)
        written(store, 20, best=True)
        written(store, 30, 40, 50)
        assert folders(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]
        assert_is(store.best(), 20)
        assert store.best().best and not store.newest().best
        written(store, 60, best=True)
        assert folders(tmp_path) == ["step-00000050", "step-00000060"]
        written(store, 70, 80)
    with Store(tmp_path, keep=2) as store:  # another process knows as much
        assert_is(store.best(), 60)
        written(store, 90)
        assert folders(tmp_path) == ["step-00000060", "step-00000080", "step-00000090"]
        assert_is(store.newest(), 90)


def test_the_best_stays_until_a_better_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path, keep=1) as store:
        written(store, 1, best=True)
        written(store, 2, 3)
        full(monkeypatch)
        store.write(snapshot(4), best=True)
        assert len(store.wait()) == 1
        monkeypatch.undo()
        assert folders(tmp_path) == ["step-00000001", "step-00000003"]
        assert_is(store.best(), 1)


def test_a_second_checkpoint_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with Store(tmp_path, keep=2) as store:
        written(store, 1, 2)
        store.write(Snapshots(1).take(2, state(2), {"step": 2, "config_hash": HASH, "second": True}), best=True)
        loaded = store.newest()
        assert_is(loaded, 2)
        assert loaded.facts["second"] and loaded.folder.name == "step-00000002.1"
        assert folders(tmp_path) == ["step-00000001", "step-00000002.1"]
        written(store, 2)
        assert store.newest().folder.name == "step-00000002.2"
        assert folders(tmp_path) == ["step-00000001", "step-00000002.1", "step-00000002.2"]  # .1 is the best
        written(store, 3)
        assert folders(tmp_path) == ["step-00000002.1", "step-00000002.2", "step-00000003"]


def test_after_a_rollback_later_ones_are_no_way_to_resume(tmp_path: Path) -> None:
    with Store(tmp_path, keep=5) as store:
        written(store, 10, 20, 30)
        written(store, 40, best=True)
        store.drop_after(20)
        assert folders(tmp_path) == ["best-00000040", "step-00000010", "step-00000020"]
        assert_is(store.newest(), 20)
        assert_is(store.best(), 40)
        assert store.reasons("checkpoint_dropped") == ["step-00000030: after step 20", "step-00000040: after step 20"]
        written(store, 30)
        assert_is(store.newest(), 30)
        written(store, 35, best=True)
        assert folders(tmp_path) == [f"step-{step:08d}" for step in (10, 20, 30, 35)]
        assert_is(store.best(), 35)


def test_checkpoints_of_another_config_are_neither_used_nor_dropped(tmp_path: Path) -> None:
    with Store(tmp_path, keep=1) as store:
        store.write(snapshot(100, "other"))
        store.write(snapshot(0, "third"))
        written(store, 1, 2)
        assert folders(tmp_path) == ["step-00000000", "step-00000002", "step-00000100"]
        assert_is(store.newest(HASH), 2)
        assert store.reasons() == ["step-00000100: manifest.json: has config hash other; expected abc"]
        assert_is(store.newest(), 100)
        assert store.newest("fourth") is None


# ---- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("state.safetensors", flip, "state.safetensors: its checksum differs"),
    ("state.safetensors", cut, r"state.safetensors: has \d+ bytes; expected \d+"),
    ("state.safetensors", lambda path: path.write_bytes(b""), "state.safetensors: has 0 bytes; expected"),
    ("state.safetensors", Path.unlink, "state.safetensors: is missing"),
    ("facts.json", flip, "facts.json: its checksum differs"),
    ("facts.json", Path.unlink, "facts.json: is missing"),
    ("manifest.json", Path.unlink, "manifest.json: is missing"),
    ("manifest.json", cut, "manifest.json: is damaged"),
    ("manifest.json", lambda path: path.write_text("[1]"), "manifest.json: is damaged"),
    ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json: is damaged"),
    (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"step": 20', '"step": 21')),
        "manifest.json: its checksum differs",
    ),
]


@pytest.mark.parametrize("name, damage, reason", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_word_about_it(
    store: Store, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    written(store, 10, 20)
    damage(store.folder / "step-00000020" / name)
    with Store(store.folder) as other:
        assert_is(other.newest(HASH), 10)
        assert len(other.reasons()) == 1 and re.match(f"step-00000020: {reason}", other.reasons()[0])


@pytest.mark.parametrize("byte", range(0, 1000, 20 if FULL else 97))
def test_no_byte_can_change_unnoticed(tmp_path: Path, byte: int) -> None:
    with Store(tmp_path) as store:
        written(store, 1, 2)
        files = sorted((tmp_path / "step-00000002").iterdir())
        total = sum(path.stat().st_size for path in files)
        at = byte * total // 1000
        for path in files:
            if at < path.stat().st_size:
                flip(path, at)
                break
            at -= path.stat().st_size
        assert_is(store.newest(), 1)
        assert len(store.reasons()) == 1


def test_one_damaged_and_one_before_it_and_one_of_another_config(store: Store) -> None:
    written(store, 1, 2)
    store.write(snapshot(3, "other"))
    store.wait()
    flip(store.folder / "step-00000002" / "state.safetensors")
    (store.folder / "step-00000004").mkdir()
    (store.folder / "step-00000005").write_text("a file")
    assert_is(store.newest(HASH), 1)
    assert [reason.split(":")[0] for reason in store.reasons()] == [f"step-0000000{step}" for step in (5, 4, 3, 2)]
    assert [*store.refused] == [f"step-0000000{step}" for step in (5, 4, 3, 2)]
    assert_is(store.newest(HASH, upto=1), 1)
    assert not store.refused
    store.drop_after(1)
    assert (store.folder / "step-00000005").read_text() == "a file"


def test_a_damaged_best_gives_way_to_the_one_before(tmp_path: Path) -> None:
    with Store(tmp_path, keep=9) as store:
        written(store, 1, best=True)
        (tmp_path / "step-00000001").rename(tmp_path / "aside")
        written(store, 2, best=True)
        (tmp_path / "aside").rename(tmp_path / "step-00000001")
        written(store, 3)
        flip(tmp_path / "step-00000002" / "state.safetensors")
        assert_is(store.best(), 1)
        assert store.reasons() == ["step-00000002: state.safetensors: its checksum differs"]


def test_a_run_resumed_from_before_damaged_ones_keeps_what_it_writes(tmp_path: Path) -> None:
    with Store(tmp_path, keep=3) as store:
        written(store, 10, 20, 30)
    for step in (20, 30):
        flip(tmp_path / f"step-{step:08d}" / "state.safetensors")
    with Store(tmp_path, keep=2) as store:
        assert_is(store.newest(), 10)
        written(store, 12, 14)
        assert folders(tmp_path) == [f"step-{step:08d}" for step in (12, 14, 20, 30)]
        written(store, 20)
        assert_is(store.newest(), 20)
        store.drop_after(14)
        assert folders(tmp_path) == ["step-00000014"]


# ---- failures ----------------------------------------------------------------------------------------------------------


def full(monkeypatch: pytest.MonkeyPatch, after: int = 2) -> None:
    """A disk that takes so many writes."""
    real, left = os.write, [after]

    def write(handle: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("after", range(7))
def test_a_full_disk_is_told_once_and_older_checkpoints_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    written(store, 1)
    full(monkeypatch, after)
    store.write(snapshot(2))
    if after < 6:  # header, two tensors that are not empty and the step, facts, manifest
        errors = store.wait()
        assert [str(error) for error in errors] == [
            f"{store.folder}: step 2 was not saved (OSError: [Errno 28] No space left on device); "
            "expected a disk with room for it"
        ]
        assert store.reasons("checkpoint_failed") == [f"2: {errors[0]}"]
    assert store.wait() == []
    monkeypatch.undo()
    if after < 6:
        assert folders(store.folder) == ["step-00000001"]  # the room is given back, too
        assert_is(store.newest(), 1)
        written(store, 3)
        assert_is(store.newest(), 3)
    else:
        assert_is(store.newest(), 2)


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_other_io_errors_leave_older_checkpoints_too(
    store: Store, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    written(store, 1)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, function, refuse)
    store.write(snapshot(2))
    assert "Input/output error" in str(store.wait()[0])
    monkeypatch.undo()
    assert_is(store.newest(), 1)
    assert folders(store.folder) == ["step-00000001"]


def test_a_dtype_that_no_file_holds_is_a_failed_save(store: Store) -> None:
    store.write(Snapshots(1).take(1, {"z": torch.zeros(2, dtype=torch.complex128)}, {}))
    assert "z: has dtype torch.complex128; expected" in str(store.wait()[0])
    assert folders(store.folder) == []


def test_what_cannot_be_pruned_is_told_and_the_new_one_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep = 1
    written(store, 1)
    real = os.rename

    def rename(old: Any, new: Any) -> None:
        if "dropped" in str(new):
            raise OSError(errno.EPERM, "Operation not permitted")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    written(store, 2)
    assert_is(store.newest(), 2)
    assert [e["event"] for e in store.events][-2:] == ["checkpoint_not_pruned", "checkpoint_written"]


def test_a_folder_that_cannot_be_made_fails_the_save_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with Store(tmp_path / "file" / "checkpoints") as store:
        store.write(snapshot(1))
        assert len(store.wait()) == 1
    with Store(tmp_path / "file") as store, pytest.raises(GramianError, match="Not a directory; expected a folder"):
        store.newest()


def test_remains_of_killed_saves_are_removed_by_the_first_write_not_by_looking(tmp_path: Path) -> None:
    (tmp_path / ".tmp-00000009").mkdir()
    (tmp_path / ".tmp-00000009" / "state.safetensors").write_text("half")
    (tmp_path / ".tmp-dropped-step-00000001").mkdir()
    (tmp_path / ".tmp-dropped-step-00000001" / "facts.json").write_text("{}")
    with Store(tmp_path) as store:
        assert store.newest() is None
        assert len(folders(tmp_path)) == 2
        written(store, 1)
        assert folders(tmp_path) == ["step-00000001"]
        (tmp_path / ".tmp-dropped-step-00000001" / "more").mkdir(parents=True)
        store.drop_after(0)
        assert folders(tmp_path) == []


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    for keep in (0, 1.5, True):
        with pytest.raises(GramianError, match="^keep: .*; expected an integer of at least 1"):
            CheckpointStore(tmp_path, keep)
    with pytest.raises(
        GramianError, match="^world_size: 2, but torch.distributed .*; expected its rank and world size"
    ):
        CheckpointStore(tmp_path, 1, 0, 2)


# ---- killed ------------------------------------------------------------------------------------------------------------

KEEP = 2


def save_for_ever(folder: Path, calls: int) -> None:
    """Save until killed: by this process itself at the n-th call that touches the disk, unless calls is 0."""
    left = [calls]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close") if calls else ():
        setattr(os, name, counted(getattr(os, name)))
    store = Store(folder, KEEP)
    for step in range(1, 10**6):
        store.write(snapshot(step), best=step % 3 == 1)


def save_with_a_limit(folder: Path) -> None:
    """A save that fits the limit on the size of a file, and one that does not."""
    with Store(folder) as store:
        written(store, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        store.write(Snapshots(1).take(2, state(2, size=5000), {"step": 2}))
        assert "File too large" in str(store.wait()[0])


def serve() -> None:
    """Answer lines of folder, calls and delay with how a child that saves there ended: -9 for killed, else its exit code."""
    for line in sys.stdin:
        folder, calls, delay = line.split()
        child = os.fork()
        if child == 0:
            try:
                save_with_a_limit(Path(folder)) if int(calls) < 0 else save_for_ever(Path(folder), int(calls))
                os._exit(0)
            finally:
                os._exit(1)
        if float(delay):
            time.sleep(float(delay))
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


Child = Callable[[Path, int, float], int]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Run a child of a process that has imported everything already; see `serve`."""
    command = [sys.executable, "-c", "from tests.train.test_checkpoint import serve; serve()"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(folder: Path, calls: int, delay: float) -> int:
        server.stdin.write(f"{folder} {calls} {delay}\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield run
    server.stdin.close()
    server.wait(PATIENCE)


def assert_survives(folder: Path) -> int:
    """The newest verifies and is a state that was written, bit for bit; so is the best; then the run goes on."""
    complete = [name for name in folders(folder) if not name.startswith(".tmp-")]
    for name in complete:  # older ones, too: none is half removed
        assert set(json.loads((folder / name / "manifest.json").read_text())["manifest"]["files"]) < set(
            os.listdir(folder / name)
        )
    with Store(folder, KEEP) as store:
        newest = store.newest(HASH)
        assert store.reasons() == []
        if newest is None:
            assert complete == []
            return 0
        assert_is(newest, newest.step)
        assert newest.folder.name == complete[-1]
        assert_is(store.best(HASH), (newest.step - 1) // 3 * 3 + 1)
        step = newest.step + 1
        written(store, step)
        assert_is(store.newest(HASH), step)
        assert len(folders(folder)) <= KEEP + 1
        return newest.step


@pytest.mark.full
def test_a_process_killed_at_any_call_that_touches_the_disk_leaves_whole_checkpoints(
    tmp_path: Path, child: Child
) -> None:
    reached = []
    for calls in range(1, 140, 1 if FULL else 23):
        (tmp_path / str(calls)).mkdir()
        assert child(tmp_path / str(calls), calls, 0.0) == -signal.SIGKILL
        reached.append(assert_survives(tmp_path / str(calls)))
    assert reached[0] == 0 and reached[-1] > KEEP + 1  # from inside the first save to well into pruning


@pytest.mark.full
def test_a_process_killed_at_any_time_leaves_whole_checkpoints(tmp_path: Path, child: Child) -> None:
    reached, longest = [0], 0.3
    while len(reached) < 40 or not any(reached):
        folder = tmp_path / str(len(reached))
        folder.mkdir()
        assert child(folder, 0, random.uniform(0.005, longest)) == -signal.SIGKILL
        reached.append(assert_survives(folder))
        longest *= 1 if any(reached) else 1.5  # until a busy machine has saved once


@pytest.mark.full
def test_a_limit_on_the_size_of_a_file_is_a_failed_save(tmp_path: Path, child: Child) -> None:
    assert child(tmp_path, -1, 0.0) == 0
    with Store(tmp_path) as store:
        assert_is(store.newest(), 1)
    assert folders(tmp_path) == ["step-00000001"]
