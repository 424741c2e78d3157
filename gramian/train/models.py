"""From [model] to a model: the reference GPT, Goose, or a Hugging Face causal language model."""

from pathlib import Path

import torch
from torch import nn

from gramian.errors import GramianError
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig
from gramian.train.config import Config


def build_model(config: Config, vocabulary: int) -> nn.Module:
    """The model, with fresh or loaded weights.

    Raises:
        GramianError: naming the field that does not fit.
    """
    options, data = config.model, config.data
    if options.kind == "gpt":
        shape = GPTConfig(
            vocabulary=vocabulary,
            context=data.length,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            tied=options.tied,
            dropout=options.dropout,
        )
        return GPT(shape, seed=config.run.seed)
    if options.kind == "goose":
        goose = GooseConfig(
            vocabulary=vocabulary,
            context=data.length,
            layers=options.layers,
            width=options.width,
            spikes=options.spikes,
            tied=options.tied,
            dropout=options.dropout,
        )
        return Goose(goose, seed=config.run.seed)
    return load_huggingface(str(options.path), options.fresh, vocabulary, data.length, config.run.seed)


def load_huggingface(
    path: str, fresh: bool, vocabulary: int, length: int, seed: int, field: str = "model.path"
) -> nn.Module:
    """A causal language model from a folder: safetensors alone, nothing from a hub.

    Args:
        path: of the folder.
        fresh: draw new weights.
        vocabulary: that it must have at least.
        length: that its context must have at least.
        seed: of new weights.
        field: that named the folder, for errors.

    Raises:
        GramianError: naming the field that does not fit.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise GramianError("model.kind: huggingface needs transformers; expected gramian[hf] installed") from None
    if not (Path(path) / "config.json").is_file():
        raise GramianError(f"{field}: {path} has no config.json; expected the folder of a Hugging Face model")
    try:
        shape = AutoConfig.from_pretrained(path, local_files_only=True)
        if fresh:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    shape, attn_implementation="sdpa"
                )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, use_safetensors=True, attn_implementation="sdpa", dtype=torch.float32
            )
    except (OSError, ValueError) as problem:
        raise GramianError(f"{field}: {path} cannot be loaded ({' '.join(str(problem).split())[:200]})") from None
    if shape.vocab_size < vocabulary:
        raise GramianError(
            f"{field}: its vocabulary of {shape.vocab_size} is smaller than the tokenizer's {vocabulary}; "
            "expected a tokenizer that belongs to the model"
        )
    limit = getattr(shape, "max_position_embeddings", None) or getattr(shape, "n_positions", None)
    if limit is not None and length > limit:
        raise GramianError(f"data.length: expected at most the model's context of {limit}, got {length}")
    found: nn.Module = model
    return found.train()


def recompute(model: nn.Module, blocks: int) -> None:
    """Recompute activations in segments of so many blocks.

    Raises:
        GramianError: if the model knows only one segment size.
    """
    if isinstance(model, GPT | Goose):
        model.checkpoint_blocks = blocks
    elif blocks == 1:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    elif blocks:
        raise GramianError(f"parallel.checkpoint_blocks: expected 0 or 1 for a Hugging Face model, got {blocks}")
