"""Layers that gramian has no formula for under FSDP2: models of them, and what holds for each against the loop."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import gramian
from gramian.oracles import single_sample
from tests.dist import private_bodies as bodies
from tests.dist.worlds import each_block, mine
from tests.kit.models import Batch, Case, cross_entropy, seeded
from tests.kit.toys import Toy
from tests.statistics.problems import Problem, assert_norms, assert_tensors

WIDTH, TOKENS, CLASSES = 6, 3, 5


def scale() -> Toy:
    """A raw parameter in a module of its own."""
    return Toy(lambda net, x: x * net.scale, scale=nn.Parameter(torch.ones(WIDTH)))


class Listed(nn.Module):
    """Raw parameters in a list, one of them used twice and one frozen, around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])
        self.scales[2].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, frozen = self.scales
        return self.norm(x * first + frozen) * second + first


def twice() -> Toy:
    """One recurrent layer, used twice."""
    return Toy(lambda net, x: net.inner(net.inner(x)[0])[0], inner=nn.GRU(WIDTH, WIDTH, batch_first=True))


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": partial(nn.LSTM, WIDTH, WIDTH, num_layers=2, batch_first=True),
    "attention": partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True),
    "encoder": partial(nn.TransformerEncoderLayer, WIDTH, 2, 7, dropout=0.0, batch_first=True),
    "prelu": partial(nn.PReLU, TOKENS),
    "bilinear": partial(nn.Bilinear, WIDTH, WIDTH, WIDTH),
    "weight_norm": weight_normed,
    "raw": scale,
    "listed": Listed,
    "twice": twice,
    "raw block": partial(nn.Linear, WIDTH, WIDTH),
    "raw root": partial(nn.Linear, WIDTH, WIDTH),
    "apart": partial(nn.Linear, WIDTH, WIDTH),
}
"""By kind of model: the layer of its blocks. "raw block" and "raw root" have a parameter on the block or root itself, "apart"
has it in a module of its own."""
UNITS = ("blocks", "blocks kept", "layers", "root")
"""Which modules are `fully_shard` units: the blocks and the root (weights kept after the forward or not), the layers and the
root, the root alone."""
UNITS_BELOW = {("raw block", "layers"), ("raw root", "blocks"), ("raw root", "blocks kept"), ("raw root", "layers")}
"""(Kind, units) in which a parameter hangs on a module that has units below it."""
ACCEPTED = [pair for pair in itertools.product(LAYERS, UNITS) if pair not in UNITS_BELOW]


class Block(nn.Module):
    """A layer, a linear one behind it, and with `raw` a parameter of the block itself."""

    def __init__(self, layer: nn.Module, raw: bool) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH)) if raw else None

    def forward(self, x: Tensor) -> Tensor:
        count = {nn.MultiheadAttention: 3, nn.Bilinear: 2}
        arguments = next((n for kind, n in count.items() if isinstance(self.layer, kind)), 1)
        made = self.layer(*[x] * arguments)
        made = self.linear(made[0] if isinstance(made, tuple) else made)
        return x + (made if self.shift is None else (made + self.shift).tanh())


class Layered(nn.Module):
    """Two blocks of a layer between linear ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block(LAYERS[kind](), kind == "raw block") for _ in range(2)])
        self.raw = nn.Parameter(torch.ones(WIDTH)) if kind == "raw root" else None
        self.scale = scale() if kind == "apart" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(self.first(x))
        x = x if self.raw is None else x * self.raw
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _make(kind: str, dtype: torch.dtype) -> nn.Module:
    return seeded(lambda: Layered(kind), 0.1).to(dtype)


def _batch(samples: int, dtype: torch.dtype, generator: Generator) -> Batch:
    x = torch.randn(samples, TOKENS, 3, dtype=torch.float64, generator=generator).to(dtype)
    return x, torch.randint(CLASSES, (samples, TOKENS), generator=generator)


@lru_cache
def layered(kind: str, samples: int, dtype: torch.dtype = torch.float64) -> Problem:
    """A model of these layers, its samples, and the loop's gradients in float64 on the rounded weights and data."""
    case = Case(kind, partial(_make, kind), _batch, cross_entropy)
    return _solved(case, _batch(samples, dtype, torch.Generator().manual_seed(3)), dtype)


