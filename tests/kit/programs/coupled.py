"""Productions in which samples depend on each other: in the forward, in a loss inside the root, or in the backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.programs.grammar import UNUSUAL, Draft, Production, Run, Step, shuffled, size, unfit, unusual

MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda h: h - h.mean(0),
    "slightly_centred": lambda h: h - 0.01 * h.mean(0),
    "centred_without_gradient": lambda h: h - h.detach().mean(0),
    "standardised": lambda h: h / (0.1 + h.var()),
    "softmax_over_samples": lambda h: h + torch.softmax(h, 0),
    "attention_over_samples": lambda h: h + (h.flatten(1) @ h.flatten(1).T @ h.flatten(1)).view(h.shape) / h.numel(),
    "cumulated": lambda h: h + 0.1 * h.cumsum(0),
    "neighbour_added": lambda h: h + 0.5 * h.roll(1, 0),
    "first_sample_added": lambda h: h + 0.5 * h[:1],
    "largest_subtracted": lambda h: h - h.amax(0),
    "flipped": lambda h: h.flip(0),
    "rolled": lambda h: h.roll(1, 0),
    "sorted_by_size": lambda h: h[size(h).argsort()],
    "sorted_entries": lambda h: h + 0.3 * h.sort(0).values,
    "averaged_with_flipped": lambda h: (h + h.flip(0)) / 2,
    "last_sample_repeated": lambda h: torch.cat([h[1:], h[-1:]]),
    "over_one_norm": lambda h: h / (0.1 + h.norm()),
}
"""Operations without parameters that couple samples; behind the last layer no tap sees them."""

HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient_over_its_norm": lambda g: g / (g.norm() + 1e-3),
    "gradient_centred": lambda g: g - g.mean(0),
    "gradient_flipped": lambda g: g.flip(0),
}
"""Gradient hooks that couple samples; the forward is unchanged."""


def _mixing(mix: Callable[[Tensor], Tensor]) -> Production:
    return lambda d: lambda h, run: mix(h)


def _hooked(hook: Callable[[Tensor], Tensor]) -> Production:
    def step(h: Tensor, run: Run) -> Tensor:
        h = h * 1
        h.register_hook(hook)
        return h

    return lambda d: step


UNUSUAL.update({name: _mixing(mix) for name, mix in MIXES.items()})
UNUSUAL.update({name: _hooked(hook) for name, hook in HOOKS.items()})


class Normalised(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm over the whole batch."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-3)


@unusual
def normalising_function(d: Draft) -> Step:
    return lambda h, run: Normalised.apply(h)


@unusual
def permuted(d: Draft) -> Step:
    key = d.moving_key(shuffled)
    return lambda h, run: h[shuffled(h.shape[0], key)]


@unusual
def drawn_with_repetition(d: Draft) -> Step:
    def drawn(rows: int, key: int) -> Tensor:
        return shuffled(2 * rows, key)[:rows] % rows

    key = d.moving_key(drawn)
    return lambda h, run: h[drawn(h.shape[0], key)]


@unusual
def mixed_up(d: Draft) -> Step:
    """Every sample with a random other one."""
    if not d.random:
        return unfit
    d.draws = True
    return lambda h, run: 0.7 * h + 0.3 * h[torch.randperm(h.shape[0])]


@unusual
def batch_norm(d: Draft) -> Step:
    if not d.whole:  # a window may be one token
        return unfit
    layer = d.add(nn.BatchNorm1d(d.width))
    return lambda h, run: layer(h.mT).mT


@unusual
def above_the_mean(d: Draft) -> Step:
    """The sign of a sample's distance from the mean. With few samples, a replacement seldom changes a sign."""
    if d.samples < 24 or not d.whole:
        return unfit
    return lambda h, run: h * (size(h) - size(h).mean()).sign()[:, None, None]


@unusual
def layer_on_the_mean(d: Draft) -> Step:
    """One row, which every sample influences."""
    layer = d.linear()
    return lambda h, run: h + layer(h.mean(0, keepdim=True))


@unusual
def layer_on_the_first(d: Draft) -> Step:
    """One row, which the first sample influences."""
    layer = d.linear()
    return lambda h, run: h + layer(h[:1])


@unusual
def balanced_gate(d: Draft) -> Step:
    """The load-balancing loss of Switch Transformers inside the root: E · Σ_e (share of tokens) · (mean probability)."""
    if not d.allows_scalars:
        return unfit
    gate, strength, d.returns_scalars = d.linear(3), d.rng.choice([0.001, 0.1]), True

    def step(h: Tensor, run: Run) -> Tensor:
        p = torch.softmax(gate(h), -1)
        share = F.one_hot(p.argmax(-1), 3).to(p).flatten(0, -2).mean(0)
        balance = strength * 3 * (share * p.flatten(0, -2).mean(0)).sum()
        run.losses.append(balance if d.reduction == "mean" else balance * h.shape[0])
        return h * p.amax(-1, keepdim=True)

    return step
