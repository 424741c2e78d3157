"""Private training on meshes, on real processes: against a loop of single-sample backwards through the model of one process."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.parallel.data_parallel import local
from gramian.privacy.noise.element_noise import NoisePlan
from tests.dist.private_bodies import assert_ranks_hold_the_same
from tests.dist.tp_bodies import CASES, mesh_of, spread
from tests.dist.worlds import whole
from tests.kit.mutations import Edit
from tests.kit.private import add_noise
from tests.kit.refusals import refusal

LAYOUTS = ("hsdp", "tp", "fsdp2 x tp", "fsdp2")


def placed(layout: str, model: nn.Module, name: str, style: str) -> tuple[nn.Module, int, int]:
    """(model on the mesh, number of this process's samples among those of others, how many have other samples)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if layout == "tp":
        return spread(model, name, style, 1, size), 0, 1
    if layout == "fsdp2 x tp":
        return spread(model, name, style, size // 2, 2), rank // 2, size // 2
    mesh = mesh_of(2, size // 2) if layout == "hsdp" else mesh_of(1, size)["tp"]
    if hasattr(model, "block"):
        fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh), rank, size


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples of each sample's mean loss."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) if len(inputs) else logits.sum() * 0


def gradients_alone(name: str, samples: int) -> dict[str, Tensor]:
    """{parameter: per-sample gradients [B, …]} from a loop of single-sample backwards through the model of one process."""
    case = CASES[name]
    model, (inputs, targets) = case.model(), case.data(samples)
    targets = targets.view(samples, -1)
    found: dict[str, list[Tensor]] = {key: [] for key, _ in model.named_parameters()}
    for i in range(samples):
        model.zero_grad()
        loss_of(model, inputs[i : i + 1], targets[i : i + 1]).backward()
        for key, p in model.named_parameters():
            assert p.grad is not None
            found[key].append(p.grad.clone())
    return {key: torch.stack(gs) for key, gs in found.items()}


def clipped(gradients: dict[str, Tensor], function: str, limit: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms [B], and the clipped sum by the formula of each clipping function."""
    squares = {key: g.flatten(1).square().sum(1) for key, g in gradients.items()}
    norms = torch.stack([*squares.values()]).sum(0).sqrt()
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in gradients))
    weights = {}
    for key in gradients:
        if function == "per_layer":
            own = sum(squares[other] for other in gradients if other.rpartition(".")[0] == key.rpartition(".")[0])
            weights[key] = (limit / len(layers) ** 0.5 / torch.as_tensor(own).sqrt()).clamp(max=1)
        else:
            weights[key] = limit / (norms + 0.01) if function == "automatic" else (limit / norms).clamp(max=1)
    return norms, {key: torch.einsum("b,b...->...", weights[key], g) for key, g in gradients.items()}


def private_step(
    rank: int,
    layout: str,
    name: str,
    style: str,
    samples: int,
    function: str = "flat",
    clipping: str = "auto",
    noise: float = 0.0,
    **options: Any,
) -> dict[str, Tensor]:
    """One step of SGD at rate 1: norms, and how far every parameter went, are those of the loop, with the noise of one."""
    case = CASES[name]
    gradients = gradients_alone(name, samples)
    limit = float(clipped(gradients, "flat", 1.0)[0].median())
    norms, sums = clipped(gradients, function, limit)
    inputs, targets = case.data(samples)
    targets = targets.view(samples, -1)
    model, number, groups = placed(layout, case.model(), name, style)
    start = {key: p.detach().clone() for key, p in case.model().named_parameters()}
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=3)
    optimizer = SGD(model.parameters(), lr=1.0)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(8)), batch_size=2),
        noise_multiplier=noise,
        max_grad_norm=limit,
        clip_function=function,
        clipping=clipping,
        poisson_sampling=False,
        expected_batch=3.0,
        **options,
    )
    mine = list(range(number, samples, groups))
    loss = loss_of(model, inputs[mine], targets[mine])
    engine.backward(loss) if clipping == "two_pass" else loss.backward()
    last = engine.last
    assert last is not None
    share = mine
    if groups < dist.get_world_size():
        tensor = dist.get_world_size() // groups
        each, more = divmod(len(mine), tensor)
        at = dist.get_rank() % tensor
        begin = at * each + min(at, more)
        share = mine[begin : begin + each + (at < more)]
    optimizer.step()
    moved = {key: p - start[key] for key, p in whole({k: p.detach() for k, p in model.named_parameters()}).items()}
    torch.testing.assert_close(last.norms_B.double(), norms[share], rtol=1e-9, atol=0)  # when no process waits any more
    plan = NoisePlan(engine._ledger.secrets.noise_key, [(key, tuple(g.shape)) for key, g in sums.items()])
    for key, total in sums.items():
        drawn = torch.zeros_like(total)
        if noise:
            add_noise(plan, drawn, key, noise * limit, engine._ledger.counter.released - 1)
        expected = -(total + drawn) / 3.0
        scale = max(float(torch.stack([g.norm() for g in sums.values()]).norm()) / 3.0, 1e-30)
        assert float((moved[key] - expected).norm()) < 1e-9 * scale, (layout, key)
    engine.detach()
    return moved


class Coupled(nn.Module):
    """A sharded MLP whose samples are centred by their mean between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return self.down(h - h.mean(0))


class Dropped(nn.Module):
    """Dropout between layers, on the stream that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head, self.drop = nn.Linear(7, 12), nn.Linear(12, 6), nn.Linear(6, 5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.down(self.up(x).tanh())))


class Unbatched(nn.Module):
    """A position table without a batch axis, which is refused where a batch has another number of samples than tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.up, self.down = nn.Embedding(4, 7), nn.Linear(7, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x[:, None] + self.positions(torch.arange(4))).tanh())
        return y


class HeadNorm(nn.Module):
    """A norm that is not sharded sees other features on every process."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 12), nn.LayerNorm(6), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 6))).flatten(-2))


def on_two(model: nn.Module, **styles: Any) -> nn.Module:
    """Tensor parallel over both processes, up by outputs and down by inputs unless told otherwise."""
    usual = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model.double(), mesh_of(1, 2)["tp"], usual | styles)


def private(model: nn.Module, limit: float = 1.0, **options: Any) -> tuple[gramian.PrivacyEngine, SGD, Any]:
    """Private without noise or Poisson sampling unless told otherwise."""
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=3)
    optimizer = SGD(model.parameters(), lr=1.0)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": limit, "poisson_sampling": False, "expected_batch": 3.0}
    data = options.pop("data", None) or TensorDataset(torch.zeros(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _, _, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=2), **settings | options
        )
    return engine, optimizer, loader


def trained(layout: str, name: str, style: str, steps: int = 4, sigma: float = 0.8, **options: Any) -> None:
    """Poisson draws, noise and pieces of several steps: the weights are those of one process, and so is what was spent."""
    case = CASES[name]
    inputs, targets = case.data(8)
    data = TensorDataset(inputs, targets.view(8, -1))
    found = []
    for mesh in (False, True):
        torch.manual_seed(0)
        model = placed(layout, case.model(), name, style)[0] if mesh else case.model()
        engine, optimizer, loader = private(
            model, 0.3, data=data, poisson_sampling=True, expected_batch=2.0, noise_multiplier=sigma, **options
        )
        batches = iter(loader)
        while engine.steps < steps:
            x, y = next(batches)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        found.append((whole({k: p.detach() for k, p in model.named_parameters()}), engine.get_epsilon(1e-5)))
        units = len({*options.get("unit_of", range(8))})
        assert engine.sample_rate == 2.0 / units and engine.expected_batch == 2.0
        engine.detach()
    (alone, spent), (spread_out, spent_too) = found
    assert spent == spent_too
    for key, p in alone.items():
        torch.testing.assert_close(spread_out[key], p, rtol=1e-10, atol=1e-10)
    assert_ranks_hold_the_same(spread_out)


def trained_units(rank: int, size: int, unit_of: list[int]) -> None:
    """Units of several rows, next to each other in the batch or not."""
    trained("tp", "gpt", "tables", steps=2, unit_of=unit_of)


class Tokens(nn.Module):
    """A sharded MLP over tokens that do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(9, 7), nn.Linear(7, 12), nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.table(tokens)).tanh())
        return y


