"""A user taps a layer of their own: what the docs show, exact, in well under 40 lines."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.taps.gradients import Outer, PerSampleGradient, Summed
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.checks import assert_exact

pytestmark = pytest.mark.oracle


class Scale(nn.Module):
    """y = s ⊙ x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ScaleSite(gramian.Site):
    """ds = Σ_t g_t ⊙ x_t."""

    kind = "scale"

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        products = kept[0] * output_gradients[0]
        return {"weight": Summed(products.reshape(batch, -1, products.shape[-1]))}


class LowRank(nn.Module):
    """y = (x U) V + x, with U [in, r] and V [r, in]."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(width, rank)), nn.Parameter(torch.randn(rank, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.down @ self.up


class LowRankSite(gramian.Site):
    """dV = Σ_t (x_t U) g_tᵀ, dU = Σ_t x_t (V g_t)ᵀ."""

    kind = "low rank"

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        x_BTD = kept[0].reshape(batch, -1, kept[0].shape[-1])
        g_BTD = output_gradients[0].reshape(batch, -1, kept[0].shape[-1])
        found: dict[str, PerSampleGradient] = {}
        if module.down.requires_grad:
            found["down"] = Outer(x_BTD, g_BTD @ module.up.mT)
        if module.up.requires_grad:
            found["up"] = Outer(x_BTD @ module.down, g_BTD)
        return found


class Temperature(Toy):
    """y = τ x, with a parameter of no axes."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: net.tau * x, tau=nn.Parameter(torch.tensor(1.7)))


class TemperatureSite(gramian.Site):
    """dτ = Σ_t g_t · x_t."""

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        return {"tau": Summed((kept[0] * output_gradients[0]).reshape(batch, -1, 1), shape=())}


gramian.register_site(Scale, ScaleSite())
gramian.register_site(f"{LowRank.__module__}.LowRank", LowRankSite())
gramian.register_site(Temperature, TemperatureSite())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), Scale(6), nn.Tanh(), LowRank(6, 2), Temperature(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("algorithm", ["auto", "direct", "gram"])
def test_registered_sites_are_exact(algorithm: str) -> None:
    norms = assert_exact(_model(), torch.randn(3, 4, 5, dtype=torch.float64), algorithm=algorithm)
    assert norms.coverage["1.weight"].kind == "scale"
    assert norms.coverage["3.down"].kind == norms.coverage["3.up"].kind == "low rank"
    assert norms.coverage["4.tau"].kind == "site"


def test_a_registered_site_takes_less_than_40_lines() -> None:
    for site in (ScaleSite, LowRankSite, TemperatureSite):
        assert len(inspect.getsource(site).splitlines()) + 1 < 40


def test_a_class_may_be_registered_by_name_without_being_imported() -> None:
    gramian.register_site("no.such.package.Layer", ScaleSite())


def test_a_subclass_that_keeps_forward_is_tapped_by_the_site_of_its_base() -> None:
    class Gate(Scale):
        pass

    norms = assert_exact(Gate(5).double(), torch.randn(3, 4, 5, dtype=torch.float64))
    assert norms.coverage["weight"].kind == "scale"


def test_a_registered_layer_that_is_used_twice_or_frozen_is_exact() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.rank = Scale(5), LowRank(5, 2)
            self.rank.down.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.rank(self.scale(x).tanh()))

    norms = assert_exact(Twice().double(), torch.randn(3, 4, 5, dtype=torch.float64))
    assert norms.coverage["scale.weight"].uses == 2
    assert norms.coverage["rank.down"].status == "frozen"


@pytest.mark.full
def test_a_registered_layer_is_exact_under_compile() -> None:
    torch.compiler.reset()
    model = _model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        compiled(x).square().sum().backward()
    from tests.taps.checks import assert_norms, loop_norms

    assert_norms(norms.values, loop_norms(_model(), lambda m, x, reduction: m(x).square().sum(), (x,)))


class WrongSite(ScaleSite):
    """Forgets the input."""

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        return {"weight": Summed(output_gradients[0].reshape(batch, -1, kept[0].shape[-1]))}


def test_a_wrong_site_is_noticed_by_the_audit_and_named() -> None:
    class Mistaken(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    gramian.register_site(Mistaken, WrongSite())
    model = nn.Sequential(nn.Linear(5, 6), Mistaken(6))
    with refusal(r"^1\.weight: .*expected"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4, 5)).square().sum().backward()


def test_a_site_that_forgets_a_parameter_is_noticed_by_the_audit_and_named() -> None:
    class Forgotten(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    class Empty(ScaleSite):
        def gradients(
            self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
        ) -> dict[str, PerSampleGradient]:
            return {}

    gramian.register_site(Forgotten, Empty())
    model = nn.Sequential(nn.Linear(5, 6), Forgotten(6))
    with refusal(r"^1\.weight: .*expected"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4, 5)).square().sum().backward()
