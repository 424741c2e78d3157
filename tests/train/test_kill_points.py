"""SIGKILL in the middle of an evaluation, a copy, a file, a rename: the resumed run is the run that was not killed."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.train.config.config import Config
from gramian.train.loop import evaluate
from gramian.train.state import checkpoint, checkpoint_files
from gramian.train.state.run_folder import JsonLines, read_lines
from gramian.train.state.snapshot import Snapshots
from gramian.verify.private_audit.receipt import ledger_of
from gramian.verify.resume import differences
from tests.kit.waiting import PATIENCE
from tests.train.runs import PRIVATE, small

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.xdist_group("processes")]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"model": {"dropout": 0.1}},
    "half precision": {"precision": {"kind": "fp16"}},
    "private": {"privacy": PRIVATE},
    "natural": {"kfac": {"update_freq": 4}},
    "optimizer K-FAC": {"optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 4}},
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def countdown(calls: int) -> Callable[[], None]:
    """Dies at the given call."""
    left = [calls]

    def tick() -> None:
        left[0] -= 1
        if not left[0]:
            die()

    return tick


def before(owner: Any, name: str, calls: int, meant: Callable[..., bool] = lambda *args: True) -> None:
    """Die before a call of a function."""
    plain, tick = getattr(owner, name), countdown(calls)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if meant(*args):
            tick()
        return plain(*args, **kwargs)

    setattr(owner, name, patched)


def after(owner: Any, name: str, calls: int, meant: Callable[..., bool] = lambda *args: True) -> None:
    """Die after it."""
    plain, tick = getattr(owner, name), countdown(calls)

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if meant(*args):
            tick()
        return result

    setattr(owner, name, patched)


def in_file(name: str, calls: int, part: float) -> None:
    """Die when a part of a checkpoint's file is written."""
    plain, tick = checkpoint_files.write_file, countdown(calls)

    def patched(path: Path, pieces: Any) -> Any:
        if path.name != name:
            return plain(path, pieces)
        content = b"".join(bytes(piece) for piece in pieces)
        path.write_bytes(content[: int(part * len(content))])
        tick()
        path.unlink()
        return plain(path, [content])

    checkpoint.write_file = checkpoint_files.write_file = patched