def packed_units(rank: int) -> None:
    """Units of packed tokens: rows between which no unit lies on both sides go to different processes."""
    tokens = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 0, 1, 1, 1, -1], [1, 1, 2, 2, -1, -1], [3, 3, 3, 4, 4, 4], [5, 4, 4, 6, 6, 6]])
    found = []
    for mesh in (False, True):
        torch.manual_seed(0)
        model = on_two(Tokens()) if mesh else Tokens().double()
        engine, _, _ = private(model, 8.0, loss_reduction="sum")
        with engine.units(ids):
            loss = (model(tokens).square().sum(-1) * (ids >= 0)).sum()
            loss.backward()
        assert engine.last is not None
        found.append(({k: p for k, p in whole({k: p.grad for k, p in model.named_parameters()}).items()}, engine.last))
        if mesh:
            with engine.units(ids):
                loss = model(tokens).square().sum()
            model(tokens)
            with refusal("^backward: follows a forward whose rows processes divided otherwise"):
                loss.backward()
        engine.detach()
    (alone, all_units), (spread_out, own) = found
    torch.testing.assert_close(own.norms_B, all_units.norms_B[slice(0, 3) if rank == 0 else slice(3, 7)])
    assert float(all_units.norms_B.max()) > 8.0 > float(all_units.norms_B.min()), all_units.norms_B
    for key, g in alone.items():
        torch.testing.assert_close(spread_out[key], g, rtol=1e-9, atol=1e-12)


