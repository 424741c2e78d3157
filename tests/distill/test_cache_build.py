"""Builders that are killed, crowded, starved of disk or started twice; files that are damaged afterwards."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.core import durable_files
from gramian.core.errors import GramianError
from gramian.distill.cache import Cache, CacheOptions, Hidden, Samples, TopK, build_cache, open_cache, read_manifest
from gramian.distill.cache import builder as builder_module
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.parallel.process_grid import ProcessGrid
from tests.distill.teachers import batch_of, contents, gpt, windows
from tests.kit.matrix import FULL
from tests.kit.processes import run_on_ranks

DATA = windows(17, length=8)
KINDS = {"hidden": Hidden(), "topk": TopK(k=4), "sampled": Samples()}
kinds = pytest.mark.parametrize("kind", KINDS)


def options(kind: str) -> CacheOptions:
    return CacheOptions(KINDS[kind], batch=2, shard_windows=5)


def build(folder: Path, kind: str = "hidden", **more: Any) -> None:
    build_cache(folder, LiveTeacher(gpt(layers=1), layers=(1,)), DATA, options(kind), **more)


def built_and_told(folder: Path, kind: str) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    build(folder, kind, progress=lambda done, total: told.append((done, total)))
    return told


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    done: dict[str, dict[str, bytes]] = {}

    def files_of(kind: str) -> dict[str, bytes]:
        if kind not in done:
            folder = tmp_path_factory.mktemp("whole")
            build(folder, kind)
            done[kind] = contents(folder)
        return done[kind]

    return files_of


# ---- killed ----------------------------------------------------------------------------------------------------------------


def count_operations(folder: Path, kind: str, stop_at: int | None) -> int:
    """Build; kill this process before its n-th operation on files."""
    done = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal done
            if done == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return operation(*args, **named)

        return call

    kept = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "close")}
    for name, operation in kept.items():
        setattr(os, name, counted(operation))
    try:
        build(folder, kind)
    finally:
        for name, operation in kept.items():
            setattr(os, name, operation)
    return done


def killed_at(folder: Path, kind: str, operation: int) -> bool:
    """Build in a forked process; True if it was killed before its end."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            count_operations(folder, kind, operation)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in folder.glob("shards/*") if not path.name.startswith(".")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize("kind", [k if k == "topk" else pytest.param(k, marks=pytest.mark.full) for k in KINDS])
def test_a_builder_killed_at_any_moment_loses_one_shard_and_the_next_goes_on(
    kind: str, finished: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    operations = count_operations(tmp_path / "counted", kind, None)
    inside = {operations * i // 5 for i in range(5)}
    edges = (
        {*range(0, 12, 2), *range(operations - 8, operations, 2)} if kind == "hidden" else set()
    )  # manifests are written there
    moments = range(operations) if FULL else sorted(inside | edges)
    for moment in moments:
        folder = tmp_path / str(moment)
        assert killed_at(folder, kind, moment), moment
        whole = {path.stem for path in folder.glob("shards/[0-9]*.json")}
        begun = {path.name.removeprefix(".tmp-")[:5] for path in folder.glob("shards/*")}
        assert len(begun - whole) <= 1, moment
        if contents(folder) != finished(kind):  # else it was about to leave
            with pytest.raises(GramianError, match="is not finished|has no manifest.json"):
                open_cache(folder)
        before = stamps(folder)
        told = built_and_told(folder, kind)
        after = stamps(folder)
        for name, stamp in before.items():
            if name[:5] in whole:
                assert after[name] == stamp, (moment, name)  # not written again
        assert contents(folder) == finished(kind), moment
        assert told[0][0] == sum(min(5, 17 - 5 * int(shard)) for shard in whole) and told[-1] == (17, 17)


def test_killing_a_builder_that_has_many_shards_keeps_the_finished_ones(tmp_path: Path) -> None:
    """The sample above has moments inside every shard: here one late moment, to see that early shards are there."""
    torch.set_num_threads(1)
    operations = count_operations(tmp_path / "counted", "hidden", None)
    assert killed_at(tmp_path / "late", "hidden", operations - 12)
    assert len(list((tmp_path / "late").glob("shards/*.json"))) >= 3


@kinds
def test_a_finished_cache_is_recognised(kind: str, tmp_path: Path) -> None:
    build(tmp_path, kind)
    before = stamps(tmp_path), contents(tmp_path)
    assert built_and_told(tmp_path, kind) == [(17, 17)]
    assert (stamps(tmp_path), contents(tmp_path)) == before


def test_another_batch_size_goes_on_with_the_same_cache(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "shards/00001.json").unlink()
    teacher = LiveTeacher(gpt(layers=1), layers=(1,))
    build_cache(tmp_path, teacher, DATA, CacheOptions(Hidden(), batch=4, shard_windows=5))
    assert open_cache(tmp_path, verify="full").manifest.complete


def test_progress_is_told_window_by_window(tmp_path: Path) -> None:
    assert built_and_told(tmp_path, "hidden") == [(done, 17) for done in (0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17)]


# ---- damaged ---------------------------------------------------------------------------------------------------------------


def damaged_names(kind: str, folder: Path) -> list[str]:
    build(folder, kind)
    shards = "00001" if kind != "hidden" else ("00001", "00003")
    return [name for name in contents(folder) if not name.startswith("shards/") or name[7:12] in shards]


@kinds
def test_a_flipped_byte_is_found_in_every_file(kind: str, tmp_path: Path) -> None:
    for name in damaged_names(kind, tmp_path):
        if name.startswith("shards/") and name.endswith(".json"):
            continue  # of the builder: below
        whole = (tmp_path / name).read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[place] ^= 4
            (tmp_path / name).write_bytes(flipped)
            with pytest.raises(GramianError, match=f"^cache: .*{name}.*(checksum differs|is gone)"):
                open_cache(tmp_path, verify="full")
            if name.startswith("shards/"):
                with pytest.raises(GramianError, match=f"{name} its checksum differs.*remove it"):
                    open_cache(tmp_path)({"windows": torch.arange(17)})
            if name != "manifest.json":
                with pytest.raises(GramianError, match=f"{name} its checksum differs"):
                    build(tmp_path, kind)
            if name in ("manifest.json", "head.safetensors"):
                with pytest.raises(GramianError, match=f"{name}.*checksum differs"):
                    open_cache(tmp_path)
        (tmp_path / name).write_bytes(whole)
    open_cache(tmp_path, verify="full")


@kinds
def test_a_missing_or_short_file_is_found_always_and_made_again(
    kind: str, finished: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    for name in damaged_names(kind, tmp_path):
        if name == "manifest.json":
            continue
        for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])):
            damage(tmp_path / name)
            if not name.endswith(".json"):
                with pytest.raises(GramianError, match=f"^cache: .*{name} (is missing|has .* bytes); expected"):
                    open_cache(tmp_path)
            before = stamps(tmp_path)
            build(tmp_path, kind)
            assert contents(tmp_path) == finished(kind), name
            after = stamps(tmp_path)
            others = [other for other in before if name[7:12] != other[:5]]
            assert [after[other] for other in others] == [before[other] for other in others]


def test_a_shard_that_shrinks_after_opening_is_told_in_one_line(tmp_path: Path) -> None:
    build(tmp_path)
    cache = open_cache(tmp_path)
    (tmp_path / "shards/00001.hidden").write_bytes(b"")
    with pytest.raises(GramianError, match="00001.hidden has 0 bytes; expected 1280"):
        cache({"windows": torch.tensor([6])})


def test_other_formats_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GramianError, match="has no manifest.json; expected"):
        open_cache(tmp_path)
    build(tmp_path / "a")
    monkeypatch.setattr("gramian.distill.cache.manifest.FORMAT", 2)
    for call in (lambda: open_cache(tmp_path / "a"), lambda: build(tmp_path / "a")):
        with pytest.raises(GramianError, match="^format: .* has 1; expected 2"):
            call()
    (tmp_path / "b" / "shards").mkdir(parents=True)
    (tmp_path / "b" / "shards" / "precious").write_text("")
    with pytest.raises(GramianError, match="holds shards without a manifest"):
        build(tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(GramianError, match="^cache: .*file cannot be written"):
        build(tmp_path / "file")


# ---- disk and neighbours ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3, 6, 9])
def test_a_full_disk_is_one_line_and_leaves_no_partial_file(
    after: int, finished: Callable[[str], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, write = [after], os.write

    def full(handle: int, content: memoryview) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    with monkeypatch.context() as patch:
        patch.setattr(durable_files.os, "write", full)
        with pytest.raises(GramianError, match="^cache: .*the disk is full; expected") as caught:
            build(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob(".tmp-*"))
    build(tmp_path)
    assert contents(tmp_path) == finished("hidden")


def test_a_short_write_is_continued(
    finished: Callable[[str], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(
            durable_files.os, "write", lambda handle, content: write(handle, content[: max(1, len(content) // 2)])
        )
        build(tmp_path)
    assert contents(tmp_path) == finished("hidden")


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = builder_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(builder_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(GramianError, match="^cache: .* GB free, .* GB are needed .*bytes per token.*; expected"):
        build(tmp_path)
    assert contents(tmp_path) == {}


def test_a_second_builder_in_the_folder_is_refused(tmp_path: Path) -> None:
    def second(done: int, total: int) -> None:
        with pytest.raises(GramianError, match="is being built by others"):
            build(tmp_path)
        told.append(done)

    told: list[int] = []
    build(tmp_path, progress=second)
    assert len(told) > 3
    build(tmp_path)


# ---- several processes -----------------------------------------------------------------------------------------------------


def build_on_rank(
    rank: int, world_size: int, folder: str, kind: str, sharded: bool, missing: tuple[int, ...]
) -> list[int]:
    from gramian.distill.teacher.live_teacher import shard_teacher

    world = ProcessGrid(rank, world_size, torch.device("cpu"), "ddp")
    if rank == 0:
        for shard in missing:
            (Path(folder) / f"shards/{shard:05d}.json").unlink()
    world.sum_(torch.zeros(1))
    model = gpt(layers=1)
    teacher = LiveTeacher(shard_teacher(model) if sharded else model, layers=(1,))
    told: list[int] = []
    build_cache(folder, teacher, DATA, options(kind), world, lambda done, total: told.append(done))
    return told


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("kind", KINDS if FULL else ["hidden", "topk"])
def test_any_number_of_processes_makes_the_same_folder(kind: str, tmp_path: Path) -> None:
    made = []
    for size in (1, 2, 3):
        told = run_on_ranks(size, build_on_rank, str(tmp_path / str(size)), kind, False, ())
        assert all(ranks == told[0] for ranks in told) and told[0][-1] == 17
        made.append(contents(tmp_path / str(size)))
    assert made[0] == made[1] == made[2]
    # One of them lost some shards, and another number of processes goes on.
    run_on_ranks(3, build_on_rank, str(tmp_path / "2"), kind, False, (0, 3))
    assert contents(tmp_path / "2") == made[0]


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_a_sharded_teacher_builds_the_same_cache_with_an_uneven_share_of_it(tmp_path: Path) -> None:
    run_on_ranks(2, build_on_rank, str(tmp_path / "sharded"), "hidden", True, ())
    build(tmp_path / "whole")
    sharded, whole = open_cache(tmp_path / "sharded", verify="full"), open_cache(tmp_path / "whole")
    assert sharded.manifest.identity == whole.manifest.identity
    batch = batch_of(DATA, list(range(17)))
    assert torch.allclose(sharded(batch).hidden_BTD, whole(batch).hidden_BTD, atol=2e-3)
    run_on_ranks(2, build_on_rank, str(tmp_path / "sharded"), "hidden", True, (3,))  # one shard for two processes
    assert open_cache(tmp_path / "sharded", verify="full").manifest.complete


def fail_on_rank(rank: int, world_size: int, folder: str) -> str:
    world = ProcessGrid(rank, world_size, torch.device("cpu"), "ddp")
    write, left = os.write, [4]

    def full(handle: int, content: memoryview) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    durable_files.os.write = full if rank == 1 else write
    try:
        build(Path(folder), grid=world)
    except GramianError as problem:
        return str(problem)
    finally:
        durable_files.os.write = write
    return "no problem"


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_all_processes_stop_when_one_cannot_go_on(tmp_path: Path) -> None:
    told = run_on_ranks(2, fail_on_rank, str(tmp_path))
    assert "another process could not go on" in told[0] and "the disk is full" in told[1]
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_cache_is_a_source_and_knows_itself(tmp_path: Path) -> None:
    build(tmp_path)
    cache = open_cache(tmp_path)
    assert isinstance(cache, Cache) and cache.layers == (1,) and cache.temperatures is None
    assert read_manifest(tmp_path) == cache.manifest
