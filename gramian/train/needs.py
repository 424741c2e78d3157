"""What a config asks of a device's memory: its model as shapes, nothing allocated."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.errors import GramianError
from gramian.plan.memory import Kind, Needs, Transformer, gpt
from gramian.train.config import Config, Data
from gramian.train.data.files import find_files, read_sidecar
from gramian.train.data.tokenizer import load_tokenizer

# Activations that a library computes in pieces, each of which keeps a tensor.
WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")


def needs_of(config: Config, vocabulary: int, precision: Kind, device: str) -> Needs:
    """What a run will hold.

    Args:
        config: of the run. What K-FAC and private training hold on top is not counted.
        vocabulary: of its tokenizer; a Hugging Face model brings its own.
        precision: what `config.precision` means on the device.
        device: "cuda" or "cpu".

    Raises:
        GramianError: if the folder of a Hugging Face model cannot be read.
    """
    model, data, optimizer = config.model, config.data, config.optimizer
    if model.kind == "gpt":
        shape = gpt(vocabulary, data.length, model.layers, model.width, model.heads, model.tied, model.dropout)
    else:
        shape = huggingface_shape(str(model.path))
    return Needs(
        shape,
        precision,
        length=data.length,
        batch=data.batch,
        micro_batch=data.micro_batch,
        checkpoint_blocks=config.parallel.checkpoint_blocks,
        optimizer=optimizer.kind,
        momentum=optimizer.momentum > 0,
        isolated=data.isolate,
        device="cuda" if device == "cuda" else "cpu",
    )


def vocabulary_of(data: Data) -> int:
    """Of the data that a config names; no text and no token is read.

    Raises:
        GramianError: if the tokenizer, or what is said of a token file, cannot be read.
    """
    if data.source == "tokens":
        sidecar = read_sidecar(find_files(data.files, "tokens")[0].path)
        if sidecar is not None:
            return sidecar.vocabulary
    return load_tokenizer(data.tokenizer).vocabulary


def huggingface_shape(path: str) -> Transformer:
    """The shape of a causal language model in a folder: parameters counted on the meta device, the rest from its config.

    Raises:
        GramianError: if it cannot be read.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise GramianError("model.kind: huggingface needs transformers; expected gramian[hf] installed") from None
    if not (Path(path) / "config.json").is_file():
        raise GramianError(f"model.path: {path} has no config.json; expected the folder of a Hugging Face model")
    try:
        told = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(told)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as problem:
        raise GramianError(f"model.path: {path} cannot be read ({' '.join(str(problem).split())[:200]})") from None
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
    )