def public_factors(name: str) -> gramian.KFACNaturalGradient:
    """Factors of other samples, from a copy of the model on each process."""
    case, kfac = CASES[name], gramian.KFACNaturalGradient(woodbury_dtype="fp64", kfac_distributed_reduce="none")
    model, (x, y) = case.model(), case.data(5)
    with kfac.capture(model, loss_reduction="mean", num_terms=5):
        loss_of(model, x, y.view(5, -1)).backward()
    kfac.public = True
    return kfac


def proofs(rank: int) -> None:
    """Rows are proven, coupled samples, and parts of a gradient that are alike by chance, are refused on all processes."""
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    engine, _, _ = private(model := on_two(CASES["mlp"].model(), head=ColwiseParallel(output_layouts=Replicate())))
    model(x).square().sum(1).mean().backward()
    assert engine.proof["rows"] == "proven"
    engine.detach()
    engine, _, _ = private(model := on_two(Coupled()))
    with refusal("when other samples are replaced"):
        model(x).square().sum(1).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    engine.detach()
    alike = HeadNorm()
    for t in (alike.up.weight, alike.up.bias, alike.down.weight.T):
        t.data[6:] = t.data[:6]  # parts of the norm's gradient are then the same on both processes
    engine, _, _ = private(model := on_two(alike))
    before = {key: local(p.detach()).clone() for key, p in model.named_parameters()}
    with refusal("^norm: .*differ between processes"):
        model(x).square().sum(1).mean().backward()
    assert all(torch.equal(local(p.detach()), before[key]) for key, p in model.named_parameters())
    engine.detach()


