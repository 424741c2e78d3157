"""A network small enough to write every factor down, and the steps that tests of one K-FAC object take with it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature.estimate.kfac_capture import IdleCapture, KFACCapture

WORDS, WIDTH = 11, 8
FEW, MANY = (2, 3), (4, 6)
"""[B, T]: fewer tokens than any side is wide, so that factors are low rank; more than all, so that they are dense."""
MADE = ("norm.weight", "norm.bias")
"""Parameters without a matrix: exact blocks."""


class Net(nn.Module):
    """Words in, logits out: a table, a norm, three layers that share their input, one with a bias, and a head."""

    def __init__(self, tied: bool = False, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.fc, self.head = nn.Linear(width, width + 1), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.norm(self.table(x_BT))
        h = self.q(h) * self.k(h).sigmoid() + self.v(h)
        return self.head(self.fc(h)[..., :-1].tanh())


LAYERS = ("table", "q", "k", "v", "fc", "head")


def net(tied: bool = False, dtype: torch.dtype = torch.float32, **sizes: int) -> Net:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(tied, **sizes).to(dtype)


def words(shape: tuple[int, int] = MANY, seed: int = 1, count: int = WORDS) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [B, T] each."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(count, shape, generator=generator) for _ in range(2))
    return x, y


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
    """Cross entropy over all positions."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def opened(
    kfac: gramian.KFACNaturalGradient, model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any
) -> KFACCapture | IdleCapture:
    """A capture that knows its terms."""
    return kfac.capture(model, num_terms=batch[1].numel(), **options)


def refresh(
    kfac: gramian.KFACNaturalGradient, model: nn.Module, batch: tuple[Tensor, Tensor] | None = None, **options: Any
) -> gramian.KFACNaturalGradient:
    """One ordinary step inside a capture."""
    batch = words() if batch is None else batch
    model.zero_grad()
    with opened(kfac, model, batch, **options):
        loss_of(model, batch).backward()
    return kfac


def kept(kfac: gramian.KFACNaturalGradient) -> dict[str, Tensor]:
    """Every tensor at rest, copied."""
    factors = kfac.state_dict()["factors"]
    tensors = {f"{number}.{name}": t for number, parts in factors.items() for name, t in parts.items()}
    return {name: t.clone() for name, t in tensors.items() if isinstance(t, Tensor)}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and every tensor bit for bit."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype and torch.equal(actual[name], want), name


def differs(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """True if a tensor is another one."""
    return any(not torch.equal(actual[name], want) for name, want in expected.items())


def free(model: nn.Module) -> bool:
    """True if no instance carries a forward that is not its class's."""
    return all("forward" not in vars(module) for module in model.modules())


# ---- written out -----------------------------------------------------------------------------------------------------


def damped(matrix: Tensor, value: float, kappa: float | None) -> Tensor:
    """M + λI with eigenvalues raised to the largest over κ."""
    values, vectors = torch.linalg.eigh(matrix.double())
    values = values.clamp(min=0) + value
    if kappa is not None:
        values = values.clamp(min=float(values.max()) / kappa)
    return (vectors * values) @ vectors.mT


def raised(matrix: Tensor, power: float) -> Tensor:
    """M^p of a positive definite M."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(power)) @ vectors.mT


def sides(kfac: gramian.KFACNaturalGradient, layer: str) -> tuple[Tensor, Tensor]:
    """A and G of a layer, float64."""
    block = kfac.kfac_factors[layer]
    assert block.A is not None
    return block.A.to_dense().double(), block.G.to_dense().double()


def gradient_matrix(model: nn.Module, layer: str) -> Tensor:
    """[∂W | ∂b] of a layer, float64."""
    module = model.get_submodule(layer)
    parts = [module.weight.grad] if module.bias is None else [module.weight.grad, module.bias.grad[:, None]]
    return torch.cat(parts, dim=1).double()


def natural_matrix(kfac: gramian.KFACNaturalGradient, model: nn.Module, layer: str, power: float = -1.0) -> Tensor:
    """The library's natural gradient of a layer in the same form."""
    found = kfac.compute_natural_gradient(model, power=power)
    parts = [found[f"{layer}.weight"]]
    if f"{layer}.bias" in found:
        parts.append(found[f"{layer}.bias"][:, None])
    return torch.cat(parts, dim=1).double()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within a tolerance relative to the norm."""
    actual, expected = actual.detach().double(), expected.detach().double()
    error, size = float((actual - expected).norm()), float(expected.norm())
    assert error <= tolerance * size, f"off by {error:.3g} of {size:.3g}"
