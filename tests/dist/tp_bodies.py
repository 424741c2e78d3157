"""K-FAC of tensor-parallel models on real processes: models, how they are spread, and what holds for all of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import gramian
from tests.curvature.splits import Case, assert_equal, refresh, vector
from tests.dist.kfac_bodies import alone, make


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
        return {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
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


def spread(model: nn.Module, name: str, style: str, data: int, tensor: int) -> nn.Module:
    """Tensor parallel over `tensor` processes, FSDP2 over `data` if there are more than one."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
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
    **told: Any,
) -> dict[str, Any]:
    """Factors, natural gradients and products are those of one process. `split`: the samples of each data-parallel rank."""
    case, samples = CASES[name], sum(map(len, split))
    expected = alone(case, samples, torch.float64, options, **told)
    kfac, model = make(**options), spread(case.model(), name, style, len(split), tensor)
    refresh(kfac, model, case.data(samples), split[rank // tensor], **told)
    assert_equal(results(kfac, model, case.model()), expected, 1e-10)
    return kfac.record()


def results(kfac: gramian.KFACNaturalGradient, model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """Everything that is compared, from a vector that is spread as the parameters are: what comes back is spread alike."""
    places = dict(model.named_parameters())
    v = {n: _placed(t, places[n]) for n, t in vector(plain).items()}
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
    """All of it; it is placed as the parameter is."""
    if not isinstance(parameter, DTensor):
        assert not isinstance(t, DTensor)
        return t
    assert isinstance(t, DTensor)
    assert (t.placements, t.device_mesh, t.shape) == (parameter.placements, parameter.device_mesh, parameter.shape)
    assert t.to_local().shape == parameter.to_local().shape
    return t.full_tensor()
