"""Productions whose rows are in order: layers, what stands around them, further inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kit.programs.grammar import (
    LAYERS,
    VOCABULARY,
    Draft,
    Run,
    Step,
    ordinary,
    reduced,
    replaced,
    unfit,
    windows_of,
)

# ---- layers ---------------------------------------------------------------------------------------------------------


@ordinary
def linear(d: Draft) -> Step:
    layer = d.linear()
    return lambda h, run: torch.tanh(layer(h))


@ordinary
def layer_norm(d: Draft) -> Step:
    layer = d.add(nn.LayerNorm(d.width))
    return lambda h, run: layer(h)


@ordinary
def convolution(d: Draft) -> Step:
    layer = d.add(nn.Conv1d(d.width, d.width, 3, padding=1, groups=d.rng.choice([1, d.width])))
    return lambda h, run: torch.tanh(layer(h.mT)).mT


@ordinary
def group_norm(d: Draft) -> Step:
    layer = d.add(nn.GroupNorm(1, d.width))
    return lambda h, run: layer(h.mT).mT + h


class Unknown(nn.Module):
    """A layer that gramian has no formula for: parameters of its own, and a mean over the tokens of a sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h * self.scale + self.shift) + h.mean(1, keepdim=True)


@ordinary
def unknown_layer(d: Draft) -> Step:
    layer = d.add(Unknown(d.width))
    return lambda h, run: layer(h)


class Counter(nn.Module):
    """The identity, which counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


@ordinary
def call_counter(d: Draft) -> Step:
    """A buffer that changes with every forward, whatever the samples are."""
    counter = d.add(Counter())
    return lambda h, run: counter(h)


@ordinary
def batch_norm_in_eval_mode(d: Draft) -> Step:
    layer = d.add(nn.BatchNorm1d(d.width)).eval()
    return lambda h, run: layer(h.mT).mT


@ordinary
def multihead_attention(d: Draft) -> Step:
    layer = d.add(nn.MultiheadAttention(d.width, 1, batch_first=True))
    return lambda h, run: h + layer(h, h, h, need_weights=False)[0]


@ordinary
def recurrent_layer(d: Draft) -> Step:
    layer = d.add(nn.GRU(d.width, d.width, batch_first=True))
    return lambda h, run: layer(h)[0]


@ordinary
def reused_layer(d: Draft) -> Step:
    """One layer, twice here and again in every production of this kind."""
    layer = d.shared_linear = d.shared_linear or d.linear()
    return lambda h, run: torch.tanh(layer(torch.sin(layer(h))))


@ordinary
def flat_tokens(d: Draft) -> Step:
    """N·T rows of two dimensions."""
    layer = d.linear()
    return lambda h, run: torch.tanh(layer(h.reshape(-1, h.shape[2]))).view(h.shape)


@ordinary
def frozen_layer(d: Draft) -> Step:
    layer = d.linear().requires_grad_(False)
    return lambda h, run: torch.tanh(layer(h))


@ordinary
def in_place(d: Draft) -> Step:
    """The user changes a layer's output in place."""
    layer = d.linear()
    return lambda h, run: layer(h).mul_(0.5).tanh_()


@ordinary
def attention(d: Draft) -> Step:
    """Tokens of a sample look at each other."""
    into, out = d.linear(2 * d.width), d.linear()

    def step(h: Tensor, run: Run) -> Tensor:
        q, k = into(h).chunk(2, -1)
        return out(torch.softmax(q @ k.mT, -1) @ h)

    return step


# ---- around layers --------------------------------------------------------------------------------------------------


@ordinary
def residual(d: Draft) -> Step:
    part = d.part()
    return lambda h, run: h + part(h, run)


@ordinary
def dropout(d: Draft) -> Step:
    if not d.random:
        return unfit
    part, d.draws = d.part(), True
    return lambda h, run: F.dropout(part(h, run), 0.3)


@ordinary
def checkpointed(d: Draft) -> Step:
    part = d.step(d.rng.choice(LAYERS))
    return lambda h, run: checkpoint(part, h, run, use_reentrant=False)


@ordinary
def windows(d: Draft) -> Step:
    """k·N rows, those of a sample next to each other."""
    if d.ragged:
        return unfit
    part = d.part(whole=False)
    return lambda h, run: part(h.unflatten(1, (windows_of(h), -1)).flatten(0, 1), run).reshape(h.shape)


@ordinary
def stacked_views(d: Draft) -> Step:
    """Two views of a sample next to each other."""
    part = d.part(whole=False)
    return lambda h, run: part(torch.stack([h, h.sin()], 1).flatten(0, 1), run).unflatten(0, (-1, 2)).sum(1)


@ordinary
def copied_rows(d: Draft) -> Step:
    """Indexing that changes nothing."""
    part = d.part()
    return lambda h, run: part(h[torch.arange(h.shape[0])], run)


@ordinary
def reversed_gradient(d: Draft) -> Step:
    """A gradient hook that treats every entry alike."""

    def step(h: Tensor, run: Run) -> Tensor:
        h = h * 1
        h.register_hook(lambda g: -0.5 * g)
        return h

    return step


@ordinary
def gate_entropy(d: Draft) -> Step:
    """An auxiliary loss inside the root with one term per sample."""
    if not d.allows_scalars or not d.whole:
        return unfit
    gate, reduction, d.returns_scalars = d.linear(3), d.reduction, True

    def step(h: Tensor, run: Run) -> Tensor:
        p = torch.softmax(gate(h), -1)
        run.losses.append(reduced(0.1 * (p * p.log()).sum((1, 2)), reduction))
        return h * p.amax(-1, keepdim=True)

    return step


# ---- further inputs -------------------------------------------------------------------------------------------------


@ordinary
def sample_weights(d: Draft) -> Step:
    """[B] numbers, zero for some."""
    if not d.whole:
        return unfit
    weights = d.normal(d.records).relu()
    weights[:2] += 0.1  # of a batch without gradients nothing can be seen
    d.inputs["weights"] = weights
    return lambda h, run: h * run.inputs["weights"].to(h)[:, None, None]


@ordinary
def sample_labels(d: Draft) -> Step:
    """[B] classes through a table."""
    if not d.whole:
        return unfit
    d.inputs["labels"] = torch.randint(VOCABULARY, (d.records,), generator=d.generator)
    table = d.add(nn.Embedding(VOCABULARY, d.width))
    return lambda h, run: h + table(run.inputs["labels"])[:, None]


@ordinary
def square_mask(d: Draft) -> Step:
    """A mask [T, T] that belongs to no sample, also where T is B."""
    if not d.whole or d.ragged:
        return unfit
    d.fixed["allowed"] = torch.ones(d.tokens, d.tokens).tril().bool()
    layer = d.linear()

    def step(h: Tensor, run: Run) -> Tensor:
        scores = (layer(h) @ h.mT).masked_fill(~run.inputs["allowed"], -1e9)
        return h + torch.softmax(scores, -1) @ h

    return step


@ordinary
def equal_token_mask(d: Draft) -> Step:
    """`h[mask]` where the mask has the same number of tokens in every sample."""
    if not d.whole or d.ragged:
        return unfit
    count = d.rng.randint(1, d.tokens)
    d.inputs["equal"] = d.uniform(d.records, d.tokens).argsort(1) < count
    layer = d.linear()
    return lambda h, run: replaced(h, run.inputs["equal"], torch.tanh(layer(h[run.inputs["equal"]])))
