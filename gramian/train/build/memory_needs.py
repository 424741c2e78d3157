"""Compute what a run's memory depends on from its config and the shapes of its model, without allocating anything."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.curvature.options import Options
from gramian.data.data_files import find_files, read_sidecar
from gramian.data.options import DataSection
from gramian.data.tokenizer import load_tokenizer
from gramian.models.huggingface import open_model_folder
from gramian.plan import transformer_memory
from gramian.plan.transformer_memory import Kind, Needs, Transformer, gpt
from gramian.privacy.noise.noise_strategy import buffers_of
from gramian.train.build.build_model import build_model
from gramian.train.build.build_optimizer import build_curvature
from gramian.train.config.config import Config, load_config
from gramian.train.config.config_sections import TeacherSection
from gramian.train.loop.precision import Precision
from gramian.train.state.saved_run import is_run

# Activation functions that a library computes in several operations, each of which stores a tensor.
WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")
# Stored activations of a Goose block with and without spikes, see `Transformer.kept`; counted in float32.
GOOSE_KEPT = {True: 52.3, False: 25.3}


def needs_of(config: Config, vocabulary: int, precision: Kind, device: str) -> Needs:
    """Return the sizes and options that a run's device memory depends on, for the planners; K-FAC and clipping are left out.

    Args:
        config: the run's config.
        vocabulary: number of ids of its tokenizer; a Hugging Face model has its own.
        precision: the resolved `config.precision`.
        device: "cuda" or "cpu".
    """
    data, optimizer = config.data, config.optimizer
    return Needs(
        shape_of(config, vocabulary),
        precision,
        length=data.length,
        batch=data.batch,
        micro_batch=data.micro_batch or int(config.privacy is not None and bool(config.privacy.max_physical_batch)),
        checkpoint_blocks=config.parallel.checkpoint_blocks,
        optimizer=optimizer.kind,
        momentum=optimizer.momentum > 0,
        isolated=data.isolate,
        device="cuda" if device == "cuda" else "cpu",
        teacher=None if config.teacher is None else teacher_of(config.teacher, precision),
        proof=config.privacy is not None and config.privacy.proof != "off",
        whitened=_whitened(config, vocabulary),
        noise_buffers=noise_buffers(config),
    )


def noise_buffers(config: Config) -> int:
    """Number of buffers, of one number per parameter each, that the noise of a private run needs; 0 without [privacy]."""
    return 0 if config.privacy is None else buffers_of(config.privacy.noise, config.privacy.bands)


def build_meta_model(config: Config, vocabulary: int) -> nn.Module:
    """Build a config's model on the meta device."""
    with torch.device("meta"):
        if config.model.kind != "huggingface":
            return build_model(config, vocabulary)
        with open_model_folder(str(config.model.path), "model.path") as (shape, causal):
            model: nn.Module = causal.from_config(shape)
    return model


def plan_run_curvature(
    config: Config, vocabulary: int, numbers: Precision, device: str, processes: int
) -> CurvaturePlan:
    """Plan the memory of a run's curvature on each of `processes` processes, with the operators that its optimizer keeps."""
    model = build_meta_model(config, vocabulary).to(numbers.weights)
    return _plan_curvature(config, model, numbers.activations, device, processes)[0]


def _plan_curvature(
    config: Config, model: nn.Module, activations: torch.dtype | None, device: str, processes: int
) -> tuple[CurvaturePlan, Options]:
    kfac = build_curvature(config, model)
    assert kfac is not None
    plan = kfac.plan(
        model,
        tokens=config.data.batch * config.data.length,
        activations=activations,
        device=device,
        world_size=processes,
        operators="root" if config.optimizer.kind == "kfac" else "inverse",
    )
    return plan, kfac.options


def _whitened(config: Config, vocabulary: int) -> int:
    """Number of parameters of which the optimizer "kfac" stores one number, the momentum; 0 for other optimizers."""
    if config.optimizer.kind != "kfac":
        return 0
    model = build_meta_model(config, vocabulary)
    plan, options = _plan_curvature(config, model, None, "cpu", 1)
    specs = find_blocks(model, options)
    return sum(prod(specs[row.layer].shapes[0]) for row in plan.rows if row.bytes["ready"]["cpu"])


def shape_of(config: Config, vocabulary: int) -> Transformer:
    """Return the sizes (layers, widths, parameters) of a config's model for `vocabulary` token ids."""
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


def teacher_of(teacher: TeacherSection, precision: Kind) -> transformer_memory.TeacherShape | None:
    """Return the sizes of a live teacher's model and the bytes of its weights; None if its signal is read from a cache."""
    if teacher.source != "live":
        return None
    itemsize = transformer_memory.STORED[precision]
    if not is_run(teacher.path):
        return transformer_memory.TeacherShape(huggingface_shape(teacher.path, "teacher.path"), itemsize)
    config = load_config(Path(teacher.path) / "config.toml")
    return transformer_memory.TeacherShape(shape_of(config, vocabulary_of(config.data)), itemsize)


def vocabulary_of(data: DataSection) -> int:
    """Return the number of token ids of a config's data, without reading text or tokens."""
    if data.source == "tokens":
        sidecar = read_sidecar(find_files(data.files, "tokens")[0].path)
        if sidecar is not None:
            return sidecar.vocabulary
    return load_tokenizer(data.tokenizer).vocabulary


def huggingface_shape(path: str, field: str = "model.path") -> Transformer:
    """Return the sizes of a Hugging Face language model: parameters counted on the meta device, the rest from its config.

    Errors name the config key `field`.
    """
    with open_model_folder(path, field) as (config, causal), torch.device("meta"):
        model: nn.Module = causal.from_config(config)
    text: Any = config.get_text_config()
    modules = [type(module).__name__ for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name in names)
    hidden = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return Transformer(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        vocabulary=text.vocab_size,
        hidden=hidden,
        family="llama" if gated else "gpt",
        key_heads=getattr(text, "num_key_value_heads", None),
        head_width=getattr(text, "head_dim", None),
        head_norms=any(name.endswith("q_norm") for name in names),
        dropout=float(getattr(text, "resid_pdrop", 0.0) or 0.0),
        gelu_tensors=5 if any(name in WRITTEN_OUT for name in modules) else 2,
        whole_segments=False,
        counted=sum(parameter.numel() for parameter in model.parameters()),
        parameter_shapes=_shapes(model),
    )


def _shapes(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in model.parameters())
