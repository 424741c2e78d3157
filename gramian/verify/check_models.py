"""Small models and batches of the checks: the same every time, without zeros and ones that would hide errors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gramian.models import GPT, GPTConfig


def perturbed(build: Callable[[], nn.Module], scale: float) -> nn.Module:
    """Build a float64 model with fixed random weights, and add noise of a scale: zero biases and unit scales hide errors."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build().double()
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=scale)
    return model


def draw_batch(samples: int, shape: tuple[int, ...], ids: int, classes: int) -> tuple[Tensor, Tensor]:
    """Draw inputs [samples, *shape], token ids or for `ids` 0 normal float64 numbers, and labels below `classes`.

    There is one label per token where there are as many classes as ids, else one per sample.
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
