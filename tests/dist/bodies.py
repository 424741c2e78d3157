"""The properties that hold for every way of data parallelism, as bodies for `tests.kit.processes.distributed`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gramian
from tests.dist.worlds import (
    assert_same_bits,
    checkpointed,
    gradients,
    mine,
    plain_gradients,
    ranks_agree,
    whole,
    without_sync,
    wrap,
)
from tests.statistics.problems import (
    Problem,
    assert_health,
    assert_noise,
    assert_norms,
    assert_tensors,
    health_by_hooks,
    problem,
    splits,
)


def own_norms(rank: int, way: str, name: str, sizes: tuple[int, ...], reduction: str, dtype: torch.dtype) -> None:
    """Every rank has the norms of its own samples, and the gradients it would have without gramian."""
    p, rows = problem(name, sum(sizes), dtype), mine(rank, sizes)
    expected = plain_gradients(p, way, lambda model: p.backward(model, p.rows(rows), reduction))
    model = wrap(way, p.model())
    with gramian.per_sample_norms(model, reduction) as norms:
        p.backward(model, p.rows(rows), reduction)
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_same_bits(gradients(model), expected)


def added_up(rank: int, way: str, name: str, sizes: tuple[int, ...], reduction: str) -> None:
    """With a process group, additive statistics on every rank are those of all samples; norms stay each rank's own."""
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    check_sums(p, rows, wrap(way, p.model()), reduction)


def check_sums(p: Problem, rows: slice, model: nn.Module, reduction: str) -> None:
    """One captured step over the whole world, against the loop over all samples."""
    norms, fisher, noise, health = (
        gramian.PerSampleNorms(), gramian.DiagonalFisher(), gramian.NoiseScale(), gramian.Health(),
    )  # fmt: skip
    group: Any = dist.group.WORLD
    with gramian.observe(model, fisher, noise, health, norms, loss_reduction=reduction, process_group=group) as seen:
        p.backward(model, p.rows(rows), reduction)
    samples = len(p.batch[0])
    assert_tensors(whole(seen[fisher]), p.fisher(), p.tolerance)
    assert_noise(seen[noise], p.noise(), samples, p.tolerance)
    assert_health(seen[health], health_by_hooks(p.case.name, samples), p.tolerance)
    assert_norms(seen[norms].values, p.norms(rows), p.tolerance)
    assert ranks_agree(seen[noise].simple)


def without_a_group(rank: int, way: str, name: str, sizes: tuple[int, ...]) -> None:
    """Without a process group every rank's statistics are those of its own samples."""
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    model, fisher, noise = wrap(way, p.model()), gramian.DiagonalFisher(), gramian.NoiseScale()
    with gramian.observe(model, fisher, noise) as seen:
        p.backward(model, p.rows(rows))
    assert_tensors(whole(seen[fisher]), p.fisher(rows), p.tolerance)
    assert_noise(seen[noise], p.noise(rows), rows.stop - rows.start, p.tolerance)


def accumulated(rank: int, way: str, name: str) -> None:
    """Two micro-batches, the first without communication: norms of both, and the gradients of the step without gramian."""
    sizes = (3, 4)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    first, second = slice(rows.start, rows.start + 1), slice(rows.start + 1, rows.stop)

    def step(model: nn.Module) -> None:
        with without_sync(model):
            p.backward(model, p.rows(first))
        p.backward(model, p.rows(second))

    expected = plain_gradients(p, way, step)
    model, noise = wrap(way, p.model()), gramian.NoiseScale()
    group: Any = dist.group.WORLD
    with gramian.per_sample_norms(model) as norms, gramian.observe(model, noise, process_group=group) as seen:
        step(model)
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_noise(seen[noise], p.noise(), sum(sizes), p.tolerance)
    assert_same_bits(gradients(model), expected)


def checkpoints(rank: int, way: str, name: str) -> None:
    """Blocks that run again in the backward are counted once, under their own names."""
    sizes = (2, 3)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    model = wrap(way, checkpointed(p.model()))
    names = [key for key, _ in p.model().named_parameters()]
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert list(norms.coverage) == names
    assert {cover.uses for key, cover in norms.coverage.items() if "blocks" in key or "layers" in key} == {1}


def names_are_the_users(rank: int, way: str, name: str) -> None:
    """No wrapper shows in the names of coverage and results."""
    p = problem(name, 4)
    model, fisher, health = wrap(way, p.model()), gramian.DiagonalFisher(), gramian.Health()
    with gramian.observe(model, fisher, health) as seen:
        p.backward(model, p.rows(slice(2 * rank, 2 * rank + 2)))
    names = [key for key, _ in p.model().named_parameters()]
    assert list(seen.coverage) == names
    assert list(seen[fisher]) == names
    assert {key.rpartition(".")[0] for key in names} <= set(seen[health])


