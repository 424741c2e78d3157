"""Small models and batches for the checks of `gramian verify`: the same every time, without zeros that would hide errors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gramian.models import GPT, GPTConfig


def perturbed(build: Callable[[], nn.Module], scale: float) -> nn.Module:
    """Build a float64 model with fixed random weights, plus noise of a given scale in all parameters, also in zero biases."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build().double()
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=scale)
    return model


def draw_batch(samples: int, shape: tuple[int, ...], ids: int, classes: int) -> tuple[Tensor, Tensor]:
    """Draw inputs [samples, *shape] and labels below `classes`, the same every time.

    Inputs are token ids below `ids`, or normal float64 numbers if `ids` is 0. There is one label per token if `classes` equals
    `ids`, else one per sample.
    """
    generator, size = torch.Generator().manual_seed(2), (samples, *shape)
    x = (
        torch.randint(ids, size, generator=generator)
        if ids
        else torch.randn(size, generator=generator, dtype=torch.float64)
    )
    return x, torch.randint(classes, size if ids == classes else (samples,), generator=generator)


def tiny_gpt(layers: int, tied: bool) -> GPT:
    """A GPT of width 8 with 24 token ids and at most 6 positions."""
    return GPT(GPTConfig(vocabulary=24, context=6, layers=layers, width=8, heads=2, tied=tied))
