"""Perplexity by named protocols, against a loop that scores one token after another."""

import math

import numpy as np
import pytest
import torch

from gramian.core.errors import GramianError
from gramian.data.token_stream import Stream
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.loop.perplexity import perplexity

VOCABULARY = 7


class Contextual(torch.nn.Module):
    """Logits that depend on everything that was read before, and on how much that is."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        seen = torch.cumsum(self.table[tokens_BT], 1)
        return torch.sin(seen) + 0.1 * torch.arange(tokens_BT.shape[1]).view(1, -1, 1) * self.table[0]


def stream(*lengths: int) -> Stream:
    generator = np.random.default_rng(1)
    edges = np.cumsum([0, *lengths])
    tokens = generator.integers(0, VOCABULARY, int(edges[-1]))
    return Stream([tokens], edges, vocabulary=VOCABULARY, end=0)


def alone() -> ProcessGrid:
    return ProcessGrid(0, 1, torch.device("cpu"), "one")


def by_hand(s: Stream, length: int, stride: int, pack: bool) -> tuple[float, int]:
    """One forward per token: which window scores it follows from its distance to the piece's beginning."""
    model, nats, count = Contextual(), 0.0, 0
    edges = [0, len(s)] if pack else s.edges.tolist()
    for begin, stop in zip(edges[:-1], edges[1:], strict=True):
        for at in range(begin + 1, stop):
            behind = at - begin - 1  # tokens before the one that predicts it
            first = begin if behind < length else begin + (behind - length) // stride * stride + stride
            tokens = torch.from_numpy(s.read(first, at))[None]
            nats -= float(model(tokens)[0, -1].log_softmax(-1)[int(s.read(at, at + 1)[0])])
            count += 1
    return nats, count


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("lengths", [(40,), (1, 2, 23, 9), (5, 16, 17)])
@pytest.mark.parametrize("length, stride", [(8, None), (8, 4), (8, 1), (8, 7), (64, 3)])
def test_every_token_is_scored_once_with_the_context_of_the_protocol(length, stride, lengths, pack) -> None:
    s = stream(*lengths)
    found = perplexity(Contextual(), s, alone(), length=length, stride=stride, pack=pack, rows=3)
    nats, count = by_hand(s, length, stride or length, pack)
    assert found.tokens == count
    assert found.nats == pytest.approx(nats, rel=1e-12)
    assert found.protocol == ("non-overlapping" if stride is None else "sliding")
    assert found.perplexity == pytest.approx(math.exp(nats / count))


def test_it_is_never_clipped() -> None:
    def sure_and_wrong(tokens_BT: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens_BT.shape, VOCABULARY)
        logits[..., 0] = 5000.0
        return logits

    found = perplexity(sure_and_wrong, stream(30), alone(), length=8)
    assert found.loss > 700 and found.perplexity == math.inf
    assert "non-overlapping" in str(found)


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_leaves_tokens_out_is_refused(stride) -> None:
    with pytest.raises(GramianError, match="stride: expected from 1 to 7"):
        perplexity(Contextual(), stream(30), alone(), length=8, stride=stride)


def test_a_limit_is_of_windows() -> None:
    assert perplexity(Contextual(), stream(100), alone(), length=8, limit=3).tokens == 24
