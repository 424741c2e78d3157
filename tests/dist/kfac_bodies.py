"""K-FAC on real processes: bodies that hold for every way of data parallelism, for `tests.kit.processes.distributed`."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gramian
from tests.curvature.splits import CASES, Case, assert_equal, refresh, results, vector
from tests.kit.matrix import FULL
from tests.kit.refusals import refusal
from tests.kit.toys import Toy


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
    name: str | Case,
    split: list[list[int]],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    **told: Any,
) -> dict[str, Any]:
    """Factors, natural gradients and products of all processes are those of one."""
    case, samples = CASES[name] if isinstance(name, str) else name, sum(map(len, split))
    expected = alone(case, samples, dtype, options, **told)
    kfac, plain = make(**options), case.model(dtype)
    model = wrapped(way, case.model(dtype))
    refresh(kfac, model, case.data(samples, dtype), split[rank], **told)
    found = results(kfac, plain) if way == "ddp" or way == "plain" else sharded_results(kfac, model, plain)
    assert_equal(found, expected, tolerance)
    return kfac.record()


def fitted_as_one(
    rank: int, way: str, name: str, split: list[list[int]], options: dict[str, Any], fisher_type: str
) -> dict[str, Any]:
    """Factors and eigenvalues of `fit` on all processes, each with its own batches, are those of one process and batch."""
    case, samples = CASES[name], sum(map(len, split))
    inputs, targets = case.data(samples)

    def fit(kfac: gramian.KFACNaturalGradient, model: nn.Module, pieces: list[list[int]]) -> None:
        ids = [torch.tensor(piece, dtype=torch.long) for piece in pieces]
        kfac.fit(model, [(inputs[i], targets[i]) for i in ids], fisher_type, sample_ids=ids, causal_shift=False)

    one, plain = make(**{**options, "kfac_distributed_reduce": "none"}), case.model()
    fit(one, plain, [list(range(samples))])
    rows = split[rank]
    pieces = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    if not pieces and way != "ddp":
        pieces = [[]]  # FSDP2 needs a batch on every process, which may be empty
    kfac, model = make(**options), wrapped(way, case.model())
    fit(kfac, model, pieces)
    found = results(kfac, plain) if way == "ddp" else sharded_results(kfac, model, plain)
    assert_equal(found, results(one, plain), 1e-10)
    return kfac.record()


class Breaks(list[Any]):
    """Batches whose `reading`-th reading ends in an error."""

    reading = 0

    def __iter__(self) -> Any:
        self.reading -= 1
        yield from super().__iter__()
        if self.reading == 0:
            raise RuntimeError("no such file")


def one_rank_breaks_off(rank: int, reading: int, options: dict[str, Any]) -> None:
    """The batches of the second process end in an error, in the first or second pass: all raise, and the factors stay."""
    case = CASES["words"]
    (inputs, targets), rows = case.data(4), [rank, rank + 2]
    kfac, model = make(**options), wrapped("ddp", case.model())
    batches = [(inputs[rows], targets[rows])]
    kfac.fit(model, batches, causal_shift=False)
    before, broken = kfac.kfac_factors, Breaks(batches)
    broken.reading = reading if rank == 1 else 0
    with pytest.raises((gramian.GramianError, RuntimeError)) as caught:
        kfac.fit(model, broken, causal_shift=False)
    assert "no such file" in str(caught.value) and (rank == 1 or str(caught.value).startswith("process 1: "))
    assert kfac.kfac_factors is before and kfac.refreshes == 1 and len(kfac.dropped) == 1
    kfac.fit(model, batches, causal_shift=False)
    assert kfac.refreshes == 2


def no_batch_under_fsdp2(rank: int) -> None:
    """A process without a first batch cannot run the forwards that gather weights: all processes say so."""
    case = CASES["words"]
    model, batches = wrapped("fsdp2", case.model()), [case.data(2)] if rank == 0 else []
    with refusal("^(process [01]: .*)?batches: has none on some process; expected"):
        make().fit(model, batches, causal_shift=False)


def sharded_results(kfac: gramian.KFACNaturalGradient, model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """`results` from a vector that is placed as the parameters are: what comes back is placed alike."""
    places = dict(model.named_parameters())
    v = {name: _placed(t, places[name]) for name, t in vector(plain).items()}
    found = {
        f"{name} {side}": factor.to_dense()
        for name, block in kfac.kfac_factors.items()
        for side, factor in block.factors.items()
    }
    for power in (-1.0, -0.5):
        for name, t in kfac.compute_natural_gradient(model, power=power, gradients=v).items():
            found[f"{name}^{power}"] = whole_like(t, places[name])
    for name, t in kfac.compute_fisher_vector_product(v).items():
        found[f"F {name}"] = whole_like(t, places[name])
    return found


def _placed(t: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return t
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)


def whole_like(t: Tensor, parameter: Tensor) -> Tensor:
    """All of a tensor that is placed as the parameter is."""
    assert isinstance(t, DTensor) == isinstance(parameter, DTensor)
    if not isinstance(t, DTensor) or not isinstance(parameter, DTensor):
        return t
    assert (t.placements, t.device_mesh, t.shape) == (parameter.placements, parameter.device_mesh, parameter.shape)
    assert t.to_local().shape == parameter.to_local().shape  # uneven and empty shards
    return t.full_tensor()


def table(trains: bool) -> Toy:
    """Rows of a parameter, as they lie in memory."""
    return Toy(lambda net, x: net.rows, rows=nn.Parameter(torch.ones(1, 4, 6), requires_grad=trains))


def reads(trains: bool) -> Toy:
    """A layer whose input is a parameter."""
    return Toy(lambda net, x: net.fc(net.table(x)).tanh() + x, table=table(trains), fc=nn.Linear(6, 7))


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
        with refusal("^process 1: .*ZeroDivisionError.*; expected"):
            refresh(kfac, model, case.data(4, torch.float64), [rank, rank + 2])
    assert kfac.kfac_factors is before and len(kfac.dropped) == 1
    refresh(kfac, model, case.data(4, torch.float64), [rank, rank + 2])
    assert kfac.refreshes == 2


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


def preconditioned(case: Case, model: nn.Module, rows: list[int], reduce: str, samples: int = 4) -> dict[str, Tensor]:
    """The parameters after four steps on some rows of the samples, with an evaluation before each."""
    kfac = make(kfac_distributed_reduce=reduce, update_freq=2, ema_decay=0.5)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.3), model, kfac, kl_clip=1e-3)
    for step in range(4):
        inputs, targets = case.data(samples)
        inputs = (inputs + step) % 11
        with torch.no_grad():
            model(inputs[rows])
        optimizer.zero_grad()
        with kfac.capture(model, num_terms=float(targets[rows].numel()), sample_ids=torch.tensor(rows)):
            F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()
        optimizer.step()
    return {name.removeprefix("module."): _full(p) for name, p in model.named_parameters()}


def _full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


OPTIMIZED: dict[str, Any] = {"lr": 1e-2, "update_freq": 4, "ema_decay": 0.5, "max_tokens": None, "eps": 1e-6}


def optimized(
    case: Case,
    model: nn.Module,
    rows: list[int],
    world: int = 1,
    samples: int = 5,
    steps: int = 20 if FULL else 9,
    resumed: Callable[[nn.Module, gramian.optim.KFAC], tuple[nn.Module, gramian.optim.KFAC]] | None = None,
) -> dict[str, Tensor]:
    """The parameters after steps of `gramian.optim.KFAC` on some rows of the samples, of which a process may have none.

    `world` is the number of processes over which gradients are averaged. AdamW's eps is above the rounding of gradients that
    are zero but for it, such as those of a key's bias, whose sign would else be the step. `resumed`, if given, puts another
    model and optimizer in place of both before the seventh step.
    """
    optimizer = gramian.optim.KFAC(model, **OPTIMIZED)
    for step in range(steps):
        if step == 6 and resumed is not None:
            model, optimizer = resumed(model, optimizer)
        inputs, targets = case.data(samples)
        inputs = (inputs + step) % 11 if not inputs.is_floating_point() else inputs + 0.1 * step
        optimizer.zero_grad()
        coefficient = world / targets.numel()  # gradients are averaged over processes
        told = {"num_terms": float(targets[rows].numel()), "sample_ids": torch.tensor(rows, dtype=torch.long)}
        with optimizer.capture(loss_reduction=coefficient, **told):
            logits = model(inputs[rows]).flatten(0, -2)
            (F.cross_entropy(logits, targets[rows].flatten(), reduction="sum") * coefficient).backward()
        optimizer.step()
    return {name.removeprefix("module."): _full(p) for name, p in model.named_parameters()}
