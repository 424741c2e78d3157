"""Exit codes, one-line errors and output of the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from gramian.cli import main
from gramian.models import GPT, GPTConfig
from gramian.statistics import LayerHealth
from gramian.train import corpus, demo_observation, demo_run


@pytest.fixture
def quick_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a tiny model, a short sample and little validation."""
    config, run = demo_run.DemoConfig, demo_run.run_demo
    tiny = GPTConfig(context=16, layers=1, width=16, heads=2)
    monkeypatch.setattr(demo_run, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(demo_run, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(demo_run, "NOISE_SEQUENCES", 8)
    monkeypatch.setattr(
        demo_run, "DemoConfig", lambda seconds, seed: config(seconds, seed, tiny, batch_size=4, observe_every=2)
    )
    monkeypatch.setattr(demo_run, "run_demo", lambda *given: run(*given, observer=_observer))


def _observer(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, demo_observation.Observation]:
    state = LayerHealth(activation_norm=2.0, gradient_norm=1.0, zero_fraction=0.25, nonfinite=0)
    traces = {name: 1.0 for name, _ in model.named_parameters()}
    return backward(), demo_observation.Observation((1.0, 2.0), 100.0, 2.0, {"head": state}, traces)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], ["command", "demo"]),
        (["no-such-command"], ["no-such-command", "demo"]),
        (["demo", "--seconds", "soon"], ["--seconds", "soon", "accepted: a number of seconds above 0"]),
        (["demo", "--seconds", "0"], ["--seconds", "accepted"]),
        (["demo", "--seconds", "nan"], ["--seconds", "accepted"]),
        (["demo", "--seconds", "inf"], ["--seconds", "accepted"]),
        (["demo", "--seed", "1.5"], ["--seed", "1.5", "accepted: an integer"]),
        (["demo", "--seed", "-1"], ["--seed", "accepted"]),
        (["demo", "--sed", "1"], ["--sed", "accepted", "--seed"]),
        (["demo", "stray"], ["stray", "accepted", "--out"]),
        (["demo", "--out"], ["--out", "expected one argument"]),
    ],
)
def test_bad_input_exits_2_with_one_line_that_names_the_field(
    argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for name in names:
        assert name in captured.err


def test_out_that_is_a_file_exits_2_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "file"
    target.touch()
    assert main(["demo", "--out", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--out" in captured.err
    assert "accepted: a folder" in captured.err


def test_a_missing_standard_library_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "python.zip" in captured.err
    assert "accepted" in captured.err


def test_a_loss_that_is_not_finite_exits_1_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise FloatingPointError("loss is nan at step 7")

    monkeypatch.setattr(demo_run, "run_demo", fail)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == "gramian: demo: loss is nan at step 7\n"


def test_an_interrupt_exits_1_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "run_demo", interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "gramian: interrupted\n"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["demo", "--help"]])
def test_help_and_version_exit_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "gramian" in captured.out
    assert captured.err == ""


def test_module_entry_point_returns_the_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gramian", "demo", "--seconds", "-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_parsing_loads_neither_rich_nor_the_model() -> None:
    check = (
        "import sys; from gramian.cli import main; main(['demo', '--seed', 'x']);"
        "sys.exit(any(name in sys.modules for name in ('rich', 'gramian.models', 'gramian.train')))"
    )
    assert subprocess.run([sys.executable, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.usefixtures("quick_demo")
def test_demo_prints_a_report_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seconds", "0.5", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(character == "\n" or character.isprintable() for character in captured.out)
    for expected in ("training loss", "bits per byte", "tokens/s", "critical batch", "blocks.0.mlp", "def "):
        assert expected in captured.out


@pytest.mark.usefixtures("quick_demo")
def test_demo_writes_its_numbers_to_out(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["demo", "--seconds", "0.5", "--seed", "3", "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["demo.json"]
    numbers = json.loads((out / "demo.json").read_text(), parse_constant=pytest.fail)
    assert numbers["config"]["seed"] == 3
    assert numbers["steps"] == len(numbers["losses"])
    assert numbers["observations"]["history"][0]["median_sample_norm"] == 1.5
    assert numbers["noise"]["samples"] == 8


@pytest.mark.usefixtures("quick_demo")
def test_demo_without_out_writes_only_below_runs_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seconds", "0.5"]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "runs/demo/demo.json"]
