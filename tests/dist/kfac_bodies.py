"""K-FAC on real processes: bodies that hold for every way of data parallelism, for `tests.kit.processes.distributed`."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gramian
from tests.curvature.splits import CASES, Case, assert_equal, refresh, results, vector


def wrapped(way: str, model: nn.Module) -> nn.Module:
    """The model as users wrap it; "plain": not at all."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp2":
        users = Counter(id(p) for child in model.children() for p in child.parameters())
        for child in model.children():
            if all(users[id(p)] == 1 for p in child.parameters()):  # tied ones are the root's
                fully_shard(child)
        return fully_shard(model)
    if way == "fsdp2 root":
        return fully_shard(model)
    return model


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, **options})


def alone(case: Case, samples: int, dtype: torch.dtype, options: dict[str, Any], **told: Any) -> dict[str, Tensor]:
    """One process with all samples in the order of their ids: "none" hears of nobody."""
    kfac, model = make(**{**options, "kfac_distributed_reduce": "none"}), case.model(dtype)
    refresh(kfac, model, case.data(samples, dtype), range(samples), **told)
    return results(kfac, model)


def same_as_one(
    rank: int,
    way: str,
    name: str,
    split: list[list[int]],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    **told: Any,
) -> dict[str, Any]:
    """Factors, natural gradients and products of all processes are those of one."""
    case, samples = CASES[name], sum(map(len, split))
    expected = alone(case, samples, dtype, options, **told)
    kfac, plain = make(**options), case.model(dtype)
    model = wrapped(way, case.model(dtype))
    refresh(kfac, model, case.data(samples, dtype), split[rank], **told)
    found = results(kfac, plain) if way == "ddp" or way == "plain" else _sharded_results(kfac, model, plain)
    assert_equal(found, expected, tolerance)
    return kfac.record()


def _sharded_results(kfac: gramian.KFACNaturalGradient, model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """`results`, with gradients that are sharded as the parameters are: what comes back is sharded alike."""
    places = dict(model.named_parameters())
    v = {n: torch.distributed.tensor.distribute_tensor(t, places[n].device_mesh, places[n].placements)
         for n, t in vector(plain).items()}  # fmt: skip
    found = {
        f"{name} {side}": factor.to_dense()
        for name, block in kfac.kfac_factors.items()
        for side, factor in block.factors.items()
    }
    for power in (-1.0, -0.5):
        for name, t in kfac.compute_natural_gradient(model, power=power, gradients=v).items():
            found[f"{name}^{power}"] = _whole_like(t, places[name])
    for name, t in kfac.compute_fisher_vector_product(v).items():
        found[f"F {name}"] = _whole_like(t, places[name])
    return found


def _whole_like(t: Tensor, parameter: Tensor) -> Tensor:
    assert isinstance(t, DTensor) and isinstance(parameter, DTensor)
    assert (t.placements, t.device_mesh, t.shape) == (parameter.placements, parameter.device_mesh, parameter.shape)
    assert t.to_local().shape == parameter.to_local().shape  # uneven and empty shards
    return t.full_tensor()


class Table(nn.Module):
    """Rows of a parameter, as they lie in memory."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(1, 4, 6), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


class Reads(nn.Module):
    """A layer whose input is a parameter."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.table, self.fc = Table(trains), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.table(x)).tanh() + x


def inputs_that_are_parameters(rank: int, trains: bool) -> None:
    """FSDP2 frees the memory of a unit's parameters before the backward is over: rows of it are copied in time."""
    case = Case(
        lambda: nn.Sequential(nn.Linear(7, 7), Reads(trains), nn.Linear(7, 5)),
        lambda n: torch.randn(n, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(n)),
        5,
        4,
    )
    options = {"max_tokens": 1000}  # rows are kept as rows
    expected = alone(case, 2, torch.float64, options)
    kfac, plain = make(**options), case.model()
    model = wrapped("fsdp2", case.model())
    refresh(kfac, model, case.data(2), [rank])
    assert_equal(_sharded_results(kfac, model, plain), expected, 1e-10)


def gradients_and_collection(rank: int, way: str) -> None:
    """A collection reduces nothing, leaves the user's gradients alone and has the factors of one process."""
    case = CASES["words"]
    inputs, targets = case.data(5)
    rows = torch.tensor([[4, 1], [0, 2, 3]][rank])
    one = make(kfac_distributed_reduce="none")
    reference = case.model()
    for kind in ("empirical", "mc", "true"):
        one.collect_kfac_factors(reference, (inputs, targets), kind, sample_ids=torch.arange(5))
        kfac, model = make(), wrapped(way, case.model())
        kfac.state.generator.set_state(one.state.generator_before_step)
        F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()
        before = {n: p.grad for n, p in model.named_parameters()}
        copies = {n: g.clone() for n, g in before.items() if g is not None}
        kfac.collect_kfac_factors(model, (inputs[rows], targets[rows]), kind, sample_ids=rows)
        for n, p in model.named_parameters():
            assert p.grad is before[n]
            assert torch.equal(_local(p.grad), _local(copies[n]))
        found = {f"{n} {s}": f.to_dense() for n, b in kfac.kfac_factors.items() for s, f in b.factors.items()}
        expected = {f"{n} {s}": f.to_dense() for n, b in one.kfac_factors.items() for s, f in b.factors.items()}
        assert_equal(found, expected, 1e-10)
        assert not any(name.startswith("module.") for name in kfac.kfac_factors)


def collection_between_forward_and_backward(rank: int, way: str) -> None:
    """The user's own step, interrupted by a collection, has the gradients that it has without."""
    case = CASES["words"]
    inputs, targets = case.data(4)
    rows = list(range(rank, 4, 2))

    def step(interrupt: bool) -> list[Tensor]:
        model = wrapped(way, case.model())
        loss = F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten())
        if interrupt:
            make().collect_kfac_factors(model, (inputs[rows], targets[rows]))
        loss.backward()
        return [_local(p.grad) for p in model.parameters()]

    for got, want in zip(step(True), step(False), strict=True):
        assert torch.equal(got, want)


