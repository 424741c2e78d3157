"""From [model] to a model: the reference GPT, Goose, or a Hugging Face causal language model."""

from torch import nn

from gramian.core.errors import GramianError
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig
from gramian.models.huggingface import load_huggingface
from gramian.train.config.config import Config


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
