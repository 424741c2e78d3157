"""`gramian export`: the best model of a run, bit for bit, in a folder that other programs load."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gramian.cli import main
from gramian.train.state import export_model
from gramian.train.state.saved_run import load_run
from tests.train.test_examples import save_model

TINY = [
    "run.steps=3", "run.device=cpu", "model.layers=1", "model.width=16", "model.heads=2", "data.length=16", "data.batch=4",
    "data.workers=0", "data.limit_bytes=300000", "schedule.warmup=0", "eval.windows=2", "run.folder=run",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*more: str) -> None:
    Path("run.toml").write_text("")
    assert main(["train", "run.toml", *TINY, *more]) == 0


def by_its_card(folder: Path) -> torch.nn.Module:
    """The model as the code block of its card loads it."""
    text = (folder / "README.md").read_text()
    names: dict[str, object] = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(text.partition("```python\n")[2].partition("```")[0], names)
    finally:
        os.chdir(before)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    return model.eval()


@pytest.mark.parametrize("more", [[], ["model.tied=true"], ["model.kind=goose"]], ids=["gpt", "tied", "goose"])
def test_own_models_are_loaded_by_their_card(here: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    trained(*more)
    capsys.readouterr()
    assert main(["export", "run", "out"]) == 0
    assert "README.md, config.json, model.safetensors" in capsys.readouterr().out
    tokens = torch.randint(256, (2, 16))
    saved = load_run("run")
    torch.testing.assert_close(by_its_card(here / "out")(tokens), saved.model.eval()(tokens), rtol=0, atol=0)
    assert f"step {saved.step} of 3, the best by validation loss" in (here / "out" / "README.md").read_text()


def test_a_hugging_face_model_comes_with_its_tokenizer(here: Path) -> None:
    from transformers import AutoTokenizer

    save_model(here / "gpt2")
    (here / "book.txt").write_text("a line of text\n" * 900)
    trained("model.kind=huggingface", "model.path=gpt2", "data.source=text", "data.files=['book.txt']")
    assert main(["export", "run", "models/out"]) == 0
    tokens = torch.randint(256, (2, 16))
    mine, theirs = by_its_card(here / "models" / "out")(tokens).logits, load_run("run").model.eval()(tokens).logits
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    ids = [AutoTokenizer.from_pretrained(folder).encode("a line") for folder in ("gpt2", "models/out")]
    assert ids[0] == ids[1]
    assert "started from gpt2" in (here / "models" / "out" / "README.md").read_text()


def test_weights_can_be_narrow(here: Path) -> None:
    trained()
    assert main(["export", "run", "out", "--dtype", "bf16"]) == 0
    assert {t.dtype for t in load_file("out/model.safetensors").values()} == {torch.bfloat16}


def test_a_private_run_says_what_is_known_about_epsilon(here: Path) -> None:
    trained(
        "privacy.noise_multiplier=1.0",
        "privacy.accountant=rdp",
        "optimizer.max_norm=0",
        "run.steps=2",
        "model.layers=1",
    )
    assert main(["export", "run", "out"]) == 0
    assert "- private training: ε is as accounted" in (here / "out" / "README.md").read_text()


def test_nothing_is_left_where_it_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    capsys.readouterr()
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    for arguments, words in (
        (["run", "full"], "argument FOLDER: full is not empty; expected a folder that does not exist yet"),
        (["none", "out"], "argument RUN_DIR: none holds no run; expected"),
        (["run", "run.toml/out"], "argument FOLDER: run.toml/out: "),
        (["run", "out", "--dtype", "fp8"], "argument --dtype: "),
    ):
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"gramian: {words}") and error.count("\n") == 1, error

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_model, "save_model", full)
    assert main(["export", "run", "out"]) == 2
    assert "out: No space left on device; expected room for the model" in capsys.readouterr().err
    assert not (here / "out").exists() and not list(here.glob(".out*"))


def test_a_model_that_is_read_back_otherwise_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    load = export_model.load_model

    def flipped(model: torch.nn.Module, path: str) -> None:
        load(model, path)
        next(model.parameters()).data[0, 0] += 1

    monkeypatch.setattr(export_model, "load_model", flipped)
    assert main(["export", "run", "out"]) == 2
    assert "was not read back as it was written" in capsys.readouterr().err and not (here / "out").exists()
