"""From a config to what it needs: the same model that is built, and nothing allocated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.plan.transformer_memory import Needs
from gramian.train.build.build_model import build_model
from gramian.train.build.memory_needs import huggingface_shape, needs_of, vocabulary_of
from gramian.train.config.config import parse_config
from gramian.train.loop.objective import Objective


def test_the_reference_gpt_is_described_as_it_is_built() -> None:
    config = parse_config(
        {"model": {"layers": 3, "width": 32, "tied": True}, "data": {"length": 24, "batch": 6, "micro_batch": 2}}
    )
    vocabulary = vocabulary_of(config.data)
    needs = needs_of(config, vocabulary, "fp32", "cpu")
    model = build_model(config, vocabulary)
    assert needs.shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (needs.length, needs.batch, needs.micro_batch, needs.windows(1)) == (24, 6, 2, 2)


@pytest.mark.parametrize(
    "told, field, value",
    [
        ({"parallel": {"checkpoint_blocks": 2}}, "checkpoint_blocks", 2),
        ({"optimizer": {"kind": "sgd"}}, "states", 0),
        ({"optimizer": {"kind": "sgd", "momentum": 0.9}}, "states", 1),
        ({"optimizer": {"kind": "adamw"}}, "states", 2),
        ({"data": {"isolate": True}}, "isolated", True),
    ],
)
def test_every_section_that_costs_memory_counts(told: dict[str, Any], field: str, value: object) -> None:
    assert getattr(needs_of(parse_config(told), 257, "fp32", "cpu"), field) == value


def test_a_vocabulary_is_known_without_reading_data(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"")
    (tmp_path / "train.json").write_text('{"dtype": "uint16", "vocabulary": 50257, "end": 50256}')
    files = [str(tmp_path / "train.bin")]
    assert vocabulary_of(parse_config({"data": {"source": "tokens", "files": files}}).data) == 50257
    assert vocabulary_of(parse_config({"data": {"source": "text", "files": [str(tmp_path / "none")]}}).data) == 257


LLAMA = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_key_value_heads": 2},
    "qwen3": LLAMA | {"num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 48}
    | {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_hugging_face_models_are_described_by_their_folder(kind: str, half: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = transformers.AutoConfig.for_model(
        kind, vocab_size=300, bos_token_id=0, eos_token_id=0, pad_token_id=0, **CONFIGS[kind]
    )
    told.save_pretrained(tmp_path)
    shape = huggingface_shape(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_config(told, attn_implementation="sdpa")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not shape.whole_segments
    if kind != "gpt2":  # its positions are not described
        assert replace(shape, counted=None, tied=told.tie_word_embeddings).parameters == shape.parameters

    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.randint(300, (2, 48))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        Objective(model.train())(tokens, tokens, 1.0)
    measured = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)
    planned = Needs(shape, "bf16" if half else "fp32", 48, 2, device="cpu").activations(2)
    assert planned.kept + planned.casts + planned.loss == pytest.approx(measured, rel=0.02)


def test_seven_billion_parameters_are_counted_without_being_there(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert huggingface_shape(str(tmp_path)).parameters == 6_738_415_616


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="model.path: .* has no config.json"):
        huggingface_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(GramianError, match="model.path: .* cannot be loaded") as caught:
        huggingface_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spikes", [True, False])
def test_a_block_of_goose_keeps_what_is_said(spikes: bool) -> None:
    length, rows, width = 64, 4, 128
    told = {"kind": "goose", "spikes": spikes, "layers": 8, "width": width}
    config = parse_config({"model": told, "data": {"length": length}})
    model, kept = build_model(config, 257), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = model.hidden(torch.zeros(rows, length, dtype=torch.long))
    needs = needs_of(config, 257, "fp32", "cpu")
    assert needs.shape.parameters == sum(p.numel() for p in model.parameters())
    assert 8 * needs.block(rows) == pytest.approx(sum(kept.values()), rel=0.03)
    assert found


def test_a_live_teacher_counts_and_a_cached_one_does_not(tmp_path: Path) -> None:
    teacher = parse_config({"model": {"layers": 3, "width": 64}, "run": {"folder": str(tmp_path)}})
    (tmp_path / "config.toml").write_text(teacher.toml())
    live = parse_config({"teacher": {"path": str(tmp_path)}})
    needs = needs_of(live, 257, "bf16", "cuda")
    assert needs.teacher is not None
    assert needs.teacher.weights == 4 * sum(p.numel() for p in build_model(teacher, 257).parameters())
    cached = parse_config({"teacher": {"path": str(tmp_path), "source": "hidden"}})
    assert needs_of(cached, 257, "bf16", "cuda").teacher is None
    nowhere = parse_config({"teacher": {"path": str(tmp_path / "nowhere")}})
    with pytest.raises(GramianError, match="teacher.path: .* has no config.json"):
        needs_of(nowhere, 257, "bf16", "cuda")