def refusals(rank: int) -> None:
    """By name, on all processes; nothing is left in a gradient."""
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4) % 5

    def mlp() -> nn.Module:
        return on_two(CASES["mlp"].model(), head=ColwiseParallel(output_layouts=Replicate()))

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    engine, _, _ = private(model := mlp())
    with refusal("process 1 .* other inputs"):
        step(model, x + rank, y)
    engine.detach()
    engine, _, _ = private(model := mlp())
    with refusal("labels"):
        step(model, x, (y + rank) % 5)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()
    head = ColwiseParallel(use_local_output=False)
    for entered in (loss_parallel, nullcontext):  # before make_private, or only for the step
        with entered():
            engine, _, _ = private(model := on_two(CASES["mlp"].model(), head=head))
            with nullcontext() if entered is loss_parallel else loss_parallel():
                step(model, x, y)
                model.zero_grad()
                with refusal("^model: process 1 of a tensor-parallel group has other labels than process 0"):
                    step(model, x, (y + rank) % 5)
            assert all(p.grad is None for p in model.parameters())
            engine.detach()
    for proof in ("auto", "off"):
        torch.manual_seed(0)  # also of the head's weights, which are not sharded
        engine, _, _ = private(model := on_two(Dropped()), proof=proof)
        step(model, x, y)
        torch.manual_seed(rank)
        model.zero_grad()
        with refusal("head: .*differ between processes"):
            step(model, x, y)
        engine.detach()
    engine, _, _ = private(model := on_two(HeadNorm()))
    with refusal("^norm: .*differ between processes"):
        step(model, x, y)
    engine.detach()


def special(rank: int) -> None:
    """A loss on logits that stay sharded, a batch without samples, several backwards, max_physical_batch=1, a NaN sample."""
    case = CASES["mlp"]
    inputs, targets = case.data(4)
    gradients = gradients_alone("mlp", 4)
    norms, sums = clipped(gradients, "flat", float(clipped(gradients, "flat", 1.0)[0].median()))
    limit = float(norms.median())
    for how in ("loss parallel", "pieces", "single", "nan"):
        head = ColwiseParallel(use_local_output=False) if how == "loss parallel" else None
        model = on_two(case.model(), head=head or ColwiseParallel(output_layouts=Replicate()))
        engine, optimizer, _ = private(
            model, limit, loss_reduction="sum", **{"max_physical_batch": 1} if how == "single" else {}
        )
        pieces = {"pieces": ([0, 1, 2], [], [3]), "single": ([0], [1], [2], [3])}.get(how, ([0, 1, 2, 3],))
        for rows in pieces:
            with loss_parallel() if how == "loss parallel" else nullcontext():
                terms = F.cross_entropy(
                    model(inputs[rows]), targets[rows], reduction="sum" if how == "loss parallel" else "none"
                )
                if how == "nan":
                    terms = terms * torch.tensor([float("nan"), 1, 1, 1])
                terms.sum().backward()
        optimizer.step()
        want = sums if how != "nan" else clipped({k: g[1:] for k, g in gradients.items()}, "flat", limit)[1]
        assert engine.nonfinite == (how == "nan" and rank == 0)
        for key, g in whole({k: p.grad for k, p in model.named_parameters() if p.grad is not None}).items():
            assert float((3.0 * g - want[key]).norm()) < 1e-9 * limit, (how, key)
        engine.detach()


def refused_layouts(rank: int) -> None:
    """What is not done, by name: other meshes, wrappers, compiled models, context parallel."""

    def tp(**options: Any) -> Any:
        return lambda: private(
            on_two(CASES["mlp"].model(), head=ColwiseParallel(output_layouts=Replicate())), **options
        )

    def on(size: tuple[int, ...], names: tuple[str, ...], dimension: str) -> Any:
        mesh = init_device_mesh("cpu", size, mesh_dim_names=names)[dimension]
        return lambda: private(fully_shard(CASES["mlp"].model(), mesh=mesh))

    def beside_ddp() -> Any:
        model = on_two(CASES["mlp"].model())
        _pre_dp_module_transform(model)
        return private(model)

    compiled = on_two(CASES["mlp"].model())
    replicated = CASES["mlp"].model()
    replicate(replicated, device_mesh=mesh_of(1, 2)["tp"])
    cases = {
        r"^module: replicate\(\) reduces its gradients by hooks": lambda: private(replicated),
        '^module: the mesh of .* has a dimension "pp"': on((2, 1), ("pp", "dp"), "dp"),
        '^module: the mesh of .* has a dimension "cp"': on((1, 2), ("dp", "cp"), "cp"),
        "tensor parallel inside DistributedDataParallel; expected fully_shard": beside_ddp,
        "^module: is tensor parallel and compiled; expected eager mode": lambda: private(torch.compile(compiled)),
    }
    for line, make in cases.items():
        with refusal(line):
            make()
    engine, _, _ = private(model := on_two(CASES["mlp"].model(), head=ColwiseParallel(output_layouts=Replicate())))
    tokens = torch.zeros(1, 4)
    context = context_parallel(mesh_of(1, 2)["tp"], buffers=[tokens], buffer_seq_dims=[1])
    with refusal("^module: runs in context_parallel"), context:
        model(CASES["mlp"].data(3)[0])
    engine.detach()
    with refusal("which only K-FAC and private training can look at"), gramian.per_sample_norms(model):
        model(CASES["mlp"].data(3)[0]).sum().backward()


