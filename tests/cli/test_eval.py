"""`gramian eval`: perplexities that a loop over windows gives, of the best checkpoint, and a text."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gramian.cli import main
from gramian.data import load_windows
from gramian.train.state.saved_run import load_run
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.distilled import data, evaluations, teacher_run
from tests.train.runs import run, small

pytestmark = pytest.mark.xdist_group("distill")


def by_hand(folder: Path, stride: int | None) -> tuple[float, int]:
    """Nats per token and tokens: one window after the other, in float64."""
    saved = load_run(folder)
    model = saved.model.double().eval()
    stream = load_windows(saved.config.data)[1].stream
    tokens = torch.from_numpy(np.asarray(stream.read(0, int(stream.edges[-1]))).astype(np.int64))
    length = saved.config.data.length
    nats, scored = 0.0, 0
    begin = done = 0
    while done < len(tokens) - 1:
        window = tokens[begin : begin + length + 1]
        with torch.no_grad():
            losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        fresh = losses[done - begin :]  # those that no window before has scored
        nats, scored = nats + float(fresh.sum()), scored + len(fresh)
        done = begin + len(window) - 1
        begin = done if stride is None else done - (length - stride)
    return nats / scored, scored


@pytest.mark.oracle
@pytest.mark.parametrize("stride", [None, 5])
def test_the_perplexities_are_those_of_a_loop_over_windows(
    stride: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    more = [] if stride is None else ["--stride", str(stride)]
    assert main(["eval", str(teacher_run()), "--json", str(path), *more]) == 0
    told, found = capsys.readouterr().out, json.loads(path.read_text())
    validation = load_windows(load_run(teacher_run()).config.data)[1].stream
    for row, step in zip(found["results"], (None, stride or 12), strict=True):
        loss, tokens = by_hand(teacher_run(), step)
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert (row["tokens"], row["protocol"]) == (tokens, "non-overlapping" if step is None else "sliding")
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        bits = f"{row['bits_per_byte']:.4f} bits per byte"
        assert f"perplexity {row['perplexity']:.3f}, {bits} ({row['protocol']}, windows of 24" in told
        content = [t for t in validation.read(0, len(validation)).tolist() if t != validation.end]
        assert row["bits_per_byte"] == pytest.approx(loss / math.log(2) * len(validation) / len(content), rel=1e-5)
    assert found["best"] and "the best" in told


def test_a_long_evaluation_takes_a_subset_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gramian.cli import eval as command

    path, folder = tmp_path / "found.json", teacher_run()
    saved = load_run(folder)
    windows, length = len(load_windows(saved.config.data)[1]), saved.config.data.length
    each = 2 * sum(p.numel() for p in saved.model.parameters()) * length  # FLOPs of a window
    monkeypatch.setitem(command.RATES, "cpu", each * 3 * windows / 1800)  # sliding windows are twice as many
    assert main(["eval", str(folder), "--json", str(path)]) == 0
    told, taken = capsys.readouterr().out, int(windows / 30 * 1.5)
    assert "takes about 30 minutes" in told and f"--windows {windows} scores all" in told
    tokens = [row["tokens"] for row in json.loads(path.read_text())["results"]]
    assert tokens == [taken * length, length + (taken - 1) * (length // 2)]
    assert f"the first {taken} of each protocol are scored" in told


def test_other_validation_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {number} of a book\n" for number in range(400)))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nfolder = "{tmp_path / "run"}"\nsteps = 2\ndevice = "cpu"\n[model]\nlayers = 1\nwidth = 16\nheads = 2\n'
        f'[data]\nsource = "text"\nfiles = ["{text}"]\nlength = 16\nbatch = 2\nworkers = 0\n[schedule]\nwarmup = 0\n'
    )
    assert main(["train", str(config)]) == 0 and main(["eval", str(tmp_path / "run"), "--windows", "3"]) == 0
    assert "bits per byte" not in capsys.readouterr().out.partition("scoring")[2]  # of a part it is not known
    text.write_text(text.read_text()[:-60])
    assert main(["eval", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gramian: data.files: the validation data is not what ") and error.count("\n") == 1


def test_it_is_the_best_checkpoint_that_is_evaluated(tmp_path: Path) -> None:
    """A rate that is far too high at the end: the newest is worse."""
    config = small(
        tmp_path / "run", model={"width": 16}, data=data(), eval={"every": 5, "windows": 10_000},
        optimizer={"lr": 0.3, "max_norm": 0.0}, schedule={"kind": "constant", "warmup": 20}, guard={"on": False},
    )  # fmt: skip
    trainer, _ = run(config)
    assert main(["eval", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    losses = {line["step"]: line["validation_loss"] for line in evaluations(tmp_path / "run")}
    best = min(losses, key=lambda step: losses[step])
    assert best < 40 and losses[40] > losses[best] + 0.02
    assert (found["step"], found["best"]) == (best, True)
    # All validation windows, cut in the same way, but for what is left at the end.
    assert found["results"][0]["loss"] == pytest.approx(losses[best], abs=0.005)
    assert trainer.best == {"loss": losses[best], "step": best}


def test_a_text_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> str:
        assert main(["eval", str(teacher_run()), "--prompt", "the student", "--tokens", "30", *more]) == 0
        head, _, told = capsys.readouterr().out.partition("\n")
        assert head.endswith("the best") and told.startswith("the student")
        return told

    assert text() == text() != text("--seed", "1")
    assert main(["eval", str(teacher_run() / "config.toml"), "--prompt", "the student", "--tokens", "30"]) == 0


def nothing(folder: Path) -> Path:
    return folder


def unsaved(folder: Path) -> Path:
    copytree(teacher_run(), folder / "run")
    rmtree(folder / "run" / "checkpoints")
    return folder / "run"


def whole(folder: Path) -> Path:
    return teacher_run()


BAD: dict[tuple[str, ...], tuple[Callable[[Path], Path], str]] = {
    (): (nothing, "run folder: {} holds no run; expected a folder with config.toml and checkpoints/"),
    ("--prompt", "text"): (unsaved, "run folder: {} has no checkpoint that can be read; expected a run that saved one"),
    ("--prompt", ""): (whole, "argument --prompt: is empty; expected some text"),
    ("--prompt", "\udcff"): (whole, "argument --prompt: is not text; expected UTF-8"),
    ("--prompt", "a", "--temperature", "0"): (whole, "argument --temperature: 0.0; expected a number above 0"),
    ("--prompt", "a", "--temperature", "nan"): (whole, "argument --temperature: nan; expected a number above 0"),
    ("--prompt", "a", "--tokens", "0"): (whole, "argument --tokens: got '0'; expected an integer"),
    ("--prompt", "a", "--seed", "-1"): (whole, "argument --seed: got '-1'; expected an integer from 0"),
    ("--prompt", "a", "--stride", "3"): (
        whole,
        "argument --stride: is an option of the perplexity; expected it without --prompt",
    ),
    ("--stride", "0"): (whole, "argument --stride: got '0'; expected an integer"),
    ("--stride", "24"): (whole, "argument --stride: 24; expected less than the window, which is 24"),
    ("--stride", "x"): (whole, "argument --stride: got 'x'; expected an integer"),
    ("--windows", "-1"): (whole, "argument --windows: got '-1'; expected an integer"),
    ("--json", "/nowhere/found.json"): (whole, "argument --json: /nowhere/found.json cannot be written"),
    ("run.steps=3",): (whole, "'run.steps=3': a run has its own config; expected no override"),
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: ascii(" ".join(arguments)))
def test_bad_input_is_one_line(arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = BAD[arguments]
    target = make(tmp_path)
    assert main(["eval", str(target), *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gramian: {says.format(target)}") and told.count("\n") == 1


def test_a_folder_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("gramian: /nowhere: cannot be read")
