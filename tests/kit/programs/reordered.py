"""Productions whose layers see rows in another order, or other rows than those of all samples."""

import torch
from torch import Tensor

from tests.kit.programs.grammar import Draft, Run, Step, replaced, shuffled, size, unfit, unusual, windows_of


@unusual
def permuted_and_back(d: Draft) -> Step:
    part, key = d.part(), d.moving_key(shuffled)

    def step(h: Tensor, run: Run) -> Tensor:
        order = shuffled(h.shape[0], key)
        return part(h[order], run)[order.argsort()]

    return step


@unusual
def sorted_and_back(d: Draft) -> Step:
    part = d.part()

    def step(h: Tensor, run: Run) -> Tensor:
        order = size(h).argsort()
        return part(h[order], run)[order.argsort()]

    return step


@unusual
def swapped_pair(d: Draft) -> Step:
    """Two samples change places, and back."""
    part, key = d.part(), d.key()

    def step(h: Tensor, run: Run) -> Tensor:
        order, pair = torch.arange(h.shape[0]), shuffled(h.shape[0], key)[:2]
        order[pair] = pair.flip(0)
        return part(h[order], run)[order]

    return step


@unusual
def flipped_and_back(d: Draft) -> Step:
    part = d.part()
    return lambda h, run: part(h.flip(0), run).flip(0)


@unusual
def rolled_and_back(d: Draft) -> Step:
    part = d.part()
    return lambda h, run: part(h.roll(1, 0), run).roll(-1, 0)


@unusual
def time_first(d: Draft) -> Step:
    """[T, N, D]: a layer that looks along the second axis mixes samples."""
    part = d.part(whole=False)
    return lambda h, run: part(h.transpose(0, 1), run).transpose(0, 1)


@unusual
def flat_tokens_time_first(d: Draft) -> Step:
    """T·N rows of two dimensions, the first tokens of all samples before the second ones."""
    layer = d.linear()

    def step(h: Tensor, run: Run) -> Tensor:
        first = h.transpose(0, 1)
        return torch.tanh(layer(first.flatten(0, 1))).view(first.shape).transpose(0, 1)

    return step


@unusual
def concatenated_views(d: Draft) -> Step:
    """2·N rows, one view of all samples before the other."""
    part = d.part(whole=False)
    return lambda h, run: torch.stack(part(torch.cat([h, h.sin()]), run).chunk(2)).sum(0)


@unusual
def windows_first(d: Draft) -> Step:
    """k·N rows, the first windows of all samples before the second ones."""
    if d.ragged:
        return unfit
    part = d.part(whole=False)

    def step(h: Tensor, run: Run) -> Tensor:
        split = h.unflatten(1, (windows_of(h), -1)).transpose(0, 1)
        return part(split.flatten(0, 1), run).reshape(split.shape).transpose(0, 1).reshape(h.shape)

    return step


@unusual
def sample_by_sample(d: Draft) -> Step:
    part = d.part(whole=False)
    return lambda h, run: torch.cat([part(h[i : i + 1], run) for i in range(h.shape[0])])


@unusual
def sample_by_sample_averaged(d: Draft) -> Step:
    """The same, whatever number of rows the layer returns for one."""
    part = d.part(whole=False)
    return lambda h, run: torch.stack([part(h[i : i + 1], run).mean(0) for i in range(h.shape[0])])


@unusual
def chunk_by_chunk(d: Draft) -> Step:
    part, chunks = d.part(whole=False), d.rng.choice([2, 3])
    return lambda h, run: torch.cat([part(piece, run) for piece in h.chunk(chunks)])


@unusual
def unstacked(d: Draft) -> Step:
    """A layer on every sample without a batch axis; T may be B."""
    layer = d.linear()
    return lambda h, run: torch.stack([torch.tanh(layer(row)) for row in h.unbind(0)])


@unusual
def token_mask(d: Draft) -> Step:
    """`h[mask]`, often with B or k·B tokens by chance."""
    if not d.whole or d.ragged:
        return unfit
    tokens = d.samples * d.tokens
    count = d.rng.choice([d.samples, d.samples, d.samples * d.rng.randint(1, d.tokens), d.samples + 1])
    mask = d.uniform(d.records, d.tokens) < 0.5
    mask[: d.samples] = (shuffled(tokens, d.key()) < count).view(d.samples, d.tokens)
    d.inputs["mask"], layer = mask, d.linear()
    return lambda h, run: replaced(h, run.inputs["mask"], torch.tanh(layer(h[run.inputs["mask"]])))


@unusual
def sample_mask(d: Draft) -> Step:
    """A layer on the samples that pass a test of their own values, often all of them."""
    layer, bound = d.linear(), d.rng.choice([-3.0, 0.0])
    return lambda h, run: replaced(h, size(h) > bound, torch.tanh(layer(h[size(h) > bound])))


@unusual
def experts(d: Draft) -> Step:
    """Every token goes to one of two layers, rows grouped by expert."""
    layers, gate = [d.linear(), d.linear()], d.linear(2)

    def step(h: Tensor, run: Run) -> Tensor:
        p, out = torch.softmax(gate(h), -1), h
        for number, layer in enumerate(layers):
            chosen = p.argmax(-1) == number
            out = replaced(out, chosen, torch.tanh(layer(h[chosen])))
        return h + out * p.amax(-1, keepdim=True)

    return step
