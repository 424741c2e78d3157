"""Norm layers in classes of the user's own are known by what they compute; those that compute anything else run again."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import contract
from torch.nn import functional as F

import gramian
from gramian.oracles.single_sample import per_sample_gradients
from gramian.taps.sites import Generic, site_for
from gramian.taps.sites.normalization import Scale, TrailingNorm, _epsilon
from tests.taps.checks import assert_norms

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]
B, T, D = 3, 5, 8


class Norm(nn.Module):
    """x̂ by root mean square, times γ; the subclasses differ in one thing each."""

    plus = 0.0

    def __init__(self, eps: float = 1e-3, shift: bool = False) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(D))
        self.beta = nn.Parameter(torch.randn(D)) if shift else None
        self.epsilon = eps

    def hat(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        y = self.hat(x) * (self.plus + self.gamma)
        return y if self.beta is None else y + self.beta


class OnePlus(Norm):
    plus = 1.0


class Centred(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x - x.mean(-1, keepdim=True))


class InFloat32(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x.float()).to(x.dtype)


class ShiftFirst(Norm):
    def __init__(self) -> None:
        super().__init__(shift=True)
        self._parameters = {name: self._parameters[name] for name in ("beta", "gamma")}


class Torchs(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerScale(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return x


class EpsilonOutside(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)


class OverTokens(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.epsilon)


class Bent(Norm):
    """Another function from some size on."""

    def hat(self, x: Tensor) -> Tensor:
        return super().hat(torch.where(x.abs() > 100, x.abs(), x))


class InGamma(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.hat(x) * self.gamma * self.gamma


class InTraining(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 1e-9, self.training) * (1.5 if self.training else 1.0) ** 2)


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x) if gate is None else super().forward(x) * gate


class OneFactor(Norm):
    """One number for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(1))


class Detached(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.hat(x) * self.gamma.detach()


class SlowGamma(Norm):
    """γ learns at a tenth of the rate."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hat(x) * (0.1 * self.gamma + 0.9 * self.gamma.detach())


class Bounded(Norm):
    """x̂ is bounded, which only outliers show."""

    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x).clamp(-2.75, 2.75)


class BoundedInput(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x.clamp(-5e4, 5e4))


class EpsilonByDtype(Norm):
    def hat(self, x: Tensor) -> Tensor:
        eps = max(1e-12, torch.finfo(x.dtype).eps) if x.dtype != torch.float64 else self.epsilon
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class ByAxes(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x) if x.dim() == 3 else torch.tanh(x)


class InTrainingOnly(Norm):
    def hat(self, x: Tensor) -> Tensor:
        return super().hat(x) if self.training else x


class Counts(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x)


class Keeps(Norm):
    """Keeps a loss of its own on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.gamma.square().sum()
        return super().forward(x)


KNOWN = {
    "root mean square": Norm,
    "with a shift": lambda: Norm(shift=True),
    "one plus": OnePlus,
    "centred": lambda: Centred(shift=True),
    "in float32": InFloat32,
    "shift first": ShiftFirst,
    "torch's": lambda: Torchs(D),
    "without an epsilon": lambda: Norm(0.0),
    "layer scale": LayerScale,
}
UNKNOWN = {
    "keeps": Keeps,
    "epsilon outside": EpsilonOutside,
    "over tokens": OverTokens,
    "bent": Bent,
    "in gamma": InGamma,
    "in training": InTraining,
    "gated": Gated,
    "counts": Counts,
    "one factor": OneFactor,
    "detached": Detached,
    "slow gamma": SlowGamma,
    "bounded": Bounded,
    "bounded input": BoundedInput,
    "epsilon by dtype": EpsilonByDtype,
    "by axes": ByAxes,
    "in training only": InTrainingOnly,
}


def term(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * torch.linspace(-1, 1, D, dtype=x.dtype)).sin().sum()


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_norms_are_those_of_single_samples(name: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(D, D), (KNOWN | UNKNOWN)[name](), nn.Linear(D, D)).double()
    site = site_for(model[1])
    assert isinstance(site, TrailingNorm) == (name in KNOWN)
    assert isinstance(site, Generic) == (name in UNKNOWN)
    assert isinstance(site, Scale) == (name == "layer scale")
    x = torch.randn(B, T, D, dtype=torch.float64) * torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)[:, None, None]
    rows = per_sample_gradients(copy.deepcopy(model), term, (x,))
    wanted = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        term(model, x).backward()
    assert_norms(norms.values, wanted, 1e-6 if name == "in float32" else 1e-9)


def test_a_layer_is_looked_at_without_a_trace() -> None:
    layer = Norm().half()
    layer.register_forward_hook(lambda *_: pytest.fail("ran a hook"))
    before, state = copy.deepcopy(vars(layer)), torch.random.get_rng_state()
    site = site_for(layer)
    assert isinstance(site, TrailingNorm) and (site.eps, site.names) == ("epsilon", ("gamma", ""))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert vars(layer).keys() == before.keys() and torch.equal(layer.gamma, before["_parameters"]["gamma"])


def test_its_epsilon_is_that_of_the_call() -> None:
    """Two layers of one class with other values, and one whose value is changed between two captures."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(D, D), Norm(1e-6), Norm(2.0)).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    for eps in (2.0, 0.5):
        model[2].epsilon = eps
        rows = per_sample_gradients(copy.deepcopy(model), term, (x,))
        wanted = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
        with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
            term(model, x).backward()
        assert_norms(norms.values, wanted)
    assert math.isfinite(float(norms.values.sum()))


def test_a_norm_that_is_sharded_by_itself_is_one() -> None:
    """`fully_shard(norm)` is such a function: it leaves its state in attributes of the layer."""

    @contract()
    def mark(module: nn.Module) -> nn.Module:
        return module

    mark(layer := Norm())
    assert isinstance(site_for(layer), TrailingNorm)


def test_a_norm_in_place_is_none() -> None:
    class InPlace(LayerScale):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(self.gamma)

    assert isinstance(site_for(InPlace()), Generic)


def test_an_epsilon_of_the_class_is_read_again() -> None:
    class OfClass(Norm):
        default = 1e-6

        def hat(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.default)

    for eps in (1e-6, 1e-5):
        OfClass.default = eps
        site = site_for(layer := OfClass())
        assert isinstance(site, TrailingNorm) and _epsilon(layer, site.eps, torch.float64) == eps


def test_an_epsilon_of_the_class_may_change_inside_of_a_capture() -> None:
    class OfClass(Norm):
        epsilon = 1e-2

        def __init__(self) -> None:
            super().__init__()
            del self.epsilon

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(D, D), OfClass()).double()
    assert isinstance(site_for(model[1]), TrailingNorm)
    x = torch.randn(B, T, D, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        term(model, x).backward()
        OfClass.epsilon = 0.5
        term(model, x).backward()
    rows = per_sample_gradients(copy.deepcopy(model), term, (x,))
    wanted = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    assert_norms(norms.values[B:], wanted)


@pytest.mark.parametrize("norm", [Norm, lambda: nn.LayerNorm(D)])
def test_features_without_a_batch_axis_are_refused_by_name(norm: Callable[[], nn.Module]) -> None:
    class OfOneRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.row = norm(), nn.Embedding(1, D)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.norm(self.row.weight[0])

    with (
        pytest.raises(gramian.GramianError, match=r"^norm \(\w+\) saw an input of shape \[8\]"),
        gramian.per_sample_norms(model := OfOneRow(), loss_reduction="sum"),
    ):
        term(model, torch.randn(4, T, D)).backward()
