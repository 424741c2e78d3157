"""Properties of private training that hold for every way of data parallelism, as bodies for the tests of DDP and FSDP2.

The oracle is the loop of single-sample backward passes over the samples of all ranks: c_i = min(1, C/‖g_i‖) and Σ c_i g_i are
formed from its gradients in float64.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.secrets import Secrets, load_private, save_private
from tests.dist.worlds import checkpointed, mine, whole, wrap
from tests.kit.matrix import FULL
from tests.kit.private import add_noise
from tests.kit.processes import run_on_ranks
from tests.kit.refusals import refusal
from tests.kit.whole_roots import never_the_root
from tests.statistics.problems import Problem, assert_tensors, problem

SEED = 7
EXPECTED_BATCH = 3.0
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")  # the last is part of the one before


@dataclass
class Private:
    """A private model in somebody's training loop."""

    problem: Problem
    engine: gramian.PrivacyEngine
    model: nn.Module
    optimizer: Optimizer
    loader: Any

    def backward(self, rows: Any, reduction: str = "mean", by_engine: bool = False) -> None:
        """One ordinary backward over some rows of the problem, or one over a batch of the loader."""
        batch = rows if isinstance(rows, list | tuple) else self.problem.rows(rows)
        loss = self.problem.case.loss(self.model, *batch, reduction=reduction)
        self.engine.backward(loss) if by_engine else loss.backward()


def make_private(p: Problem, model: nn.Module, *, seed: int | None = SEED, lr: float = 1.0, **options: Any) -> Private:
    """Private over the problem's samples: no noise, no Poisson sampling, SGD at lr 1, unless told otherwise."""
    engine = options.pop("engine", None) or gramian.PrivacyEngine(
        "rdp", insecure_reproducible=seed is not None, seed=seed
    )
    optimizer = options.pop("optimizer", None) or SGD(model.parameters(), lr=lr)
    data = options.pop("data", None) or TensorDataset(*p.batch)
    loader = DataLoader(data, batch_size=options.pop("batch_size", 2))
    settings = {
        "noise_multiplier": 0.0,
        "max_grad_norm": limit_of(p),
        "poisson_sampling": False,
        "expected_batch": EXPECTED_BATCH,
        **options,
    }
    quiet = settings.pop("quiet", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "always", UserWarning)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, **settings
        )
    return Private(p, engine, model, optimizer, loader)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def limit_of(p: Problem) -> float:
    """A clip norm that clips about half of the samples."""
    return float(p.norms().median())


def factors(p: Problem, limit: float, rows: Any = slice(None)) -> Tensor:
    """c_i = min(1, C/‖g_i‖)."""
    return (limit / p.norms(rows)).clamp(max=1.0)


def clipped_sum(p: Problem, limit: float, rows: Any = slice(None)) -> dict[str, Tensor]:
    """Σ c_i g_i over some samples."""
    weights = factors(p, limit, rows)
    return {name: torch.einsum("b,b...->...", weights, g[rows]) for name, g in p.gradients.items()}


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what wrappers put into names."""
    named = {}
    for name, t in tensors.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        named[name] = t
    return named


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters under the user's names (collective where they are sharded)."""
    return whole(own_names({name: q.detach().clone() for name, q in model.named_parameters()}))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients under the user's names; none counts as zeros (collective where they are sharded)."""
    found = {name: torch.zeros_like(q) if q.grad is None else q.grad for name, q in model.named_parameters()}
    return whole(own_names({name: g.detach().clone() for name, g in found.items()}))


