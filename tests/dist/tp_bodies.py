"""K-FAC of tensor-parallel models on real processes: models, how they are spread, and what holds for all of them."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import gramian
from tests.curvature.splits import Case, assert_equal, refresh
from tests.dist.kfac_bodies import alone, make, preconditioned, sharded_results, whole_like
from tests.kit.mutations import Edit
from tests.kit.refusals import refusal


class Mlp(nn.Module):
    """Spread layers with and without a bias around a whole one; classes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 6)
        self.whole, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).tanh()).tanh()
        return self.head(self.norm(self.whole(h).tanh()))


class Block(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 18), nn.Linear(18, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.norm_1(x_BTD)
        q, k, v = (part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Gpt(nn.Module):
    """Six heads of two features: for two and for three processes. The position table sees one row for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 12), nn.Embedding(6, 12)
        self.block = Block(12, 2)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 11, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(ids_BT.shape[1])[None]
        return self.head(self.norm(self.block(self.tokens(ids_BT) + self.positions(positions_1T))))


class FlatHead(Gpt):
    """The head sees all tokens in one row each, k·B of them."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(ids_BT.shape[1])[None]
        h = self.norm(self.block(self.tokens(ids_BT) + self.positions(positions_1T)))
        return self.head(h.flatten(0, 1)).unflatten(0, ids_BT.shape)


def _floats(n: int) -> Tensor:
    return torch.randn(n, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def _ids(tokens: int) -> Any:
    return lambda n: torch.randint(11, (n, tokens), generator=torch.Generator().manual_seed(5 * n))


CASES = {
    "mlp": Case(Mlp, _floats, 5),
    "gpt": Case(Gpt, _ids(3), 11, 3),
    "long gpt": Case(Gpt, _ids(6), 11, 6),
    "flat": Case(FlatHead, _ids(3), 11, 3),
}


def plan(name: str, style: str) -> dict[str, Any]:
    """Which layers are spread, and how: "usual", "tables" too (by width and by rows), or "sequence" parallel in between."""
    if name == "mlp":
        return {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
    found: dict[str, Any] = {f"block.{layer}": ColwiseParallel() for layer in ("q", "k", "v", "up")}
    found |= {f"block.{layer}": RowwiseParallel() for layer in ("o", "down")}
    found["head"] = ColwiseParallel(output_layouts=Replicate())
    if style == "tables":
        found["tokens"] = RowwiseParallel(input_layouts=Replicate())
        found["positions"] = ColwiseParallel(output_layouts=Replicate())
    if style == "sequence":
        found["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        found["positions"] = ColwiseParallel(output_layouts=Shard(1))
        found |= {f"block.{layer}": RowwiseParallel(output_layouts=Shard(1)) for layer in ("o", "down")}
        found |= {layer: SequenceParallel() for layer in ("norm", "block.norm_1", "block.norm_2")}
        found["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return found


@cache
def mesh_of(data: int, tensor: int) -> DeviceMesh:
    """One for all tests of a process: each new one has groups with threads of their own, which nobody ends."""
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def spread(model: nn.Module, name: str, style: str, data: int, tensor: int) -> nn.Module:
    """Tensor parallel over `tensor` processes, FSDP2 over `data` if there are more than one."""
    mesh = mesh_of(data, tensor)
    parallelize_module(model, mesh["tp"], plan(name, style))
    if data > 1:
        if hasattr(model, "block"):
            fully_shard(model.block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def same_as_one(
    rank: int,
    name: str,
    style: str,
    tensor: int,
    split: list[list[int]],
    options: dict[str, Any],
    tolerance: float = 1e-10,
    **told: Any,
) -> dict[str, Any]:
    """Factors, natural gradients and products are those of one process. `split`: the samples of each data-parallel rank."""
    case, samples = CASES[name], sum(map(len, split))
    expected = alone(case, samples, torch.float64, options, **told)
    kfac, model = make(**options), spread(case.model(), name, style, len(split), tensor)
    refresh(kfac, model, case.data(samples), split[rank // tensor], **told)
    assert_equal(sharded_results(kfac, model, case.model()), expected, tolerance)
    return kfac.record()


def collections(rank: int, name: str, style: str, tensor: int, split: list[list[int]], default_ids: bool) -> None:
    """Labels are drawn for samples, once whatever holds them; the user's gradients stay as they are."""
    case, samples = CASES[name], sum(map(len, split))
    inputs, targets = case.data(samples)
    rows = torch.tensor(split[rank // tensor])
    one, reference = make(kfac_distributed_reduce="none"), case.model()
    for kind in ("empirical", "mc", "true"):
        one.collect_kfac_factors(reference, (inputs, targets), kind, n_samples=2, sample_ids=torch.arange(samples))
        kfac, model = make(), spread(case.model(), name, style, len(split), tensor)
        kfac.state.generator.set_state(one.state.generator_before_step)
        ids = None if default_ids else rows
        kfac.collect_kfac_factors(model, (inputs[rows], targets[rows]), kind, n_samples=2, sample_ids=ids)
        assert all(p.grad is None for p in model.parameters())
        assert_equal(_factors(kfac), _factors(one), 1e-10)


def _factors(kfac: gramian.KFACNaturalGradient) -> dict[str, Tensor]:
    return {f"{n} {s}": f.to_dense() for n, b in kfac.kfac_factors.items() for s, f in b.factors.items()}


def padded(rank: int) -> None:
    """Targets without a loss term, weights of tokens, several backwards, an evaluation before: as on one process."""
    case = CASES["gpt"]
    inputs, targets = case.data(4)
    targets[0, 1:], targets[3, 0] = -100, -100
    weights = torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 3.0]], dtype=torch.float64)
    for told in ({}, {"weights": weights}, {"micro": 1}, {"micro": 3, "reduction": "sum"}):
        data = (inputs, targets if "weights" not in told else case.data(4)[1])
        one, kfac = make(kfac_distributed_reduce="none"), make()
        plain, model = case.model(), spread(case.model(), "gpt", "usual", 1, 2)
        with torch.no_grad():
            model(inputs)
        refresh(one, plain, data, range(4), **told)
        refresh(kfac, model, data, range(4), **told)
        assert_equal(_factors(kfac), _factors(one), 1e-10)
        assert (kfac.state.padding, one.state.padding) == ({}, {})
        found = kfac.compute_natural_gradient(model)
        for name, t in one.compute_natural_gradient(plain).items():
            gradient = dict(model.named_parameters())[name].grad
            assert_equal({name: whole_like(found[name], gradient)}, {name: t}, 1e-9)


def trained(rank: int, tensor: int, data: int, reduce: str) -> None:
    """A few preconditioned steps, with evaluations between them, move the parameters as they do on one process."""
    case, samples = CASES["gpt"], 4
    expected = preconditioned(case, case.model(), list(range(samples)), "none")
    model = spread(case.model(), "gpt", "usual", data, tensor)
    assert_equal(preconditioned(case, model, list(range(rank // tensor, samples, data)), reduce), expected, 1e-9)


def one_rank_fails(rank: int) -> None:
    """An error behind the backward on one process: all raise, nobody waits, and the next refresh is that of one process."""
    case = CASES["mlp"]
    kfac, model = make(), spread(case.model(), "mlp", "usual", 1, 2)
    inputs, targets = case.data(3)
    with pytest.raises((gramian.GramianError, RuntimeError), match="no such luck"), kfac.capture(model, num_terms=3):
        F.cross_entropy(model(inputs), targets).backward()
        if rank == 1:
            raise RuntimeError("no such luck")
    refresh(kfac, model, case.data(3), range(3))
    assert_equal(sharded_results(kfac, model, case.model()), alone(case, 3, torch.float64, {}), 1e-10)


def wrong_terms(rank: int) -> None:
    """A number of terms that does not fit the exact head is told on all processes, also on one that has no sample."""
    case = CASES["mlp"]
    model = spread(case.model(), "mlp", "usual", 1, 2)
    inputs, targets = case.data(1)
    with (
        refusal("head: the gradient of token 0 is not that of"),
        make(kfac_true_fisher_head=True).capture(model, num_terms=3),
    ):
        F.cross_entropy(model(inputs), targets).backward()


def refusals(rank: int) -> None:
    """By name, on all processes."""
    case = CASES["gpt"]
    inputs, targets = case.data(4)

    def model() -> nn.Module:
        return spread(case.model(), "gpt", "usual", 1, 2)

    def backward(model: nn.Module, rows: list[int]) -> None:
        F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()

    with refusal(r"^block\.q\.weight is tensor parallel, which only K-FAC"), gramian.per_sample_norms(m := model()):
        backward(m, [0, 1])
    with refusal('^kfac_distributed_reduce: is "none"'):
        make(kfac_distributed_reduce="none").capture(model(), num_terms=4)
    with refusal("^model: process 1 .* other inputs"), make().capture(m := model(), num_terms=6):
        backward(m, [0, 1 + rank])
    groups = [dist.new_group([r]) for r in range(2)]
    with refusal("no process has all features"):
        make(process_group=groups[rank]).capture(model(), num_terms=4)
    with refusal("^model: is tensor parallel and compiled"):
        make().capture(torch.compile(model()), num_terms=4)
    attention = nn.Sequential(nn.Linear(12, 12), nn.MultiheadAttention(12, 2, batch_first=True))
    attention.forward = lambda x: attention[1](attention[0](x), x, x)[0]  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(attention, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    with refusal(r"^1 \(MultiheadAttention\) has no formula"), make().capture(attention, num_terms=4):
        attention(torch.randn(2, 3, 12)).sum().backward()
    parts = case.model()
    parallelize_module(parts, mesh, {"head": ColwiseParallel()})
    wide = torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(0))
    with refusal(f"^head: returns {6 - rank} of its 11 classes"):
        make().collect_kfac_factors(parts, (wide, wide), "mc")


class Broken(nn.Module):
    """Uses a spread weight past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x)) + self.down.bias.full_tensor()
        return y


def audited(rank: int) -> None:
    """The audit adds up what the processes explain, and sees a weight that is used outside its layer."""
    model = Broken().double()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with refusal(r"^down\.bias: the taps explain a gradient"), make().capture(model, num_terms=3):
        F.cross_entropy(model(torch.randn(3, 6, dtype=torch.float64)), torch.arange(3)).backward()


def traps(rank: int, edits: dict[str, Edit]) -> None:
    """Every one of these bugs is seen."""

    def check() -> None:
        same_as_one(rank, "gpt", "tables", 2, [[0, 1, 2]], {"max_tokens": 4})
        default_ids(rank)

    check()
    for name, edit in edits.items():
        with edit.applied():
            try:
                check()
            except (AssertionError, gramian.GramianError):
                continue
        raise AssertionError(f"not seen: {name}")


def default_ids(rank: int) -> None:
    """Samples are numbered once for all processes that see them."""
    case = CASES["mlp"]
    inputs, targets = case.data(6)
    one, kfac = make(kfac_distributed_reduce="none", max_tokens=3), make(max_tokens=3)
    for k, model in ((one, case.model()), (kfac, spread(case.model(), "mlp", "usual", 1, 2))):
        with k.capture(model, num_terms=6):
            F.cross_entropy(model(inputs), targets).backward()
    assert_equal(_factors(kfac), _factors(one), 1e-10)
