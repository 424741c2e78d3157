"""Folders of Hugging Face models: whatever is wrong with one is a line, and a run of one resumes bit for bit."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.data import load_tokenizer
from gramian.models.huggingface import load_huggingface
from gramian.train.build.memory_needs import huggingface_shape
from gramian.train.config.config import load_config, parse_config
from gramian.verify.resume import differences
from tests.data.test_tokenizer import saved
from tests.kit.refusals import refusal
from tests.train.runs import run, small
from tests.train.test_faults import ask_to_leave


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("model") / "gpt2"
    told = GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(told).save_pretrained(path)
    return path


def copied(model: Path, to: Path, change: Callable[[Path], Any]) -> Path:
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    change(to)
    return to


def told(**values: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        before = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(before | values))

    return change


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("h.1.mlp.c_fc.weight"))]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN: dict[str, Callable[[Path], Any]] = {
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "text for a number": told(n_embd="x"),
    "other width": told(n_embd=32),
    "weights cut off": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 20),
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "pickled": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "a weight missing": without_a_weight,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_one_line(kind: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copied(model, tmp_path / "broken", BROKEN[kind])
    with pytest.raises(
        GramianError, match=r"^model.path: .*broken (cannot be loaded|has no weights of .*c_fc)"
    ) as caught:
        load_huggingface(str(folder), False, 257, 16, seed=0)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_broken_config_is_one_line_for_the_planner(model: Path, tmp_path: Path) -> None:
    with pytest.raises(GramianError, match=r"^model.path: .* cannot be loaded"):
        huggingface_shape(str(copied(model, tmp_path / "broken", told(n_embd="x"))))


def test_the_command_trains_a_folder_without_another_word(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {
        "model": {"kind": "huggingface", "path": str(model)},
        "data": {"tokenizer": "bytes"},
        "schedule": {"warmup": 1},
    }
    config = small(tmp_path / "run", run={"steps": 2}, **sections)
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert capfd.readouterr().err == ""


def test_the_tokenizer_is_that_of_the_models_folder_unless_another_is_named(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "both", told(vocab_size=300))
    told_model = {"kind": "huggingface", "path": str(folder), "fresh": True}
    with pytest.raises(
        GramianError, match=r"^data.tokenizer: none given, and .*both .* expected \"bytes\" or the folder"
    ) as no:
        small(model=told_model)
    assert "\n" not in str(no.value)
    assert small(model=told_model, data={"tokenizer": "bytes"}).data.tokenizer == "bytes"
    saved(folder)
    config = small(tmp_path / "run", run={"steps": 2}, schedule={"warmup": 1}, model=told_model)
    assert config.data.tokenizer == str(folder)
    assert parse_config(tomllib.loads(config.toml())) == config
    assert (
        config.hash
        == small(model=told_model, schedule={"warmup": 1}, run={"steps": 2}, data={"tokenizer": str(folder)}).hash
    )
    trainer, _ = run(config)
    assert trainer.parts.training.stream.tokenizer == load_tokenizer(str(folder)).digest
    assert small(model=told_model, data={"tokenizer": "bytes"}).data.tokenizer == "bytes"
    assert small().data.tokenizer == "bytes"


def test_token_files_need_no_tokenizer_and_take_the_models_where_there_is_one(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "model", lambda folder: None)
    sections = {"model": {"kind": "huggingface", "path": str(folder)}, "data": {"source": "tokens", "files": ["a.bin"]}}
    assert parse_config(sections).data.tokenizer == "bytes"
    saved(folder)
    assert parse_config(sections).data.tokenizer == str(folder)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_of_a_folder_with_tied_weights_and_dropout_resumes_bitwise(
    fresh: bool, model: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "run": {"steps": 16},
        "model": {"kind": "huggingface", "path": str(model), "fresh": fresh},
        "data": {"tokenizer": "bytes"},
        "parallel": {"checkpoint_blocks": 1},
        "checkpoint": {"snapshot_every": 5, "every": 5},
    }
    trainer, _ = run(small(tmp_path / "whole", **sections))
    weights = trainer.parts.model.state_dict()
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    config = small(tmp_path / "asked", **sections)
    run(config, ask_to_leave(7))
    run(config)
    assert differences(tmp_path / "whole", tmp_path / "asked") == []
    assert load_config(tmp_path / "asked" / "config.toml").model.path == str(model)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    for decoder in (True, False):
        folder = tmp_path / str(decoder)
        BertLMHeadModel(BertConfig(**shape, max_position_embeddings=32, is_decoder=decoder)).save_pretrained(folder)
        arguments = (str(folder), False, 300, 16, 0)
        if decoder:
            load_huggingface(*arguments)
        else:
            with refusal(r"^model.path: .* predicts a token from later ones; expected a causal language model"):
                load_huggingface(*arguments)
