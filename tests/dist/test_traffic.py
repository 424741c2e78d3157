"""Bytes that gloo processes count while K-FAC refreshes and is used, against the model: equal to the byte."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from benchmarks import _traffic as traffic
from benchmarks._traffic import TrafficSide
from gramian.parallel.exchange import Exchange, exchange_of
from gramian.parallel.sharded_columns import ShardedColumns
from tests.kit.matrix import sample
from tests.kit.processes import distributed
from tests.kit.toys import Toy

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

REDUCTIONS = ("gram", "gather", "dense")
SPLITS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"even": (2, 2), "uneven": (1, 3), "empty": (0, 2)},
    3: {"even": (1, 1, 1), "uneven": (2, 0, 1)},
    4: {"even": (1, 1, 1, 1), "uneven": (0, 2, 1, 1)},
}
DTYPES = {torch.float64: (8, 8), torch.float32: (4, 4), torch.bfloat16: (2, 4)}
POSITIONS = 2


def net() -> Toy:
    """Widths that no number of processes here divides; the first layer has a bias."""
    return Toy(
        lambda net, x: net.second(net.first(x).tanh()), first=nn.Linear(13, 11), second=nn.Linear(11, 17, bias=False)
    )


def counted_bytes(rank: int, size: int, reduction: str, split: tuple[int, ...], dtype: torch.dtype) -> None:
    """A refresh layer by layer, then the first natural gradient and a second one."""
    torch.manual_seed(0)
    model, samples = net().to(dtype), split[rank]
    x, y = torch.randn(samples, POSITIONS, 13).to(dtype), torch.randint(17, (samples, POSITIONS))
    kfac = gramian.KFACNaturalGradient(kfac_distributed_reduce=reduction, use_eigenvalue_correction=False)
    with kfac.capture(model, num_terms=y.numel(), loss_reduction="sum"):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
    tokens, (row, whole) = tuple(POSITIONS * n for n in split), DTYPES[dtype]
    sides = {
        name: (TrafficSide(o, tokens, row, whole), TrafficSide(m, tokens, row, whole))
        for name, (o, m) in {"first": (11, 14), "second": (17, 11)}.items()
    }
    record = kfac.record()
    for name, both in sides.items():
        assert record["layers"][name]["sent"] == traffic.total(*(side.join(reduction, rank) for side in both)), name
    half = dtype != torch.float64
    every = [side for both in sides.values() for side in both]
    settled = traffic.total(
        *(side.join(reduction, rank) for side in every), *(s.settle(reduction, half) for s in every)
    )
    for kind in ("all_reduce", "all_to_all"):  # words, of what each process holds, are gathered
        assert record["sent"][kind] == settled.get(kind, 0), kind
    others = kfac.state.exchange
    assert others is not None
    gradients = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    value = 8 if dtype == torch.float64 else 4
    use = traffic.total(*(traffic.natural_gradient(G, A, (reduction, reduction), value) for G, A in sides.values()))
    grams = traffic.total(*(side.gram(reduction) for side in every))
    made = traffic.total(*(side.factorisation(reduction, value) for side in every))
    before = dict(others.sent)
    kfac.compute_natural_gradient(model, gradients=gradients)
    first = _since(others, before)
    assert first.get("all_reduce", 0) == use.get("all_reduce", 0) + grams.get("all_reduce", 0)
    assert int(others.sum(torch.tensor(first.get("broadcast", 0)))) == made["broadcast"]
    before = dict(others.sent)
    kfac.compute_natural_gradient(model, gradients=gradients)
    assert _since(others, before) == use


def _since(others: Exchange, before: dict[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in others.sent.items() if count > before.get(kind, 0)}


def matrix(size: int) -> list[Any]:
    return list(itertools.product(REDUCTIONS, SPLITS[size].values(), DTYPES))


@pytest.mark.parametrize("reduction, split, dtype", sample(matrix(2), 4))
@distributed(world_size=2)
def test_two_processes(rank: int, world_size: int, reduction: str, split: tuple[int, ...], dtype: torch.dtype) -> None:
    counted_bytes(rank, world_size, reduction, split, dtype)


@pytest.mark.full
@pytest.mark.parametrize("reduction, split, dtype", matrix(3))
@distributed(world_size=3)
def test_three_processes(
    rank: int, world_size: int, reduction: str, split: tuple[int, ...], dtype: torch.dtype
) -> None:
    counted_bytes(rank, world_size, reduction, split, dtype)


@pytest.mark.full
@pytest.mark.parametrize("reduction, split, dtype", matrix(4))
@distributed(world_size=4)
def test_four_processes(rank: int, world_size: int, reduction: str, split: tuple[int, ...], dtype: torch.dtype) -> None:
    counted_bytes(rank, world_size, reduction, split, dtype)


@distributed(world_size=2)
def test_rows_that_stay_where_they_lie_are_not_gathered(rank: int) -> None:
    others = exchange_of(None, torch.device("cpu"))
    assert others is not None
    part = others.features(13)[rank]
    columns = ShardedColumns.of(torch.ones(part.stop - part.start, 4), 13, others).local()
    before = dict(others.sent)
    columns.times(columns.transposed_times(torch.ones(part.stop - part.start, 5)))
    assert _since(others, before) == TrafficSide(13, (2, 2)).use("gram", 5, local=True)
