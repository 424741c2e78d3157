"""What a config asks of a device's memory: its model as shapes, nothing allocated."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.data.data_files import find_files, read_sidecar
from gramian.data.tokenizer import load_tokenizer
from gramian.models.huggingface import reading
from gramian.plan import transformer_memory
from gramian.plan.transformer_memory import Kind, Needs, Transformer, gpt
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config, DataSection, TeacherSection, load_config
from gramian.train.state.saved_run import is_run

# Activations that a library computes in pieces, each of which keeps a tensor.
WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")
# What a block of Goose keeps, with and without spikes; see `Transformer.kept`. Counted in float32.
GOOSE_KEPT = {True: 52.3, False: 25.3}


def needs_of(config: Config, vocabulary: int, precision: Kind, device: str) -> Needs:
    """What a run will hold.

    Args:
        config: of the run. What K-FAC and clipping hold on top is not counted; a row proof is.
        vocabulary: of its tokenizer; a Hugging Face model brings its own.
        precision: what `config.precision` means on the device.
        device: "cuda" or "cpu".

    Raises:
        GramianError: if the folder of a Hugging Face model cannot be read.
    """
    data, optimizer = config.data, config.optimizer
    return Needs(
        shape_of(config, vocabulary),
        precision,
        length=data.length,
        batch=data.batch,
        micro_batch=data.micro_batch,
        checkpoint_blocks=config.parallel.checkpoint_blocks,
        optimizer=optimizer.kind,
        momentum=optimizer.momentum > 0,
        isolated=data.isolate,
        device="cuda" if device == "cuda" else "cpu",
        teacher=None if config.teacher is None else teacher_of(config.teacher, precision),
        proof=config.privacy is not None and config.privacy.proof != "off",
    )


def shape_of(config: Config, vocabulary: int) -> Transformer:
    """The shape of a config's model."""
    model, length = config.model, config.data.length
    if model.kind == "huggingface":
        return huggingface_shape(str(model.path))
    shape = gpt(vocabulary, length, model.layers, model.width, model.heads, model.tied, model.dropout)
    if model.kind == "gpt":
        return shape
    with torch.device("meta"):
        goose = build_model(config, vocabulary)
    shapes = _shapes(goose)
    count = sum(map(prod, shapes))
    return replace(shape, heads=1, positions=0, counted=count, parameter_shapes=shapes, kept=GOOSE_KEPT[model.spikes])


def teacher_of(told: TeacherSection, precision: Kind) -> transformer_memory.TeacherShape | None:
    """What a live teacher holds beside the student; None: it is read from a cache.

    Raises:
        GramianError: if its folder cannot be read.
    """
    if told.source != "live":
        return None
    itemsize = transformer_memory.STORED[precision]
    if not is_run(told.path):
        return transformer_memory.TeacherShape(huggingface_shape(told.path, "teacher.path"), itemsize)
    config = load_config(Path(told.path) / "config.toml")
    return transformer_memory.TeacherShape(shape_of(config, vocabulary_of(config.data)), itemsize)


def vocabulary_of(data: DataSection) -> int:
    """Of the data that a config names; no text and no token is read.

    Raises:
        GramianError: if the tokenizer, or what is said of a token file, cannot be read.
    """
    if data.source == "tokens":
        sidecar = read_sidecar(find_files(data.files, "tokens")[0].path)
        if sidecar is not None:
            return sidecar.vocabulary
    return load_tokenizer(data.tokenizer).vocabulary


def huggingface_shape(path: str, field: str = "model.path") -> Transformer:
    """The shape of a causal language model in a folder: parameters counted on the meta device, the rest from its config.

    Args:
        path: of the folder.
        field: that named it, for errors.

    Raises:
        GramianError: if it cannot be read.
    """
    with reading(path, field) as (told, causal), torch.device("meta"):
        model = causal.from_config(told)
    return _shape(told.get_text_config(), model)


def _shape(told: Any, model: nn.Module) -> Transformer:
    modules = [type(module).__name__ for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name in names)
    hidden = getattr(told, "intermediate_size", None) or getattr(told, "n_inner", None) or 4 * told.hidden_size
    return Transformer(
        layers=told.num_hidden_layers,
        width=told.hidden_size,
        heads=told.num_attention_heads,
        vocabulary=told.vocab_size,
        hidden=hidden,
        family="llama" if gated else "gpt",
        key_heads=getattr(told, "num_key_value_heads", None),
        head_width=getattr(told, "head_dim", None),
        head_norms=any(name.endswith("q_norm") for name in names),
        dropout=float(getattr(told, "resid_pdrop", 0.0) or 0.0),
        gelu_tensors=5 if any(name in WRITTEN_OUT for name in modules) else 2,
        whole_segments=False,
        counted=sum(parameter.numel() for parameter in model.parameters()),
        parameter_shapes=_shapes(model),
    )


def _shapes(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in model.parameters())
