"""The lock of a folder: one at a time, and free again when its process was killed or its file removed."""

import os
import signal
from pathlib import Path

import pytest

from gramian.core.folder_lock import LOCK, FolderLock


def test_one_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(BlockingIOError):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "nothing")


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        held = FolderLock(tmp_path)
        os.write(told, b"1")
        signal.pause()
        os._exit(held is None)
    os.read(ready, 1)
    try:
        with pytest.raises(BlockingIOError):
            FolderLock(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    FolderLock(tmp_path).release()


def test_a_forked_process_does_not_have_the_lock(tmp_path: Path) -> None:
    lock, (ready, told) = FolderLock(tmp_path), os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b"1")
        signal.pause()
    os.read(ready, 1)
    try:
        lock.release()
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = os.open

    def removed(path: Path, *how: int) -> int:
        file = ordinary(path, *how)
        Path(path).unlink()
        return file

    monkeypatch.setattr("gramian.core.folder_lock.os.open", removed)
    with pytest.raises(BlockingIOError):
        FolderLock(tmp_path)
    assert not (tmp_path / LOCK).exists()
