"""The language model that a profile of K-FAC or of clipping measures: the reference GPT of any size, or that of a config."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.models import GPT, GPTConfig
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.build.memory_needs import vocabulary_of
from gramian.train.config.config import Config
from gramian.train.loop.objective import logits_of
from gramian.verify.model_layouts import spread


@dataclass(frozen=True)
class ProfiledModel:
    """A language model that a profile measures.

    Example:
        `reference_gpt(layers=2, width=128, vocabulary=256, context=512).build()` is a GPT.
    """

    build: Callable[[], nn.Module]
    """Makes the model on the CPU."""
    vocabulary: int
    title: str
    """Kind and size of the model, for a table's title."""
    facts: dict[str, Any]
    """Kind and size of the model, for a JSON file."""

    def place(self, grid: ProcessGrid) -> nn.Module:
        """Build the model on this process's device, and place it on the processes, in DDP, FSDP2 or tensor parallel."""
        return spread(self.build().to(grid.device), grid)

    def batch(self, batch_size: int, length: int, grid: ProcessGrid) -> Tensor:
        """Draw tokens and targets [2, batch_size, length], different ones on every process, or tensor-parallel group."""
        generator = torch.Generator().manual_seed(grid.data[0])
        return torch.randint(self.vocabulary, (2, batch_size, length), generator=generator).to(grid.device)


def next_token_loss(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Mean cross entropy of a language model on tokens x with targets y, both [B, T]."""
    return F.cross_entropy(logits_of(model, x_BT).flatten(0, 1), y_BT.flatten())


def reference_gpt(layers: int, width: int, vocabulary: int, context: int) -> ProfiledModel:
    """The reference GPT of a given size; it has width/64 heads, at least 4, if 64 divides the width, else 4 heads."""
    heads = max(4, width // 64) if width % 64 == 0 else 4
    config = GPTConfig(vocabulary=vocabulary, context=context, layers=layers, width=width, heads=heads)
    title = f"GPT: {layers} layer{'s' * (layers != 1)}, width {width}, vocabulary {vocabulary}"
    return ProfiledModel(lambda: GPT(config), vocabulary, title, asdict(config))


def model_of_config(config: Config, context: int) -> ProfiledModel:
    """The model of a training config, for sequences of up to `context` tokens; errors name the field that does not fit."""
    config = replace(config, data=replace(config.data, length=context))
    vocabulary, options = vocabulary_of(config.data), config.model
    size = f"{options.layers} layer{'s' * (options.layers != 1)}, width {options.width}"
    name = str(options.path) if options.kind == "huggingface" else f"{options.kind} of the config: {size}"
    return ProfiledModel(
        lambda: build_model(config, vocabulary),
        vocabulary,
        f"{name}, vocabulary {vocabulary}",
        {**asdict(options), "vocabulary": vocabulary, "context": context},
    )