def moved_by(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far every parameter went."""
    return {name: q - before[name] for name, q in parameters_of(model).items()}


def assert_moved(model: nn.Module, p: Problem, sums: Mapping[str, Tensor], tolerance: float | None = None) -> None:
    """From the problem's own parameters by -(1/expected_batch) Σ, and to the same place on every rank."""
    moved = moved_by(model, parameters_of(p.model()))
    expected = {name: -total / EXPECTED_BATCH for name, total in sums.items()}
    assert_tensors(moved, expected, tolerance or within(p))
    assert_ranks_hold_the_same(parameters_of(model))


def assert_ranks_hold_the_same(tensors: Mapping[str, Tensor]) -> None:
    """Bit for bit (collective)."""
    flat = torch.cat([t.flatten() for t in tensors.values()]).contiguous()
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat), "ranks hold different parameters"


def within(p: Problem) -> float:
    """Tolerance of sums: where float32 takes part, factors are smaller by its slack of 2⁻¹⁷ = 8e-6, and it rounds."""
    return 3e-5 if p.case.computes_in_float32 else p.tolerance


# ---- one step ----------------------------------------------------------------------------------------------------------


def one_step(
    rank: int,
    way: str,
    name: str,
    sizes: Sequence[int],
    reduction: str = "mean",
    clipping: str = "auto",
    *,
    checkpoint: bool = False,
    wrapping: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> None:
    """Backward leaves the clipped sum in p.grad (DDP: this rank's; FSDP2: shards of everybody's), a step moves by all of it."""
    p, rows = problem(name, sum(sizes), dtype), mine(rank, sizes)
    model = wrap(way, checkpointed(p.model()) if checkpoint else p.model(), **(wrapping or {}))
    private = make_private(p, model, clipping=clipping, loss_reduction=reduction)
    private.backward(rows, reduction, by_engine=clipping == "two_pass")
    limit, sums = limit_of(p), clipped_sum(p, limit_of(p))
    last = private.engine.last
    assert last is not None
    close = {"rtol": tolerance or within(p), "atol": 0.0}
    torch.testing.assert_close(last.norms_B.double(), p.norms(rows), **close)
    torch.testing.assert_close(last.factors_B.double(), factors(p, limit, rows), **close)
    if way == "ddp":
        assert_tensors(gradients_of(model), clipped_sum(p, limit, rows), tolerance or within(p))
    else:
        for q in model.parameters():
            assert isinstance(q.grad, DTensor) and isinstance(q, DTensor)
            assert q.grad.placements == (Shard(0),) and q.grad.device_mesh == q.device_mesh
            assert q.grad.dtype == q.dtype and q.grad.to_local().shape == q.to_local().shape
            assert type(q.grad.to_local()) is Tensor, "the reduction is over when backward returns"
        assert_tensors(gradients_of(model), sums, tolerance or within(p))
    private.optimizer.step()
    assert_moved(model, p, sums, tolerance)
    private.engine.detach()


def as_without_an_engine(rank: int, way: str, **wrapping: Any) -> None:
    """Detached, the wrapper reduces again: a plain step gives what it gives on a model that never was private."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    plain, model = wrap(way, p.model(), **wrapping), wrap(way, p.model(), **wrapping)
    for one in (plain, model):  # gradients may lie in the wrapper's own memory when the engine comes
        p.backward(one, p.rows(rows))
    private = make_private(p, model)
    for grad_to_none in (True, False):
        private.optimizer.zero_grad(set_to_none=grad_to_none)
        private.backward(rows)
    assert_tensors(gradients_of(model), clipped_sum(p, limit_of(p), rows if way == "ddp" else slice(None)), p.tolerance)
    private.engine.detach()
    for one in (plain, model):
        one.zero_grad()
        p.backward(one, p.rows(rows))
    for got, want in zip(gradients_of(model).values(), gradients_of(plain).values(), strict=True):
        assert torch.equal(got, want)
    assert any(g.any() for g in gradients_of(model).values())


# ---- whole runs --------------------------------------------------------------------------------------------------------

STEPS = 3
RATE = 0.5
SAMPLES = 12


def noisy_run(
    rank: int,
    world_size: int,
    way: str,
    name: str,
    max_physical_batch: int | None,
    clipping: str,
    rate: float,
    options: Mapping[str, Any],
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Parameters after three private steps over one data set; and the sizes of this rank's batches, draw by draw."""
    p = problem(name, SAMPLES)
    model = p.model() if way == "one" else wrap(way, p.model())
    private = make_private(
        p, model, lr=0.25, **{"noise_multiplier": 1.0, "poisson_sampling": True, "sample_rate": rate,
        "expected_batch": rate * SAMPLES, "max_physical_batch": max_physical_batch, "clipping": clipping, **options},
    )  # fmt: skip
    sizes: list[list[int]] = [[]]
    while len(sizes) <= STEPS:
        for batch in private.loader:
            assert max_physical_batch is None or len(batch[0]) <= max_physical_batch
            before = parameters_of(model) if max_physical_batch else {}
            private.optimizer.zero_grad()
            private.backward(batch, by_engine=clipping == "two_pass")
            steps = private.engine.steps
            private.optimizer.step()
            sizes[-1].append(len(batch[0]))
            if private.engine.steps == steps:  # a piece that is not the last changes nothing
                assert all(q.grad is None for q in model.parameters())
                assert not any(step.any() for step in moved_by(model, before).values())
                continue
            sizes.append([])
            if len(sizes) > STEPS:
                break
    ended = parameters_of(model) | {"clip norm": torch.tensor(private.engine.clip_norm, dtype=torch.float64)}
    if way != "one":
        assert_ranks_hold_the_same(ended)
    private.engine.detach()
    return ended, sizes[:-1]


def noise_alone(rank: int, world_size: int, way: str, name: str) -> None:
    """A step over no samples at all moves by the noise of the whole parameter, each rank its rows of it."""
    p = problem(name, 4)
    model = wrap(way, p.model())
    private = make_private(p, model, noise_multiplier=1.5, max_grad_norm=2.0)
    secrets = Secrets(insecure_reproducible=True, seed=SEED)
    plan = NoisePlan(secrets.noise_key, [(key, tuple(g.shape[1:])) for key, g in p.gradients.items()])
    for release in range(2):
        private.optimizer.zero_grad()
        private.backward(slice(0, 0))
        private.optimizer.step()
        drawn = {
            key: add_noise(plan, torch.zeros_like(g[0]), key, 3.0, release) / EXPECTED_BATCH
            for key, g in p.gradients.items()
        }
        assert_tensors(gradients_of(model), drawn, 0.0)
    private.engine.detach()


def noise_of_shards(rank: int, world_size: int, way: str) -> Tensor:
    """The noise of one step on this rank's part of a weight of 600 × 400, in standard deviations."""
    model = wrap(way, nn.Sequential(nn.Linear(400, 600, bias=False)))
    data = TensorDataset(torch.zeros(4, 400), torch.zeros(4, 600))
    engine = gramian.PrivacyEngine("rdp")  # a key of the operating system's, shared by rank 0
    optimizer = SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=2),
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, expected_batch=1.0,
        )  # fmt: skip
    model(torch.zeros(1, 400)).sum().backward()
    optimizer.step()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    engine.detach()
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()


