"""Reading run folders: damaged and missing files are one line each, and never an error of Python."""

import json
from pathlib import Path

import pytest

from gramian.cli import main
from gramian.report import write_report
from gramian.report.run_data import read_run
from tests.report import run_folders
from tests.report.page_parts import Page


def test_a_half_written_last_line_is_no_problem(tmp_path: Path) -> None:
    folder = run_folders.plain(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "attem')
    run = read_run(folder, "run")
    assert run.problems == () and max(line["step"] for line in run.lines) == 60


@pytest.mark.parametrize("file", ("config.toml", "record.json", "metrics.jsonl", "events.jsonl"))
@pytest.mark.parametrize("content", (b"\xff\xfe{[", b"[1, 2]\n{}\n3\n", b""), ids=("noise", "other", "empty"))
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, file: str, content: bytes) -> None:
    folder = run_folders.private(tmp_path / "run")
    (folder / file).write_bytes(content + b"\n" * bool(content))
    page = Page.read(write_report([folder], tmp_path / "page.html"))
    empty = content == b"" and file != "record.json"
    assert len(page.problems) == (0 if empty else 1), page.problems
    assert all(file in line and "\n" not in line for line in page.problems)


@pytest.mark.parametrize("file", ("config.toml", "record.json", "metrics.jsonl", "events.jsonl"))
def test_a_missing_file_leaves_out_what_it_had(tmp_path: Path, file: str) -> None:
    folder = run_folders.plain(tmp_path / "run")
    (folder / file).unlink()
    page = Page.read(write_report([folder], tmp_path / "page.html"))
    assert page.problems == [] and all(panel.rows for panel in page.panels)


VALUES = (
    None,
    True,
    "text",
    -1,
    1e400,
    [],
    {},
    [{"a": 1}],
    {"a": {"zeros": "x"}},
    {"firing": "x", "counts": ["a"], "clip_norm": None},
)


@pytest.mark.parametrize(
    "name", ("step", "attempt", "loss", "time", "spikes", "layers", "sample_norms", "not_covered_by_epsilon")
)
def test_values_of_any_type_are_survived(tmp_path: Path, name: str) -> None:
    lines = [{**run_folders.step_line(i + 1, i), name: value} for i, value in enumerate(VALUES)]
    events = [{"event": "rollback", name: value, "from": value, "plans": value, "clock": value} for value in VALUES]
    folder = run_folders.write_run(tmp_path / "run", lines, events)
    (folder / "curvature.json").write_text(
        json.dumps({"kfac": {"metrics": VALUES, "spectra": {"a": VALUES}}, "plan": VALUES})
    )
    assert Page.read(write_report([folder], tmp_path / "page.html"))["Events"].rows


@pytest.mark.parametrize("missing", ("nothing", "empty"))
def test_a_folder_without_a_run_is_one_line(tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / missing)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"RUN_DIR: {tmp_path / missing}" in error and "expected" in error


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folders.plain(tmp_path / "run")
    assert main(["report", str(folder), "--out", str(tmp_path / "none" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "argument --out" in error and "expected" in error
