"""A layer's bias is one more input of its block, and stays what it was at the capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gramian
from tests.curvature.small import (
    FEW,
    MANY,
    Net,
    assert_near,
    assert_same,
    damped,
    gradient_matrix,
    kept,
    natural_matrix,
    net,
    refresh,
    sides,
    words,
)
from tests.kit.refusals import refused

SHAPES = pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-3, **options})


def _frozen(bias: bool = True) -> Net:
    model = net(dtype=torch.float64)
    model.fc.bias.requires_grad_(not bias)
    return model


def _remove(model: Net) -> Callable[[], None]:
    bias, model.fc.bias = model.fc.bias, None
    return lambda: setattr(model.fc, "bias", bias)


def _add(model: Net) -> Callable[[], None]:
    model.q.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    return lambda: setattr(model.q, "bias", None)


def _freeze(model: Net) -> Callable[[], None]:
    model.fc.bias.requires_grad_(False)
    return lambda: model.fc.bias.requires_grad_(True)


def _unfreeze(model: Net) -> Callable[[], None]:
    model.fc.bias.requires_grad_(True)
    return lambda: model.fc.bias.requires_grad_(False)


CHANGES: dict[str, tuple[bool, Callable[[Net], Callable[[], None]], str, str]] = {
    "removed": (False, _remove, "fc", "had a trained bias"),
    "added": (False, _add, "q", "had no trained bias"),
    "frozen": (False, _freeze, "fc", "had a trained bias"),
    "unfrozen": (True, _unfreeze, "fc", "had no trained bias"),
}


@SHAPES
@pytest.mark.parametrize("change", CHANGES)
def test_a_bias_that_changed_after_the_capture_is_refused_by_the_layers_name(
    change: str, shape: tuple[int, int]
) -> None:
    frozen, act, layer, complaint = CHANGES[change]
    model = _frozen(frozen)
    kfac = refresh(make(), model, words(shape))
    state, factors = kfac.state_dict(), kept(kfac)
    gradients = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.requires_grad}
    vector = {f"{layer}.weight": torch.ones_like(model.get_submodule(layer).weight)}
    expected = kfac.compute_natural_gradient(model, gradients=gradients)
    revert = act(model)
    for use in (
        lambda: kfac.compute_natural_gradient(model, gradients=gradients),
        lambda: kfac.compute_natural_gradient(model, power=-0.5, gradients=gradients),
        lambda: kfac.compute_fisher_vector_product(vector),
        lambda: kfac.compute_fisher_vector_product(vector, damped=True),
        lambda: kfac.quadratic_form(vector),
        lambda: kfac.load_state_dict(state, model),
        lambda: make().load_state_dict(state, model),
        lambda: refresh(kfac, model, words(shape)),
        lambda: kfac.collect_kfac_factors(model, words(shape)),
    ):
        with refused(layer, complaint, "expected its bias as at the capture"):
            use()
    assert_same(kept(kfac), factors)
    revert()
    assert_same(kfac.compute_natural_gradient(model, gradients=gradients), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_object_takes_the_layer_as_it_is_now(change: str) -> None:
    frozen, act, layer, _ = CHANGES[change]
    model = _frozen(frozen)
    refresh(make(), model)
    act(model)
    kfac = refresh(make(), model)
    assert (f"{layer}.bias" in kfac.compute_natural_gradient(model)) is (change in ("added", "unfrozen"))


@SHAPES
def test_the_bias_is_the_last_input(shape: tuple[int, int]) -> None:
    model, seen = net(dtype=torch.float64), []
    model.fc.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    kfac = refresh(make(), model, words(shape))
    a = torch.cat([seen[0].flatten(0, 1), torch.ones(shape[0] * shape[1], 1, dtype=torch.float64)], dim=1)
    assert_near(sides(kfac, "fc")[0], a.mT @ a / len(a), 1e-12)


def _expected(kfac: gramian.KFACNaturalGradient, y: torch.Tensor) -> torch.Tensor:
    a_side, g_side = sides(kfac, "fc")
    facts = kfac.record()["layers"]["fc"]
    left, right = damped(g_side, facts["lambda_G"], 1e6), damped(a_side, facts["lambda_A"], 1e6)
    return torch.linalg.solve(left, torch.linalg.solve(right, y.mT).mT)


@SHAPES
def test_a_missing_bias_gradient_counts_as_zero(shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(), model, words(shape))
    whole = natural_matrix(kfac, model, "fc")
    assert_near(whole, _expected(kfac, gradient_matrix(model, "fc")), 1e-9)
    y = gradient_matrix(model, "fc")
    y[:, -1] = 0
    model.fc.bias.grad = None
    found = kfac.compute_natural_gradient(model)
    assert "fc.bias" not in found
    assert_near(found["fc.weight"], _expected(kfac, y)[:, :-1], 1e-9)
    assert float((found["fc.weight"] - whole[:, :-1]).norm()) > 1e-3 * float(whole.norm())  # the bias did matter


@SHAPES
def test_a_missing_weight_gradient_counts_as_zero_too(shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(), model, words(shape))
    y = gradient_matrix(model, "fc")
    y[:, :-1] = 0
    model.fc.weight.grad = None
    found = kfac.compute_natural_gradient(model)
    assert "fc.weight" not in found
    assert_near(found["fc.bias"], _expected(kfac, y)[:, -1], 1e-9)


@SHAPES
@pytest.mark.parametrize("is_damped", [False, True])
@pytest.mark.parametrize("given", ["weight", "bias", "both"])
def test_a_product_with_half_a_layer_is_that_with_zeros_for_the_rest(
    given: str, is_damped: bool, shape: tuple[int, int]
) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(), model, words(shape))
    v = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vector = {"fc.weight": v[:, :-1].clone(), "fc.bias": v[:, -1].clone()}
    if given == "weight":
        del vector["fc.bias"]
        v[:, -1] = 0
    elif given == "bias":
        del vector["fc.weight"]
        v[:, :-1] = 0
    a_side, g_side = sides(kfac, "fc")
    if is_damped:
        facts = kfac.record()["layers"]["fc"]
        a_side, g_side = damped(a_side, facts["lambda_A"], 1e6), damped(g_side, facts["lambda_G"], 1e6)
    found = kfac.compute_fisher_vector_product(vector, damped=is_damped)
    assert found.keys() == {"fc.weight", "fc.bias"}  # F v is not zero where v is
    assert_near(torch.cat([found["fc.weight"], found["fc.bias"][:, None]], dim=1), g_side @ v @ a_side, 1e-9)


@SHAPES
def test_a_frozen_bias_is_no_input(shape: tuple[int, int]) -> None:
    model = _frozen()
    kfac = refresh(make(), model, words(shape))
    facts = kfac.record()["layers"]["fc"]
    assert (facts["bias"], facts["in_dim"], facts["parameters"]) == (False, 8, ["fc.weight"])
    assert kfac.coverage["fc.bias"].status == "frozen"
    found = kfac.compute_natural_gradient(model)
    assert "fc.bias" not in found
    assert_near(found["fc.weight"], _expected(kfac, model.fc.weight.grad), 1e-9)


class Shared(nn.Module):
    """Two layers with one bias: no column of either."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.bias = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def test_a_bias_of_two_layers_is_a_block_of_its_own() -> None:
    torch.manual_seed(0)
    model, kfac = Shared(), make()
    with kfac.capture(model, num_terms=6):
        model(torch.randn(6, 4, dtype=torch.float64)).square().sum(1).mean().backward()
    assert {name: block.spec.parameters for name, block in kfac.kfac_factors.items()} == {
        "first": ("first.weight",),
        "second": ("second.weight",),
        "first.bias": ("first.bias",),
    }
    assert set(kfac.compute_natural_gradient(model)) == {"first.weight", "first.bias", "second.weight"}
