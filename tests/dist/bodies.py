"""The properties that hold for every way of data parallelism, as bodies for `tests.kit.processes.distributed`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gramian
from tests.dist.worlds import (
    assert_same_bits,
    captured,
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
    p, rows = problem(name, 5), mine(rank, (2, 3))
    model = wrap(way, checkpointed(p.model()))
    names = [key for key, _ in p.model().named_parameters()]
    norms = captured(model, p, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert list(norms.coverage) == names
    assert {cover.uses for key, cover in norms.coverage.items() if "blocks" in key or "layers" in key} == {1}


def one_rank_alone(rank: int, way: str, name: str, alone: int) -> None:
    """A capture on one rank needs nobody else: no hidden collective, and the other rank's gradients are its usual ones."""
    p, rows = problem(name, 5), mine(rank, (3, 2))
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


class Bypassed(nn.Module):
    """A weight that is never used through its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.kept.weight)