def in_copy(calls: int) -> None:
    """Die when half of a snapshot's tensors are there."""
    plain, tick = Snapshots._copy, countdown(calls)

    def patched(self: Snapshots, sources: Any, pieces: Any) -> Any:
        buffers = [pair for piece in pieces for pair in piece.buffers.items()]
        for name, buffer in buffers[: len(buffers) // 2]:
            buffer.copy_(sources[name])
        tick()
        return plain(self, sources, pieces)

    Snapshots._copy = patched  # type: ignore[method-assign]


def in_evaluation() -> None:
    plain, tick = evaluate._pieces, countdown(1)

    def patched(*args: Any) -> Iterator[Any]:
        for piece in plain(*args):
            yield piece
            tick()

    evaluate._pieces = patched


def in_removal() -> None:
    plain = shutil.rmtree

    def patched(path: Any, *args: Any, **kwargs: Any) -> None:
        if "dropped" in str(path) and Path(path).exists():
            next(Path(path).iterdir()).unlink()
            die()
        plain(path, *args, **kwargs)

    shutil.rmtree = patched  # type: ignore[assignment]


def in_line(number: int) -> None:
    plain, tick = JsonLines.write, countdown(number)

    def patched(self: JsonLines, line: Any) -> None:
        text = json.dumps(line).encode()
        os.write(self._file, text[: len(text) // 2])
        tick()
        os.ftruncate(self._file, os.fstat(self._file).st_size - len(text) // 2)
        plain(self, line)

    JsonLines.write = patched  # type: ignore[method-assign]


def written(name: str) -> Callable[..., bool]:
    return lambda source, target: Path(target).name == name


POINTS: dict[str, Callable[[], None]] = {
    "inside an evaluation": in_evaluation,
    "inside the first copy": partial(in_copy, 1),
    "inside a later copy": partial(in_copy, 3),
    "behind a copy that is not judged yet": partial(before, Snapshots, "keep_copy", 2),
    "inside the first manifest": partial(in_file, "manifest.json", 1, 0.5),
    "inside a later manifest": partial(in_file, "manifest.json", 3, 0.5),
    "behind a manifest": partial(in_file, "manifest.json", 2, 1.0),
    "inside the facts": partial(in_file, "facts.json", 2, 0.3),
    "inside the tensors": partial(in_file, "state.safetensors", 3, 0.7),
    "before a rename": partial(before, os, "rename", 2),
    "between rename and sync of the parent": partial(after, os, "rename", 2),
    "inside a removal": in_removal,
    "inside a line of metrics": partial(in_line, 17),
    "inside an early line": partial(in_line, 3),
    "before the config is there": partial(before, os, "replace", 1, written("config.toml")),
    "before the record is there": partial(before, os, "replace", 1, written("record.json")),
}

OF_RELEASES = {
    "before the ledger has a release": partial(before, os, "replace", 17, written("releases.json")),
    "between ledger and noise of a release": partial(after, os, "replace", 17, written("releases.json")),
}


def _child(path: str, point: str | None) -> None:
    torch.set_num_threads(1)
    if point is not None:
        (POINTS | OF_RELEASES)[point]()
    os._exit(main(["train", path]))


def exit_code(config: Config, path: Path, point: str | None = None) -> int | None:
    path.write_text(config.toml())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gramian.cli.train", "gramian.train.loop.trainer", "gramian.train.build.run_parts"])
    process = context.Process(target=_child, args=(str(path), point))
    process.start()
    process.join(PATIENCE)
    return process.exitcode


def happened(folder: Path) -> list[dict[str, Any]]:
    """Events that follow from the config, those before a resume that came again left out."""
    found: list[dict[str, Any]] = []
    for event in read_lines(folder / "events.jsonl"):
        if event["event"] == "resumed":
            found = [earlier for earlier in found if earlier["attempt"] <= event["attempt"]]
        if event["event"] in ("advice", "rollback", "stopped", "done"):
            found.append({key: value for key, value in event.items() if key != "clock"})
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_anywhere_is_the_run_that_was_not(kind: str, tmp_path: Path) -> None:
    whole = small(tmp_path / "whole", **KINDS[kind])
    assert exit_code(whole, tmp_path / "whole.toml") == 0
    private = "privacy" in KINDS[kind]
    for number, point in enumerate(POINTS | (OF_RELEASES if private else {})):
        folder = tmp_path / f"killed-{number}"
        config = small(folder, **KINDS[kind])
        assert exit_code(config, tmp_path / "killed.toml", point) == -signal.SIGKILL, point
        assert exit_code(config, tmp_path / "killed.toml") == 0, point
        assert differences(tmp_path / "whole", folder) == [], point
        assert happened(folder) == happened(tmp_path / "whole"), point
        assert not list(folder.rglob("*tmp*")), point
        if private:  # releases that were replayed are in the ledger once
            assert ledger_of(folder) == ledger_of(tmp_path / "whole"), point


@pytest.mark.parametrize(
    "first, second",
    [
        ("inside the tensors", "before the record is there"),
        ("inside a later manifest", "inside the first copy"),
        ("between rename and sync of the parent", "inside an early line"),
        ("inside a line of metrics", "between rename and sync of the parent"),
    ],
)
def test_a_run_killed_again_while_it_resumes_is_the_same_run(first: str, second: str, tmp_path: Path) -> None:
    config, whole = small(tmp_path / "run"), small(tmp_path / "whole")
    assert exit_code(whole, tmp_path / "whole.toml") == 0
    assert exit_code(config, tmp_path / "run.toml", first) == -signal.SIGKILL
    assert exit_code(config, tmp_path / "run.toml", second) == -signal.SIGKILL
    assert exit_code(config, tmp_path / "run.toml") == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []
