"""`gramian doctor`: a table that a person can read, one line for what failed, exit codes, and no trace."""

import json
from pathlib import Path

import pytest

from gramian.cli import main

SMALL = """
[run]
folder = "runs/small"
steps = 50
device = "cpu"
[model]
layers = 1
width = 32
heads = 2
[data]
length = 16
batch = 4
limit_bytes = 100000
[optimizer]
lr = 1e-2
[schedule]
warmup = 5
[doctor]
overfit_windows = 2
overfit_steps = 120
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL)
    return "small.toml"


def test_a_healthy_run_passes_and_nothing_is_written(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", small]) == 0
    printed = capsys.readouterr().out
    for name in ("initial loss", "overfit", "causality", "gradients", "micro-batches", "data: windows", "time"):
        assert name in printed
    assert "FAILED" not in printed
    assert "19 of 19 checks passed in" in printed
    assert [path.name for path in Path().iterdir()] == ["small.toml"]


def test_a_failed_check_is_exit_1_with_its_name_and_a_hint(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", small, "doctor.overfit_steps=1"]) == 1
    told = capsys.readouterr()
    assert told.err == "gramian: doctor: 1 of 19 checks failed: overfit\n"
    assert "FAILED" in told.out and "doctor.overfit_steps" in " ".join(told.out.split())


def test_findings_about_the_data_are_rows(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"document number {index}" for index in range(200)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts + texts[:50]))
    told = ["data.source=jsonl", 'data.files=["a.jsonl"]', "doctor.overfit_steps=1"]
    assert main(["doctor", small, *told]) == 1
    assert "data: repeated documents; overfit" in capsys.readouterr().err


def test_private_data_is_labelled(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", small, "privacy.noise_multiplier=1.0"]) == 0
    assert "not covered by ε" in capsys.readouterr().out


@pytest.mark.parametrize(
    "told, line",
    [
        (["none.toml"], "none.toml: cannot be read"),
        (["small.toml", "model.widht=3"], "did you mean model.width?"),
        (["small.toml", "data.source=text", 'data.files=["none.txt"]'], "none.txt"),
        (["small.toml", "model.kind=huggingface", "model.path=none"], "model.path: none has no config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    small: str, told: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *told]) == 2
    complaint = capsys.readouterr().err
    assert line in complaint
    assert complaint.count("\n") == 1


def test_torchrun_is_refused(small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", small]) == 2
    assert "expected no torchrun" in capsys.readouterr().err
