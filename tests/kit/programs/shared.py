"""Productions with rows or gradients that belong to no sample: a row for all, positions, tables, bare weights."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.programs.grammar import (
    ORDINARY,
    TABLE,
    UNUSUAL,
    Draft,
    Production,
    Run,
    Step,
    ordinary,
    shuffled,
    unfit,
    unusual,
)

BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row_added": lambda h, p: h + p,
    "row_multiplied": lambda h, p: h * p,
    "row_expanded": lambda h, p: torch.sin(h + p.expand(h.shape[0], -1, -1)),
    "row_in_a_product": lambda h, p: h @ (p.mT @ p),
}
"""Uses of a shared row p [1, T, D] that broadcast it over the samples in their order."""

NOT_BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row_picked": lambda h, p: h + p[0],
    "row_squeezed": lambda h, p: h + p.squeeze(0),
    "row_summed": lambda h, p: h + p.sum(0),
    "row_averaged": lambda h, p: h + p.mean(0),
    "row_power": lambda h, p: h + 0.1 * p.pow(2).sum(),
    "row_norm": lambda h, p: h * p.norm(),
    "row_length": lambda h, p: h + p * len(p),
    "row_softmax": lambda h, p: h + p * torch.softmax(p, 0),
    "row_repeated": lambda h, p: h + p.repeat(h.shape[0], 1, 1),
    "row_gathered": lambda h, p: h + p[torch.zeros(h.shape[0], dtype=torch.long)],
    "row_reshaped": lambda h, p: h + p.reshape(h.shape[1:]),
    "row_concatenated": lambda h, p: h + torch.cat([p, h])[:1],
    "row_flipped": lambda h, p: (h.flip(0) * p).flip(0),
    "row_rolled": lambda h, p: (h.roll(1, 0) * p).roll(-1, 0),
}
"""Uses that see a difference if the row becomes B rows, or that broadcast it in another order."""


def _row(d: Draft) -> Callable[[Tensor], Tensor]:
    """A layer on one row that no sample influences: from h to [1, T, D]."""
    source = d.rng.choice(["positions", "numbers", "norm", "reused"])
    if source == "positions":
        table = d.add(nn.Embedding(TABLE, d.width))
        return lambda h: table(torch.arange(h.shape[1])[None])
    layer = d.add(nn.LayerNorm(d.width)) if source == "norm" else d.shared_linear or d.linear()
    if source == "reused":
        d.shared_linear = layer
    numbers = d.normal(1, TABLE, d.width)
    return lambda h: layer(numbers[:, : h.shape[1]].to(h))


def _consumed(use: Callable[[Tensor, Tensor], Tensor]) -> Production:
    """A production that consumes a shared row."""

    def make(d: Draft) -> Step:
        row = _row(d)
        d.sample_major &= d.whole  # elsewhere it is broadcast over k·B rows, or fewer than B
        d.rounds = True  # its gradient is a sum over samples, whose order may be another one
        return lambda h, run: use(h, row(h))

    return make


ORDINARY.update({name: _consumed(use) for name, use in BROADCAST.items()})
UNUSUAL.update({name: _consumed(use) for name, use in NOT_BROADCAST.items()})


@ordinary
def expanded_positions(d: Draft) -> Step:
    """Position ids with a row per sample."""
    table = d.add(nn.Embedding(TABLE, d.width))
    return lambda h, run: h + table(torch.arange(h.shape[1]).expand(h.shape[:2]))


@ordinary
def class_token(d: Draft) -> Step:
    """A parameter of the root itself, expanded over the samples. The root is then run again sample by sample."""
    if d.random or d.ragged or not d.whole:
        return unfit
    d.own["token"] = nn.Parameter(d.normal(1, 1, d.width))
    return lambda h, run: torch.cat([run.root.token.expand(h.shape[0], -1, -1), h], 1)[:, :-1]


@ordinary
def row_in_a_chain(d: Draft) -> Step:
    """Two layers on a shared row."""
    row, layer, d.rounds = _row(d), d.linear(), True
    d.sample_major &= d.whole
    return lambda h, run: h + layer(torch.tanh(row(h)))


@unusual
def row_penalised(d: Draft) -> Step:
    """A penalty on a shared row, inside the root."""
    if not d.allows_scalars:
        return unfit
    row, d.returns_scalars = _row(d), True

    def step(h: Tensor, run: Run) -> Tensor:
        p = row(h)
        run.losses.append(0.1 * p.pow(2).sum())
        return h + p

    return step


@unusual
def bare_positions(d: Draft) -> Step:
    """Position ids [T] without a batch axis, counted or scrambled; T may be B."""
    table = d.add(nn.Embedding(TABLE, d.width))
    places = d.rng.choice([torch.arange(TABLE), shuffled(TABLE, d.key())])
    return lambda h, run: h + table(places[: h.shape[1]])


@unusual
def bare_table(d: Draft) -> Step:
    """A table [T, D] through a layer; T may be B."""
    layer, numbers = d.linear(), d.normal(TABLE, d.width)
    return lambda h, run: h + layer(numbers[: h.shape[1]].to(h))


@unusual
def relative_positions(d: Draft) -> Step:
    """A table of relative positions [T, T] through an embedding, as Swin and DeBERTa-v2 have it."""
    table = d.add(nn.Embedding(2 * TABLE, 1))

    def step(h: Tensor, run: Run) -> Tensor:
        place = torch.arange(h.shape[1])
        bias_TT = table(place[:, None] - place + TABLE).squeeze(-1)
        return h + torch.softmax(h @ h.mT + bias_TT, -1) @ h

    return step


@unusual
def gathered_table(d: Draft) -> Step:
    """A table that a layer transforms, read at places that depend on the sample; it may have B rows."""
    layer, numbers = d.linear(), d.normal(d.rng.choice([1, d.samples, 2 * d.samples, 5]), d.width)

    def step(h: Tensor, run: Run) -> Tensor:
        place = (h.detach().sum(-1) * 10).long() % len(numbers)
        return h + layer(numbers.to(h))[place]

    return step


# ---- parameters that are used without their layer -------------------------------------------------------------------


@unusual
def weight_penalty(d: Draft) -> Step:
    """An L2 term inside the root: a gradient that no layer's output carries."""
    if not d.allows_scalars:
        return unfit
    layer, d.returns_scalars = d.linear(), True

    def step(h: Tensor, run: Run) -> Tensor:
        run.losses.append(0.01 * layer.weight.pow(2).sum())
        return torch.tanh(layer(h))

    return step


@unusual
def weight_without_its_layer(d: Draft) -> Step:
    """A layer is called, and its weight is used once more by a function."""
    layer = d.linear()
    return lambda h, run: F.linear(torch.tanh(layer(h)), layer.weight)
