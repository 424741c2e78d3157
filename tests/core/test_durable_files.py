"""Durable files: complete or absent, hashed while they are written, private where asked."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gramian.core import durable_files
from gramian.core.durable_files import FileRecord, HashedFile, remove_temporaries, replace_file, replace_text, replacing
from gramian.core.errors import GramianError


def refuse(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_record_is_size_and_checksum_of_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "CHUNK", 7)
    content = bytes(range(100))
    record = replace_file(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == content
    assert record == FileRecord(100, hashlib.sha256(content).hexdigest()) == FileRecord.of(tmp_path / "a")


@pytest.mark.parametrize("function", ["write", "fsync", "replace"])
@pytest.mark.parametrize("private", [False, True])
def test_a_write_that_fails_leaves_the_previous_file_alone(
    function: str, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "a", b"before")
    with monkeypatch.context() as patched:
        patched.setattr(os, function, refuse)
        with pytest.raises(OSError, match="No space"):
            replace_file(tmp_path / "a", b"after", private=private)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"before"


def test_a_block_that_fails_leaves_the_previous_file_alone(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        temporary.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as temporary:
        temporary.write_bytes(b"half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"before"


def test_private_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", b"public")
    replace_file(tmp_path / "a", b"secret", private=True)
    with replacing(tmp_path / "b", private=True) as temporary:
        temporary.write_bytes(b"secret")
    new = HashedFile(tmp_path / "c", private=True, rename=False)
    new.finish()
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"] == [0o600] * 3
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "c", rename=False)


def test_what_a_killed_writer_left_is_removed_by_the_next_write_or_by_the_one_owner(tmp_path: Path) -> None:
    """Private files may have several writers, whose temporary files are nobody else's."""
    for name in (".tmp-a", ".tmp-b.12345678", ".tmp-bc.12345678"):
        (tmp_path / name).write_text("half")
    replace_file(tmp_path / "a", b"whole")
    replace_file(tmp_path / "b", b"secret", private=True)
    assert sorted(os.listdir(tmp_path)) == [".tmp-b.12345678", ".tmp-bc.12345678", "a", "b"]
    remove_temporaries(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == [".tmp-bc.12345678", "a", "b"]


def test_differences_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    record = replace_file(path, b"content")
    assert record.difference(path) is None
    path.write_bytes(b"kontent")
    assert (record.difference(path), record.difference(path, content=False)) == ("its checksum differs", None)
    path.write_bytes(b"cont")
    assert record.difference(path) == "has 4 bytes; expected 7"
    path.unlink()
    assert record.difference(path) == "is missing"


def test_text_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match=r"missing/a: cannot be written \(No such file or directory\); expected"):
        replace_text(tmp_path / "missing" / "a", "text")
