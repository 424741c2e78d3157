"""Ready operators against the exact path, over options and models; and that none is used after what it was made of changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.apply.ready_operators import ReadyOperators, summary
from tests.curvature.problems import PROBLEMS
from tests.curvature.small import FEW, MANY, net, refresh, words

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "factored": {"damping_mode": "factored", "damping": 1e-2},
    "joint": {"damping_mode": "joint", "damping": 1e-2},
    "weak": {"damping": 1e-6},
    "clipped": {"damping": 1e-4, "max_condition_number": 30.0},
    "no clip": {"use_eigenvalue_correction": False},
    "dense": {"kfac_use_woodbury": False},
    "exact head": {"kfac_true_fisher_head": True},
    "few": {"max_tokens": 3},
    "diagonals": {"min_layer_size": 9},
    "ekfac": {"damping_mode": "joint", "ekfac": True},
}


def operators_of(kfac: gramian.KFACNaturalGradient, power: float = -1.0) -> ReadyOperators:
    return ReadyOperators(kfac.kfac_factors, power, kfac.options, kfac.state.factorisations)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    assert all(found[name].shape == t.shape for name, t in expected.items())
    off = sum(float((found[name].double() - t.double()).square().sum()) for name, t in expected.items())
    return (off / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5


@pytest.mark.parametrize("power", [-1.0, -0.5, -0.25, 0.5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_operators_are_the_exact_path_to_rounding(name: str, options: dict[str, Any], power: float) -> None:
    problem = PROBLEMS[name]
    model = problem.model()
    kfac = problem.captured(model, **options)
    gradients = gradients_of(model)
    expected = kfac.compute_natural_gradient(model, power=power)
    operators = operators_of(kfac, power)
    assert difference(operators.apply(gradients), expected) <= 1e-9
    kronecker = {name for name, block in kfac.kfac_factors.items() if block.A is not None}
    if options.get("damping_mode") == "joint":
        assert set(operators.exact) == kronecker
    elif name != "hf_gpt2" and not options.get("kfac_true_fisher_head"):  # those have diagonal ± low-rank factors
        assert not operators.exact and summary(operators)["blocks_by_precision"] == {"fp64": len(kfac.kfac_factors)}


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-4])
def test_float32_stays_within_its_bound(shape: tuple[int, int], power: float, damping: float) -> None:
    model = net()
    kfac = gramian.KFACNaturalGradient(update_freq=1, damping=damping)
    refresh(kfac, model, words(shape))
    exact = gramian.KFACNaturalGradient(update_freq=1, damping=damping, woodbury_dtype="fp16")
    exact.load_state_dict(kfac.state_dict())
    operators = operators_of(kfac, power)
    gradients = gradients_of(model)
    wide = {name: t.double() for name, t in gradients.items()}
    expected = exact.compute_natural_gradient(model, power=power, gradients=wide)
    bound = max(operators.errors.values())
    assert difference(operators.apply(gradients), expected) <= max(bound, 1e-6)
    assert bound < 0.5


def test_blocks_of_one_shape_are_multiplied_together() -> None:
    model = net()
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model)
    operators = operators_of(kfac)
    together = [sorted(block.spec.name for block in group.blocks) for group in operators.groups]
    assert ["k", "q", "v"] in together and summary(operators)["products"] < 2 * len(kfac.kfac_factors)


def test_a_missing_gradient_counts_as_zero_and_is_left_out() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model)
    gradients = gradients_of(model)
    del gradients["fc.bias"], gradients["q.weight"]
    expected = kfac.compute_natural_gradient(model, gradients=gradients)
    assert difference(operators_of(kfac).apply(gradients), expected) <= 1e-10


def test_operators_do_not_outlive_what_they_were_made_of() -> None:
    model = net()
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model)
    operators = operators_of(kfac)
    assert operators.fits(kfac.kfac_factors, -1.0) and not operators.fits(kfac.kfac_factors, -0.5)
    block = kfac.kfac_factors["fc"]
    before, block.damping = block.damping, None
    assert not operators.fits(kfac.kfac_factors, -1.0)
    block.damping = before
    assert operators.fits(kfac.kfac_factors, -1.0)
    refresh(kfac, model, words(seed=5))
    assert not operators.fits(kfac.kfac_factors, -1.0)
