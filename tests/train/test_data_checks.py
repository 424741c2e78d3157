"""A look at the data: each fault is found, and sound data has none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramian.core.errors import GramianError
from gramian.data.options import DataSection
from gramian.train.doctor.check import Check
from gramian.train.doctor.data_checks import check_files, examine_data

TEXTS = [f"document number {index}" for index in range(200)]


def write_jsonl(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def found(**told: Any) -> dict[str, Check]:
    checks, _ = examine_data(DataSection(**told))
    assert all("\n" not in check.hint for check in checks)
    return {check.name.removeprefix("data: "): check for check in checks}


def failed(**told: Any) -> set[str]:
    return {name for name, finding in found(**told).items() if not finding.ok}


def test_sound_data_has_no_fault(tmp_path: Path) -> None:
    findings = found(source="jsonl", files=(write_jsonl(tmp_path / "a.jsonl", TEXTS),))
    assert all(finding.ok for finding in findings.values())
    assert findings.keys() == {
        "files cut off", "empty documents", "repeated documents", "validation documents trained on", "windows",
    }  # fmt: skip


def test_embedded_data_has_no_fault() -> None:
    assert not failed(limit_bytes=1_000_000)


def test_empty_documents_are_found(tmp_path: Path) -> None:
    few, many = (
        write_jsonl(tmp_path / "a.jsonl", TEXTS + [""] * 10),
        write_jsonl(tmp_path / "b.jsonl", TEXTS + [""] * 20),
    )
    assert not failed(source="jsonl", files=(few,))
    assert failed(source="jsonl", files=(many,)) == {"empty documents"}
    assert found(source="jsonl", files=(many,))["empty documents"].value == pytest.approx(20 / 220)


def test_repeated_documents_are_found(tmp_path: Path) -> None:
    train = [text for text in TEXTS if text != TEXTS[0]]
    path = write_jsonl(tmp_path / "a.jsonl", train + train[:50])
    finding = found(source="jsonl", files=(path,))["repeated documents"]
    assert not finding.ok
    assert finding.value == pytest.approx(50 / 249)


def test_documents_on_both_sides_are_found(tmp_path: Path) -> None:
    train, validation = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", [*TEXTS[:2], "new"])
    findings = found(source="jsonl", files=(train,), validation_files=(validation,))
    assert findings["validation documents trained on"].value == pytest.approx(2 / 3)
    assert failed(source="jsonl", files=(train,), validation_files=(validation,)) == {"validation documents trained on"}


def test_too_few_windows_are_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    size = int(found(source="jsonl", files=(path,))["windows"].value)
    assert not failed(source="jsonl", files=(path,), batch=size)
    assert failed(source="jsonl", files=(path,), batch=size + 1) == {"windows"}
    assert not failed(source="jsonl", files=(path,), batch=size + 1, stride=64)  # windows of the run, not others


def test_half_a_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [*TEXTS, "x" * 200_000])
    whole = path.read_bytes()
    data = DataSection(source="jsonl", files=(str(path),))
    for content, ok in ((whole, True), (whole[:-1], True), (whole[:-2], False), (whole[:-100_000], False)):
        path.write_bytes(content)
        (finding,) = check_files(data)
        assert finding.ok is ok
    checks, windows = examine_data(data)
    assert windows is None
    assert str(path) in checks[0].hint


def test_half_a_character_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = DataSection(source="text", files=(str(path),))
    whole = "é€😀".encode() * 3
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        (finding,) = check_files(data)
        assert finding.ok is (whole[:size].decode(errors="ignore").encode() == whole[:size])
    path.write_bytes("😀aaa€".encode()[:-1])
    assert not check_files(data)[0].ok
    path.write_bytes(b"\xff" * 20)  # no text at all, but not cut off: reading tells
    assert check_files(data)[0].ok


def test_arrays_cut_off_are_found(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(200))
    content = (tmp_path / "whole.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[:-8])
    (tmp_path / "head.npy").write_bytes(content[:20])
    (tmp_path / "none.npy").write_bytes(b"")
    for name, size in (("even", 4), ("odd", 5)):
        (tmp_path / f"{name}.bin").write_bytes(b"\1" * size)
        (tmp_path / f"{name}.json").write_text('{"dtype": "uint16", "vocabulary": 257, "end": 256}')
    (finding,) = check_files(DataSection(source="tokens", files=(str(tmp_path),)))
    assert (finding.ok, finding.value) == (False, 4)
    assert "cut.npy" in finding.hint
    assert "and 1 more" in finding.hint
    assert "whole.npy" not in finding.hint


def test_missing_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="none.txt does not exist"):
        examine_data(DataSection(source="text", files=(str(tmp_path / "none.txt"),)))