def one_rank_alone(rank: int, way: str, name: str, alone: int) -> None:
    """A capture on one rank needs nobody else: no hidden collective, and the other rank's gradients are its usual ones."""
    sizes = (3, 2)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    expected = plain_gradients(p, way, lambda model: p.backward(model, p.rows(rows)))
    model = wrap(way, p.model())
    if rank == alone:
        noise = gramian.NoiseScale()
        proof = "auto" if way == "ddp" else "off"  # a sharded model cannot be run by one process alone
        with gramian.per_sample_norms(model, proof=proof) as norms, gramian.observe(model, noise, proof=proof):
            p.backward(model, p.rows(rows))
        assert_norms(norms.values, p.norms(rows), p.tolerance)
    else:
        p.backward(model, p.rows(rows))
    assert_same_bits(gradients(model), expected)


def wrapped_inside_the_block(rank: int, way: str, name: str) -> None:
    """Taps first, wrapper second."""
    sizes = (3, 2)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    expected = plain_gradients(p, way, lambda model: p.backward(model, p.rows(rows)))
    bare = p.model()
    if way != "ddp":
        late, refused = p.model(), pytest.raises(gramian.GramianError, match="^model: was sharded inside a capture")
        with refused, gramian.per_sample_norms(late):
            p.backward(wrap(way, late), p.rows(rows))
    with gramian.per_sample_norms(bare, proof="auto" if way == "ddp" else "off") as norms:
        model = wrap(way, bare)
        p.backward(model, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_same_bits(gradients(model), expected)


def wrapped_between_captures(rank: int, way: str, name: str) -> None:
    """One capture of the bare model, one of the wrapped one, one again of the bare name for it."""
    sizes = (3, 2)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    bare = p.model()
    with gramian.per_sample_norms(bare) as before:
        p.backward(bare, p.rows(rows))
    bare.zero_grad()
    model = wrap(way, bare)
    with gramian.per_sample_norms(model) as after:
        p.backward(model, p.rows(rows))
    with gramian.per_sample_norms(bare) as again:
        p.backward(model, p.rows(rows))
    for norms in (before, after, again):
        assert_norms(norms.values, p.norms(rows), p.tolerance)


def several_steps(rank: int, way: str, name: str) -> None:
    """Training goes on: three optimizer steps with captures end at the parameters of three steps without."""
    sizes = (3, 2)
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    ends = []
    for captured in (False, True):
        model = wrap(way, p.model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            if captured:
                with gramian.per_sample_norms(model):
                    p.backward(model, p.rows(rows))
            else:
                p.backward(model, p.rows(rows))
            optimizer.step()
        ends.append([q.detach().to_local() if hasattr(q, "to_local") else q.detach() for q in model.parameters()])
    assert_same_bits(ends[1], ends[0])


def same_at_any_world_size(rank: int, way: str, name: str, sizes: tuple[int, ...], reduction: str) -> None:
    """The additive statistics and own norms, at whatever world size; ranks may hold several micro-batches."""
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    model, group = wrap(way, p.model()), dist.group.WORLD
    fisher, noise = gramian.DiagonalFisher(), gramian.NoiseScale()
    count = rows.stop - rows.start
    parts = [
        slice(rows.start + part.start, rows.start + part.stop) for part in splits([count // 2, count - count // 2])
    ]
    with (
        gramian.per_sample_norms(model, reduction) as norms,
        gramian.observe(model, fisher, noise, loss_reduction=reduction, process_group=group) as seen,
    ):
        for part in parts:
            p.backward(model, p.rows(part), reduction)
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_tensors(whole(seen[fisher]), p.fisher(), p.tolerance)
    assert_noise(seen[noise], p.noise(), sum(sizes), p.tolerance)


def placed_like_parameters(rank: int, way: str, name: str, sizes: tuple[int, ...]) -> None:
    """Results per parameter live where the parameter's gradient lives, once they are the same on every rank."""
    p, rows, fisher = problem(name, sum(sizes)), mine(rank, sizes), gramian.DiagonalFisher()
    model = wrap(way, p.model())
    with gramian.observe(model, fisher, process_group=dist.group.WORLD) as seen:
        p.backward(model, p.rows(rows))
    gradients = {key.removeprefix("module."): q.grad for key, q in model.named_parameters()}
    for key, value in seen[fisher].items():
        assert isinstance(value, DTensor) == isinstance(gradients[key], DTensor)
        if isinstance(value, DTensor):
            assert value.placements == gradients[key].placements and value.device_mesh == gradients[key].device_mesh


class Bypassed(nn.Module):
    """A weight that is never used through its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.kept.weight)


def a_bypassed_weight_is_named(rank: int) -> None:
    """The audit sees it under FSDP2 as it does elsewhere."""
    model = Bypassed()
    fully_shard(model)
    with pytest.raises(gramian.GramianError, match="kept.weight"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()
