"""`gramian doctor`: a table that a person can read, one line for what failed, exit codes, and no trace."""

import json
from pathlib import Path

import pytest

from gramian.cli import main
from tests.train.test_examples import save_model

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
        (["--model", "none"], "argument --model: none has no config.json; expected the folder of a Hugging Face model"),
        (["small.toml", "--model", "none"], "doctor: expected either CONFIG.toml or --model FOLDER"),
        (["small.toml", "--text", "none"], "argument --text: is for --model"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    small: str, told: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *told]) == 2
    complaint = capsys.readouterr().err
    assert line in complaint
    assert complaint.count("\n") == 1


def test_a_model_folder_that_is_exact_is_exit_0_also_on_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", layers=1)
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    assert main(["doctor", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "book.txt")]) == 0
    printed = capsys.readouterr().out
    assert "Conv1D ×4" in printed and "nothing is refused or wrong (3 samples" in printed
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before
    (tmp_path / "short.txt").write_text("a")
    assert main(["doctor", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "short.txt")]) == 2
    assert "argument --text: " in capsys.readouterr().err


def test_a_model_folder_of_which_something_is_refused_is_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    told = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", image_size=32)
    ResNetForImageClassification(told).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert main(["doctor", "--model", str(tmp_path / "model")]) == 1
    told_both = capsys.readouterr()
    assert "(BatchNorm2d) mixes the samples" in told_both.out and "GroupNorm, or eval()" in told_both.out
    assert told_both.err == "gramian: doctor: not exact here: per-sample norms; private sum; BatchNorm2d\n"
    assert main(["doctor", "--model", str(tmp_path / "model"), "--text", "a.txt"]) == 2
    assert "argument --text: the model takes pixel_values; expected no --text" in capsys.readouterr().err


def test_torchrun_is_refused(small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", small]) == 2
    assert "expected no torchrun" in capsys.readouterr().err