def accumulated_gradients_survive(rank: int, way: str) -> None:
    """Micro-batches whose reduction is held back: a collection between them changes nothing of the reduced sum."""
    case = CASES["words"]
    inputs, targets = case.data(4)

    def step(interrupt: bool) -> list[Tensor]:
        model = wrapped(way, case.model())

        def backward(row: int) -> None:
            F.cross_entropy(model(inputs[[row]]).flatten(0, 1), targets[[row]].flatten()).backward()

        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                backward(rank)
        else:
            model.set_requires_gradient_sync(False)
            backward(rank)
            model.set_requires_gradient_sync(True)
        if interrupt:
            rows = [rank, rank + 2]
            make().collect_kfac_factors(model, (inputs[rows], targets[rows]))
        backward(rank + 2)
        return [_local(p.grad) for p in model.parameters()]

    for got, want in zip(step(True), step(False), strict=True):
        assert torch.equal(got, want)


def _local(t: Any) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def one_rank_fails(rank: int, failing: int, how: str, reduce: str = "gram") -> None:
    """All ranks raise together, nobody hangs, and the next refresh is that of one process."""
    case = CASES["words"]
    data, rows = case.data(4), list(range(rank, 4, 2))
    kfac, model = make(kfac_distributed_reduce=reduce), case.model()
    refresh(kfac, model, data, rows)
    with pytest.raises((gramian.GramianError, RuntimeError)) as caught:
        if rank != failing:
            refresh(kfac, model, data, rows)
        elif how == "arguments":
            kfac.capture(model, num_terms=-1)
        elif how == "collection":
            kfac.collect_kfac_factors(model, (data[0][rows], data[1][[0]]))
        else:
            with kfac.capture(model, num_terms=2):
                raise RuntimeError("no such luck")
    if rank != failing:
        assert str(caught.value).startswith(f"process {failing}: ") and "\n" not in str(caught.value)
    assert (kfac.steps, kfac.refreshes) == (2, 1)
    refresh(kfac, model, data, rows)
    assert_equal(results(kfac, model), alone(case, 4, torch.float64, {}), 1e-10)


def one_rank_cannot(rank: int, what: str, options: dict[str, Any]) -> None:
    """Something that a refresh does fails on the second process: all raise, and the factors are those from before."""
    case = CASES["words"]
    kfac, model = make(**options), wrapped("ddp", case.model(torch.float64))
    refresh(kfac, model, case.data(4, torch.float64), [rank, rank + 2])
    before = kfac.kfac_factors
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(what, lambda *_: 1 / 0)
        with pytest.raises(gramian.GramianError, match="^process 1: .*ZeroDivisionError.*; expected"):
            refresh(kfac, model, case.data(4, torch.float64), [rank, rank + 2])
    assert kfac.kfac_factors is before and len(kfac.dropped) == 1
    refresh(kfac, model, case.data(4, torch.float64), [rank, rank + 2])
    assert kfac.refreshes == 2


def nan_on_one_rank(rank: int, reduce: str) -> None:
    """The refresh is dropped on all ranks, and the factors are those from before."""
    case = CASES["words"]
    data, rows = case.data(4), list(range(rank, 4, 2))
    kfac, model = make(kfac_distributed_reduce=reduce), case.model()
    refresh(kfac, model, data, rows)
    before = results(kfac, model)
    with kfac.capture(model, num_terms=4):
        (model(data[0][rows]).sum() * (float("nan") if rank else 1.0)).backward()
    assert (kfac.refreshes, len(kfac.dropped)) == (1, 1) and "not finite" in kfac.dropped[0]["reason"]
    assert_equal(results(kfac, model), before, 0.0)


def built_before_the_group(rank: int, world_size: int, port: int) -> None:
    """An object made before the process group exists joins its sums all the same."""
    case = CASES["words"]
    kfac, model = make(), case.model()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        refresh(kfac, model, case.data(4), range(rank, 4, world_size))
        found = results(kfac, model)
    finally:
        dist.destroy_process_group()
    assert_equal(found, alone(case, 4, torch.float64, {}), 1e-10)


def trained(rank: int, world_size: int, way: str, reduce: str) -> None:
    """A few preconditioned steps move the parameters as they do on one process."""
    case, samples = CASES["words"], 4

    def run(way: str, rows: list[int], reduce: str) -> dict[str, Tensor]:
        plain = case.model()
        model = wrapped(way, plain)
        kfac = make(kfac_distributed_reduce=reduce, update_freq=2, ema_decay=0.5)
        optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.3), model, kfac, kl_clip=1e-3)
        for step in range(4):
            inputs, targets = case.data(samples)
            inputs = (inputs + step) % 11
            optimizer.zero_grad()
            with kfac.capture(model, num_terms=2.0 * len(rows), sample_ids=torch.tensor(rows)):
                F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()
            optimizer.step()
        return {n.removeprefix("module."): _full(p) for n, p in model.named_parameters()}

    expected = run("plain", list(range(samples)), "none")
    found = run(way, list(range(rank, samples, world_size)), reduce)
    assert_equal(found, expected, 1e-9)


def _full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()
