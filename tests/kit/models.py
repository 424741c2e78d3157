"""The table of models on which every statistic is checked.

Usage::

    case = CASES["tied_gpt"]
    model = case.make(torch.float64)
    batch = case.make_batch(4, torch.float64, torch.Generator().manual_seed(0))
    case.loss(model, *batch, reduction="mean").backward()
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.kit import networks

Reduction = Literal["mean", "sum"]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its data and a loss that is the mean or the sum of one term per sample.

    Attributes:
        make: ``make(dtype)``, the same weights every time, in training mode.
        make_batch: ``make_batch(B, dtype, generator)``, the inputs and, last, the targets, on the CPU; the same numbers
            in every dtype, up to rounding.
        loss: ``loss(model, *batch, reduction=...)``; 'sum' is the sum over samples of terms that depend on one sample
            each, 'mean' is that sum divided by B.
        computes_in_float32: the model casts to float32 inside, so that a float64 copy is no more exact than float32.
        accepts_empty_batch: the forward pass runs with B = 0.
    """

    name: str
    make: Callable[[torch.dtype], nn.Module]
    make_batch: Callable[[int, torch.dtype, Generator], Batch]
    loss: Callable[..., Tensor]
    computes_in_float32: bool = False
    accepts_empty_batch: bool = True


def cross_entropy(model: nn.Module, *batch: Tensor, reduction: Reduction) -> Tensor:
    """Cross entropy of logits [B, ..., V] and targets [B, ...], averaged inside each sample."""
    *inputs, targets = batch
    output = model(*inputs)
    logits = getattr(output, "logits", output)
    terms = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
    return _reduce(terms, reduction)


def squared_error(model: nn.Module, *batch: Tensor, reduction: Reduction) -> Tensor:
    """Squared error of outputs and targets [B, ...], averaged inside each sample."""
    *inputs, targets = batch
    return _reduce((model(*inputs) - targets).square(), reduction)


def _reduce(terms: Tensor, reduction: Reduction) -> Tensor:
    terms_B = terms.flatten(1).mean(1) if terms.dim() > 1 else terms
    return {"mean": terms_B.mean, "sum": terms_B.sum}[reduction]()


def seeded(build: Callable[[], nn.Module], noise: float) -> nn.Module:
    """Build with a fixed seed; noise on the parameters shows mistakes that zero biases and unit norm weights would hide."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build()
        for p in model.parameters():
            p += noise * torch.randn_like(p)
    return model


def _make(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return seeded(build, 0.1).to(dtype).train()


@dataclass(frozen=True)
class _Real:
    """A tensor of normal numbers, [B, *shape]."""

    shape: tuple[int, ...]

    def draw(self, batch_size: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        return torch.randn(batch_size, *self.shape, dtype=torch.float64, generator=generator).to(dtype)


@dataclass(frozen=True)
class _Ids:
    """A tensor of integers below ``count``, [B, *shape], whose last ``padding`` columns are 0."""

    count: int
    shape: tuple[int, ...] = ()
    padding: int = 0

    def draw(self, batch_size: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        ids = torch.randint(self.count, (batch_size, *self.shape), generator=generator)
        if self.padding:
            ids[:, -self.padding :] = 0
        return ids


def _draw(fields: tuple[_Real | _Ids, ...], batch_size: int, dtype: torch.dtype, generator: Generator) -> Batch:
    return tuple(field.draw(batch_size, dtype, generator) for field in fields)


def _case(
    name: str,
    build: Callable[[], nn.Module],
    *fields: _Real | _Ids,
    loss: Callable[..., Tensor] = cross_entropy,
    **flags: bool,
) -> Case:
    return Case(name, partial(_make, build), partial(_draw, fields), loss, **flags)


_TEXT = (_Ids(13, (6,)), _Ids(13, (6,)))

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("mlp", networks.mlp, _Real((7,)), _Ids(5)),
        _case("linear_3d", networks.linears, _Real((6, 7)), _Ids(5, (6,))),
        _case("linear_4d", networks.linears, _Real((3, 5, 7)), _Real((3, 5, 5)), loss=squared_error),
        _case("gpt", partial(networks.GPT, tied=False), *_TEXT),
        _case("tied_gpt", partial(networks.GPT, tied=True), *_TEXT),
        _case("hf_gpt2", networks.hf_gpt2, *_TEXT, accepts_empty_batch=False),
        _case("hf_llama", networks.hf_llama, *_TEXT, computes_in_float32=True, accepts_empty_batch=False),
        _case("vit", networks.ViT, _Real((3, 4, 9)), _Ids(5)),
        _case("convnet", networks.convnet, _Real((3, 9, 7)), _Ids(5), accepts_empty_batch=False),
        _case("conv2d", networks.conv2d, _Real((3, 5, 4)), _Ids(5)),
        _case("conv1d", networks.conv1d, _Real((3, 11)), _Ids(5)),
        _case("conv3d", networks.conv3d, _Real((2, 4, 5, 4)), _Real((5,)), loss=squared_error),
        _case("reused", networks.Reused, _Real((6, 7)), _Ids(5, (6,))),
        _case("tied_linears", networks.TiedLinears, _Real((6, 7)), _Real((7,)), _Ids(5)),
        _case("lora", networks.lora, _Real((6, 7)), _Ids(5, (6,))),
        _case("padded_embedding", networks.padded_embedding, _Ids(13, (6,), padding=2), _Ids(5, (6,))),
        _case("rmsnorm", networks.rmsnorm, _Real((6, 7)), _Ids(5, (6,))),
        _case("mha", networks.MultiheadSelfAttention, _Real((6, 9)), _Ids(5, (6,))),
        _case("partially_frozen", networks.partially_frozen, _Real((6, 7)), _Ids(5, (6,))),
        _case("unused", networks.Unused, _Real((7,)), _Ids(5)),
        _case("broadcast", networks.Broadcast, _Real((6, 11)), _Ids(5, (6,))),
        _case("windows", networks.Windows, _Real((6, 7)), _Ids(5, (6,))),
        _case("pooled", networks.pooled, _Ids(13, (6,)), _Ids(5)),
    )
}
