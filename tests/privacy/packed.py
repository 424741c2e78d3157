"""Documents of different lengths packed into rows, and the loop over documents, each by itself, as the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig
from gramian.oracles.clipped_sum import ClippedSum, clip
from gramian.privacy.clipping.clip_factors import SLACK
from tests.privacy.problems import Run

VOCABULARY, LENGTH = 17, 12
LENGTHS = (5, 4, 3, 7, 2, 10)
KINDS = ("gpt", "tied gpt")
Packing = Sequence[Sequence[int]]
"""The documents of each row, in order."""


def model_of(kind: str) -> nn.Module:
    """A small model that keeps documents apart, the same weights every time."""
    if kind == "goose":
        return Goose(GooseConfig(vocabulary=VOCABULARY, layers=1, width=12, spikes=False)).double()
    tied = kind == "tied gpt"
    return GPT(GPTConfig(vocabulary=VOCABULARY, context=LENGTH, layers=1, width=12, heads=2, tied=tied)).double()


@lru_cache
def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Documents of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


@dataclass
class Rows:
    """Packed rows [B, T]: tokens, the document of each (−1: padding), and the next tokens of the same document (else −100)."""

    tokens: Tensor
    ids: Tensor
    labels: Tensor


def packed(packing: Packing, texts: Sequence[Tensor] | None = None) -> Rows:
    """Documents in rows of `LENGTH` tokens, padded at the end."""
    texts, shape = texts or documents(), (len(packing), LENGTH)
    rows = Rows(torch.zeros(shape, dtype=torch.long), torch.full(shape, -1), torch.full(shape, -100))
    for b, row in enumerate(packing):
        at = 0
        for number in row:
            text = texts[number]
            stop = at + len(text)
            rows.tokens[b, at:stop], rows.ids[b, at:stop] = text, 10 + number
            rows.labels[b, at : stop - 1] = text[1:]
            at = stop
        assert at <= LENGTH
    return rows


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    """Summed cross-entropy."""
    logits = model(rows.tokens, rows.ids)
    return F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=-100, reduction="sum")


def summed(run: Run, rows: Rows) -> dict[str, Tensor]:
    """What a private backward over packed rows adds to the gradients."""
    run.optimizer.zero_grad()
    with run.engine.units(rows.ids):
        run.engine.backward(loss_of(run.model, rows))
    return run.gradients()


@lru_cache
def of_documents(kind: str) -> dict[str, Tensor]:
    """Gradient of each document, by a backward of its own: {parameter: [documents, *shape]}."""
    model = model_of(kind)
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for text in documents():
        model.zero_grad()
        F.cross_entropy(model(text[None])[0, :-1], text[1:], reduction="sum").backward()
        for name, p in model.named_parameters():
            found[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(parts) for name, parts in found.items()}


def norms(kind: str) -> Tensor:
    """Norm of each document's gradient."""
    return torch.stack([g.flatten(1).square().sum(1) for g in of_documents(kind).values()]).sum(0).sqrt()


def wanted(kind: str, limit: float, chosen: Any = slice(None)) -> ClippedSum:
    """The loop's clipped sum over some documents."""
    gradients = {name: g[chosen] for name, g in of_documents(kind).items()}
    return clip(gradients, limit / (1 + SLACK[torch.float64]))


def first_fit(order: Sequence[int]) -> list[list[int]]:
    """Rows of `LENGTH` tokens, filled in this order: each document into the first row with room."""
    rows: list[list[int]] = []
    for number in order:
        for row in rows:
            if sum(LENGTHS[other] for other in row) + LENGTHS[number] <= LENGTH:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows
