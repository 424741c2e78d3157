"""Exit codes and one-line errors of the command line."""

import subprocess
import sys

import pytest

from gramian.cli import main
from tests.kit.fresh import run_fresh


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], ["command", "demo"]),
        (["no-such-command"], ["no-such-command", "demo"]),
        (["--no-such-option"], ["--no-such-option", "expected demo"]),
        (["train"], ["CONFIG.toml: none given; expected gramian train"]),
        (["demo", "--seed", "1.5"], ["--seed", "1.5", "expected an integer"]),
        (["demo", "--seed", "-1"], ["--seed", "expected"]),
        (["demo", "--sed", "1"], ["--sed", "expected", "--seed"]),
        (["demo", "stray"], ["stray", "expected", "--out"]),
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


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["demo", "--help"]])
def test_help_and_version_exit_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "gramian" in captured.out
    assert captured.err == ""


def test_module_entry_point_returns_the_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gramian", "demo", "--seed", "-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.xdist_group("fresh")
def test_parsing_loads_neither_rich_nor_the_model() -> None:
    check = (
        "import sys; from gramian.cli import main; main(['demo', '--seed', 'x']);"
        "sys.exit(any(name in sys.modules for name in ('rich', 'gramian.models', 'gramian.train')))"
    )
    assert run_fresh(check).returncode == 0


@pytest.mark.parametrize(
    ("argv", "here"),
    [
        (["verify", "clipping", "--use-fsdp"], "--fsdp (verify, profile), or parallel.strategy=fsdp2 (train)"),
        (["train", "run.toml", "--use_fsdp"], "--fsdp (verify, profile), or parallel.strategy=fsdp2 (train)"),
        (["profile", "clipping", "--use-flash=1"], "privacy.clipping=auto"),
        (["verify", "clipping", "--enable-profiling"], "--profile (verify), gramian profile, GRAMIAN_PROFILE=1"),
        (["train", "run.toml", "--gpus", "1", "--steps", "1000"], "torchrun --nproc-per-node=N"),
        (["train", "run.toml", "--steps", "1000"], "run.steps=…"),
        (["train", "run.toml", "--eval-interval", "300"], "eval.every=…"),
        (["doctor", "run.toml", "--min_lr=1e-6"], "schedule.floor=…"),
        (["profile", "train", "run.toml", "--accumulation-steps", "4"], "data.micro_batch=…"),
    ],
)
def test_flags_of_the_programs_before_are_named_as_they_are_here(
    argv: list[str], here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    flag = next(argument for argument in argv if argument.startswith("--"))
    assert error.startswith(f"gramian: {flag}: is unknown here; expected {here}") and error.count("\n") == 1