def refused_on_four(rank: int) -> None:
    """Replicas that nobody reduces, and three mesh dimensions."""
    mesh = mesh_of(2, 2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Unbatched(), mesh["tp"], plan)
    fully_shard(model.down, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    engine, _, _ = private(model)
    row = rank // 2  # one sample here, three there: this row of the mesh needs no proof, and hears of the refusal
    with refusal("^positions .*saw 4 rows for a batch of 3" if row else f"^process {rank + 2}: positions .*saw 4 rows"):
        model(torch.randn(1 + 2 * row, 7, generator=torch.Generator().manual_seed(row))).square().mean().backward()
    engine.detach()
    with refusal("^module: is tensor parallel over 2 of 4 processes; expected"):
        private(
            parallelize_module(CASES["mlp"].model(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        )
    with refusal("^module: is sharded over 2 of 4 processes"):
        private(fully_shard(CASES["mlp"].model(), mesh=mesh["dp"]))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = parallelize_module(
        CASES["mlp"].model(), three["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    with refusal("over a mesh of 3 dimensions"):
        private(fully_shard(model, mesh=three["replicate", "shard"]))


def dropped_reductions(rank: int, edits: dict[str, Edit]) -> None:
    """Every one of these bugs is seen."""
    for name, edit in edits.items():
        with edit.applied():
            try:
                private_step(rank, "tp", "gpt", "tables", 3, noise=0.5)
            except (AssertionError, gramian.GramianError):
                continue
        raise AssertionError(f"not seen: {name}")


def resumed(layout: str, name: str, style: str, **options: Any) -> None:
    """A run that is replayed from a state ends bit for bit where it ended before, and is spent once."""
    case = CASES[name]
    inputs, targets = case.data(8)
    data = TensorDataset(inputs, targets.view(8, -1))

    def begun() -> tuple[nn.Module, gramian.PrivacyEngine, SGD, Any]:
        model = placed(layout, case.model(), name, style)[0]
        settings = {"data": data, "poisson_sampling": True, "expected_batch": 2.0, "noise_multiplier": 0.8}
        return model, *private(model, 0.3, **settings, **options)

    def two_steps(model: nn.Module, engine: gramian.PrivacyEngine, optimizer: SGD, loader: Any) -> dict[str, Tensor]:
        batches, last = iter(loader), engine.steps + 2
        while engine.steps < last:
            x, y = next(batches)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return {key: local(p.detach()).clone() for key, p in model.named_parameters()}

    first = begun()
    two_steps(*first)
    weights = {key: p.detach().clone() for key, p in first[0].state_dict().items()}
    state = first[1].state_dict()
    ended, spent = two_steps(*first), first[1].get_epsilon(1e-5)
    first[1].detach()
    again = begun()
    again[0].load_state_dict(weights)
    again[1].load_state_dict(state, replay=True)
    for key, p in two_steps(*again).items():
        assert torch.equal(p, ended[key]), key
    assert again[1].get_epsilon(1e-5) == spent
    again[1].detach()