def resumed_run(
    rank: int,
    world_size: int,
    way: str,
    folder: str,
    seed: int | None,
    replay: bool,
    other_weights: bool,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps; then a new engine from the checkpoint: replayed or not, on other weights or not.

    With `more` options the checkpoint has the state of every process.
    """
    p = problem("mlp", SAMPLES)
    options = {
        "lr": 0.25, "noise_multiplier": 1.0, "poisson_sampling": True, "sample_rate": RATE,
        "expected_batch": RATE * SAMPLES, "seed": seed, **more,
    }  # fmt: skip
    file = Path(folder) / f"engine {rank if more else 0}.pt"
    private = make_private(p, wrap(way, p.model()), **options)
    private.engine.bind_counter(str(Path(folder) / "counter.json"))
    go_on(private, 2)
    weights = parameters_of(private.model)
    if rank == 0 or more:
        save_private(file, private.engine.state_dict())
    dist.barrier()
    drawn = go_on(private, 2)
    ended = parameters_of(private.model)
    assert private.engine.steps == 4
    private.engine.detach()

    fresh = p.model()
    fresh.load_state_dict(weights)
    if other_weights:
        next(fresh.parameters()).data.view(-1)[0] += 1.0
    again = make_private(p, wrap(way, fresh), **options)
    again.engine.bind_counter(str(Path(folder) / "counter.json"), must_exist=True)
    again.engine.load_state_dict(load_private(file), replay=replay)
    assert again.engine.steps == 4, "a resume refunds nothing"
    redrawn = go_on(again, 2)
    reached = parameters_of(again.model)
    assert_ranks_hold_the_same(reached)
    spent = again.engine.steps
    again.engine.detach()
    return {"ended": ended, "reached": reached, "steps": spent, "drawn": drawn, "redrawn": redrawn}


def go_on(private: Private, steps: int) -> list[Tensor]:
    """So many private steps of the loader; the records of each on this rank."""
    seen = []
    while len(seen) < steps:
        for batch in private.loader:
            private.optimizer.zero_grad()
            private.backward(batch)
            private.optimizer.step()
            seen.append(batch[0])
            if len(seen) == steps:
                break
    return seen


def independent(rank: int, way: str) -> None:
    """check_independence runs on every rank, passes a loss of samples and refuses one that couples them; p.grad stays away."""
    p = problem("mlp", 4)
    private = make_private(p, wrap(way, p.model()))

    def coupled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return p.case.loss(model, x - x.mean(0), y, reduction="mean")

    private.engine.check_independence(lambda model, x, y: p.case.loss(model, x, y, reduction="mean"), p.batch)
    with refusal("of sample . changes when other samples are replaced"):
        private.engine.check_independence(coupled, p.batch)
    assert all(q.grad is None for q in private.model.parameters())
    private.backward(slice(2 * rank, 2 * rank + 2))
    private.optimizer.step()
    assert_moved(private.model, p, clipped_sum(p, limit_of(p)))
    private.engine.detach()


# ---- what is refused, and what stays local ---------------------------------------------------------------------------


def one_sample_less(rank: int, way: str, name: str, sizes: Sequence[int]) -> None:
    """Without one sample of rank 1 the sum of all ranks changes by at most C, and no other rank's factor changes."""
    p, rows = problem(name, sum(sizes)), mine(rank, sizes)
    limit = 0.1 * limit_of(p)  # every sample is clipped: the sum changes by C itself
    ends, kept = [], []
    for less in (0, 1):
        private = make_private(p, wrap(way, p.model()), max_grad_norm=limit)
        private.backward(slice(rows.start, rows.stop - less * (rank == 1)))
        last = private.engine.last
        assert last is not None
        kept.append(last.factors_B)
        private.optimizer.step()
        ends.append(parameters_of(private.model))
        private.engine.detach()
    change = sum(float((ends[0][key] - ends[1][key]).square().sum()) for key in ends[0]) ** 0.5 * EXPECTED_BATCH
    assert change <= limit * (1 + 1e-12)
    assert change >= limit * (1 - 1e-9)
    if rank == 1:
        assert torch.equal(kept[0][:-1], kept[1]) or sizes[1] == 1
    else:
        assert torch.equal(kept[0], kept[1])


class Sometimes(nn.Module):
    """A layer that only some batches go through, in one group of shards with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h if self.skips else h + self.extra(h))


def unused_on_one_rank(rank: int, way: str, steps: int = 2) -> None:
    """A layer that rank 1 does not use gets the sum of the others; nobody waits for ever."""
    torch.manual_seed(0)
    bare = Sometimes().double()
    start = {name: q.detach().clone() for name, q in bare.named_parameters()}
    bare.skips = rank == 1
    model = DistributedDataParallel(bare, find_unused_parameters=True) if way == "ddp" else fully_shard(bare)
    x = torch.randn(4, 4, dtype=torch.float64)
    engine, optimizer = private_squares(model, expected_batch=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x[2 * rank : 2 * rank + 2]).square().sum().backward()
        optimizer.step()
    moved = moved_by(model, start)
    assert all(step.any() for step in moved.values())
    assert sum(float(step.square().sum()) for step in moved.values()) ** 0.5 <= steps * 4e-3 * (1 + 1e-9)
    assert_ranks_hold_the_same(parameters_of(model))
    engine.detach()


class Bypassing(nn.Module):
    """The second weight is used through its layer (`inside`), past it (`outside`), or both."""

    def __init__(self, inside: bool = True, outside: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4), inside, outside

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.second(h) if self.inside else h
        return h @ self.second.weight if self.outside else h


def private_squares(model: nn.Module, **options: Any) -> tuple[gramian.PrivacyEngine, Optimizer]:
    """A private model of vectors [4], for losses without targets."""
    data = TensorDataset(torch.zeros(4, 4))
    engine, optimizer = gramian.PrivacyEngine("rdp"), SGD(model.parameters(), lr=1.0)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1e-3, "poisson_sampling": False, "loss_reduction": "sum"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=1), **(settings | options)
        )
    return engine, optimizer


@never_the_root()
def a_bypass_is_named(rank: int, model: nn.Module, name: str) -> None:
    """A gradient past the tap raises and names the parameter, and nothing reaches p.grad; on every step."""
    engine, _ = private_squares(model)
    for _ in range(2):
        with refusal(rf"^{name}: (the taps explain|got a gradient that did not come through)"):
            model(torch.randn(3, 4)).square().sum().backward()
        assert all(q.grad is None for q in model.parameters())
    engine.detach()
    dist.barrier()


BYPASSED = r"^second\.weight: (the taps explain|got a gradient(, but none through| that did not come through))"
"""By the proof, which runs again where a flag of the model has changed, or by the rule where a cell has no proof."""


@never_the_root()
def a_bypass_later_on(rank: int, way: str, audited: bool, inside: bool) -> None:
    """Two clean steps, or a capture that audited the model, do not make a later bypass pass."""
    bare = Bypassing(inside, outside=False)
    model = wrap("ddp", bare, find_unused_parameters=True) if way == "ddp" else fully_shard(bare)
    if audited:
        with gramian.per_sample_norms(model, "sum"):
            model(torch.randn(3, 4)).square().sum().backward()
        model.zero_grad()
    engine, optimizer = private_squares(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    bare.outside = True
    with refusal(BYPASSED):
        model(torch.randn(3, 4)).square().sum().backward()
    assert all(q.grad is None for q in model.parameters())
    engine.detach()
    dist.barrier()


def changes_are_refused_together(rank: int, way: str, dtype: torch.dtype, where: str) -> None:
    """One rank writes through `.data`: all refuse, nothing moves, and the next step is as if nothing had been."""
    p = problem("mlp", 6)
    model = wrap(way, p.model().to(dtype))
    private = make_private(p, model)
    before = parameters_of(model)
    x = p.batch[0].to(dtype)[3 * rank : 3 * rank + 3]
    model(x).square().sum().backward()
    chosen = list(model.parameters())[-2]
    part = chosen.grad if where == "gradient" else chosen.detach()
    part = part.to_local() if isinstance(part, DTensor) else part
    if rank == 1:
        part.data.add_(1.0)
    reason = {"gradient": "its .grad was changed", "weight": "was changed"}[where]
    with refusal(rf"{reason} between backward and step"):
        private.optimizer.step()
    assert all(q.grad is None for q in model.parameters())
    if rank == 1 and where == "weight":
        part.data.sub_(1.0)
    model(x).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    private.optimizer.step()
    assert any(bool(t.any()) for t in moved_by(model, before).values())
    private.engine.detach()


def different_options(rank: int, world_size: int, way: str, option: str, values: Sequence[Any], **options: Any) -> str:
    """make_private with another value of an option on each rank; what it said."""
    p = problem("mlp", 6)
    try:
        private = make_private(p, wrap(way, p.model()), poisson_sampling=True, **options, **{option: values[rank]})
    except gramian.GramianError as error:
        return str(error)
    private.engine.detach()
    return ""


def counted_before(rank: int, world_size: int, way: str) -> tuple[int, dict[str, Tensor]]:
    """Two steps; then a new engine, whose state the first process alone has loaded when it is made private; one step."""
    p = problem("mlp", SAMPLES)
    options = {
        "lr": 0.25, "noise_multiplier": 1.0, "poisson_sampling": True, "sample_rate": RATE,
        "expected_batch": RATE * SAMPLES,
    }  # fmt: skip
    before = make_private(p, wrap(way, p.model()), **options)
    go_on(before, 2)
    before.engine.detach()
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=SEED)
    if rank == 0:
        engine.load_state_dict(before.engine.state_dict())
    model = wrap(way, p.model())
    go_on(make_private(p, model, engine=engine, **options), 1)
    steps = engine.steps
    engine.detach()
    return steps, parameters_of(model)


class Transposed(nn.Module):
    """A weight whose memory is not laid out row by row, in a layer that some ranks pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(4, 4), nn.Linear(4, 3)
        self.extra.weight = nn.Parameter(torch.randn(4, 3).t())
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h if self.skips else torch.cat([h, self.extra(h)], -1)


# ---- comparisons of several worlds, in the parent process -------------------------------------------------------------


def compare_runs(
    way: str, name: str, pieces: int | None, clipping: str, rate: float, options: Mapping[str, Any] | None = None
) -> None:
    """World sizes 1, 2 and 3 (in the short run 1 and 3), and a model that nobody wrapped, end at the same parameters.

    The ranks agree on pieces.
    """
    arguments = (name, pieces, clipping, rate, options or {})
    expected, sizes_of_one = run_on_ranks(1, noisy_run, "one", *arguments)[0]
    start = parameters_of(problem(name, SAMPLES).model())
    assert any(not torch.equal(expected[key], start[key]) for key in start)
    for world_size in (1, 2, 3) if FULL else (1, 3):
        results = run_on_ranks(world_size, noisy_run, way, *arguments)
        assert_tensors(results[0][0], expected, 1e-9)
        draws = [[sum(draw) for draw in sizes] for _, sizes in results]
        assert [sum(parts) for parts in zip(*draws, strict=True)] == [sum(draw) for draw in sizes_of_one]
        counts = [[len(draw) for draw in sizes] for _, sizes in results]
        assert all(count == counts[0] for count in counts)
        if rate < 0.2 and world_size == 3:
            assert any(size == 0 for _, sizes in results for draw in sizes for size in draw)


def compare_resumed(
    world_size: int,
    way: str,
    folder: Path,
    replay: bool,
    seed: int | None = None,
    other_weights: bool = False,
    more: Mapping[str, Any] | None = None,
) -> None:
    """A replay is the same releases, bit for bit, counted once; a resume that is none draws and noises anew."""
    for result in run_on_ranks(world_size, resumed_run, way, str(folder), seed, replay, other_weights, more or {}):
        replay = replay and not other_weights
        same = all(torch.equal(result["ended"][key], result["reached"][key]) for key in result["ended"])
        drawn = len(result["drawn"]) == len(result["redrawn"]) and all(
            torch.equal(one, other) for one, other in zip(result["drawn"], result["redrawn"], strict=True)
        )
        assert same == drawn == replay
        assert result["steps"] == (4 if replay else 6)
