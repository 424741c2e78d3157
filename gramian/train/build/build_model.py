"""Build the model of a config: the reference GPT, Goose, or a Hugging Face causal language model."""

from typing import Any

from torch import nn

from gramian.core.errors import GramianError
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig
from gramian.models.huggingface import load_huggingface
from gramian.train.config.config import Config


def build_model(config: Config, vocabulary: int) -> nn.Module:
    """Build the model that `config.model` describes for `vocabulary` token ids, with new or Hugging Face weights."""
    model, length, seed = config.model, config.data.length, config.run.seed
    if model.kind == "huggingface":
        return load_huggingface(str(model.path), model.fresh, vocabulary, length, seed, isolate=config.data.isolate)
    shape: dict[str, Any] = {"vocabulary": vocabulary, "context": length}
    shape |= {name: getattr(model, name) for name in ("layers", "width", "tied", "dropout")}
    if model.kind == "gpt":
        return GPT(GPTConfig(**shape, heads=model.heads), seed=seed)
    return Goose(GooseConfig(**shape, spikes=model.spikes), seed=seed)


def set_recomputation(model: nn.Module, blocks: int) -> None:
    """Recompute activations in the backward pass in segments of `blocks` transformer blocks; 0: store all activations.

    Raises a GramianError if `blocks` is above 1 for a Hugging Face model.
    """
    if isinstance(model, GPT | Goose):
        model.checkpoint_blocks = blocks
    elif blocks == 1:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    elif not blocks:
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    else:
        raise GramianError(f"parallel.checkpoint_blocks: expected 0 or 1 for a Hugging Face model, got {blocks}")