def _solved(case: Case, batch: Batch, dtype: torch.dtype) -> Problem:
    exact = tuple(t.double() if t.is_floating_point() else t for t in batch)
    loss = partial(case.loss, reduction="sum")
    return Problem(case, batch, single_sample.per_sample_gradients(case.make(dtype).double(), loss, exact), dtype)


def moved_to(p: Problem, weights: dict[str, Tensor]) -> Problem:
    """The same problem at other weights."""

    def make(dtype: torch.dtype) -> nn.Module:
        model = p.model()
        model.load_state_dict(weights)
        return model.to(dtype)

    return _solved(replace(p.case, make=make), p.batch, p.dtype)


def sharded(model: nn.Module, units: str, checkpoint: bool = False, **options: Any) -> nn.Module:
    """The model with these `fully_shard` units, and its blocks checkpointed or not."""
    options["reshard_after_forward"] = units != "blocks kept"
    if units == "layers":
        each_block(model, lambda block: fully_shard(block.layer, **options) and block)
    if checkpoint:
        each_block(model, checkpoint_wrapper)
    if units.startswith("blocks"):
        each_block(model, lambda block: fully_shard(block, **options))
    return fully_shard(model, **options)


def expected(p: Problem, limit: float) -> dict[str, Tensor]:
    """Σ c_i g_i of every parameter; zeros of the frozen ones."""
    sums = bodies.clipped_sum(p, limit)
    return {key: sums[key] if q.requires_grad else torch.zeros_like(q) for key, q in p.model().named_parameters()}


# ---- what holds --------------------------------------------------------------------------------------------------------


def own_norms(rank: int, kind: str, units: str, sizes: Sequence[int], reduction: str, checkpoint: bool) -> None:
    """Each rank has the norms of its own samples, and exactly the gradients it would have without gramian."""
    p, rows = layered(kind, sum(sizes)), mine(rank, sizes)
    plain, model = (sharded(p.model(), units, checkpoint) for _ in range(2))
    p.backward(plain, p.rows(rows), reduction)
    with gramian.per_sample_norms(model, reduction) as norms:
        p.backward(model, p.rows(rows), reduction)
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    trained = [[q for q in one.parameters() if q.requires_grad] for one in (model, plain)]
    for q, want in zip(*trained, strict=True):
        assert isinstance(q.grad, DTensor) and isinstance(want.grad, DTensor)
        assert torch.equal(q.grad.to_local(), want.grad.to_local())


def two_steps(
    rank: int, kind: str, units: str, sizes: Sequence[int], reduction: str, clipping: str, checkpoint: bool
) -> None:
    """Each backward leaves shards of the clipped sum of all ranks' samples, and each step moves the weights by it."""
    p, rows = layered(kind, sum(sizes)), mine(rank, sizes)
    model, limit = sharded(p.model(), units, checkpoint), bodies.limit_of(p)
    private = bodies.make_private(p, model, lr=0.5, clipping=clipping, loss_reduction=reduction)
    for _ in range(2):
        weights = bodies.parameters_of(model)
        p = moved_to(p, weights)
        private.optimizer.zero_grad()
        private.backward(rows, reduction, by_engine=clipping == "two_pass")
        last, want, close = private.engine.last, expected(p, limit), {"rtol": p.tolerance, "atol": 0.0}
        assert last is not None
        torch.testing.assert_close(last.norms_B.double(), p.norms(rows), **close)
        torch.testing.assert_close(last.factors_B.double(), bodies.factors(p, limit, rows), **close)
        for q in model.parameters():
            assert isinstance(q, DTensor)
            assert not q.requires_grad or (isinstance(q.grad, DTensor) and q.grad.placements == (Shard(0),))
        assert_tensors(bodies.gradients_of(model), want, p.tolerance)
        private.optimizer.step()
        step = {key: -0.5 * total / bodies.EXPECTED_BATCH for key, total in want.items()}
        assert_tensors(bodies.moved_by(model, weights), step, p.tolerance)
        bodies.assert_ranks_hold_the_same(bodies.parameters_of(model))
    private.engine.detach()
