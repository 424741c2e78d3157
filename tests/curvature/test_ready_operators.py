"""Ready operators against the exact path, over options and models; and that none is used after what it was made of changed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.apply import ready_operators
from gramian.curvature.apply.natural_gradient import ready_natural_gradient
from gramian.curvature.apply.ready_operators import ReadyOperators
from gramian.linalg.tensor_core_products import UNITS
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
        assert not operators.exact and operators.facts()["blocks_by_precision"] == {"fp64": len(kfac.kfac_factors)}


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


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "bf16x3", "fp32", "fp64"])
def test_every_precision_stays_within_its_bound(
    precision: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1, damping=1.0), model, words(shape))
    expected = kfac.compute_natural_gradient(model)
    monkeypatch.setattr(ready_operators, "_precision", lambda block, power: precision)
    operators, wide = operators_of(kfac), torch.float64 if precision == "fp64" else torch.float32
    off = difference(operators.apply({name: t.to(wide) for name, t in gradients_of(model).items()}), expected)
    assert off <= max(operators.errors.values()) < 1
    if precision not in ("fp64", "tf32"):  # TF32 is float32 on a CPU
        assert off > 1e-3 * max(operators.errors.values()) or off > 1e-8


def test_a_factorisation_that_fails_takes_the_exact_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from gramian.curvature.apply import ready_sides

    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model)
    expected, inverses = kfac.compute_natural_gradient(model), ready_sides._inverses

    def failing(systems: Tensor) -> tuple[Tensor, Tensor]:
        found, failed = inverses(systems)
        return found.fill_(torch.nan), torch.ones_like(failed)

    monkeypatch.setattr(ready_sides, "_inverses", failing)
    assert difference(operators_of(kfac).apply(gradients_of(model)), expected) <= 1e-10


def test_dots_are_products_of_the_gradient_and_its_natural_gradient() -> None:
    model = net(dtype=torch.float64)
    for options in ({}, {"damping_mode": "joint"}, {"memory_budget": "1GB"}):
        kfac = refresh(gramian.KFACNaturalGradient(update_freq=1, **options), model)
        gradients, dots = gradients_of(model), {}
        natural = ready_natural_gradient(kfac.state, model, gradients, dots=dots)
        total = sum(float((gradients[name] * t).sum()) for name, t in natural.items())
        assert float(torch.stack(list(dots.values())).sum()) == pytest.approx(total, rel=1e-12)


def test_the_record_says_what_steps_used() -> None:
    model = net()
    kfac = gramian.KFACNaturalGradient(update_freq=1, damping_mode="joint")
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    refresh(kfac, model)
    assert kfac.record()["operators"] is None
    optimizer.step()
    facts = kfac.record()["operators"]
    assert facts["exact"]["fc"] == "joint damping belongs to both sides together" and facts["power"] == -1
    assert facts["blocks_by_precision"] == {"fp32": 2} and facts["bytes"] > 0


def test_blocks_of_one_shape_are_multiplied_together() -> None:
    model = net()
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model)
    operators = operators_of(kfac)
    together = [sorted(block.spec.name for block in group.blocks) for group in operators.groups]
    assert ["k", "q", "v"] in together and operators.facts()["groups"] < len(kfac.kfac_factors)


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


def test_steps_after_a_refresh_use_its_factors() -> None:
    model = net(dtype=torch.float64)
    kfac = gramian.KFACNaturalGradient(update_freq=1)
    for seed in range(3):
        refresh(kfac, model, words(seed=seed))
        gradients = gradients_of(model)
        found = ready_natural_gradient(kfac.state, model, gradients)
        assert difference(found, kfac.compute_natural_gradient(model)) <= 1e-10


@pytest.mark.parametrize("damping", [30.0, 1.0, 1e-1, 1e-3])
def test_the_precision_follows_from_the_condition_number(damping: float) -> None:
    model = net()
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1, damping=damping), model, words(MANY))
    seen = set()
    for block in kfac.kfac_factors.values():
        on_gpu = replace(block, spec=replace(block.spec, device=torch.device("cuda")))
        precision = ready_operators._precision(on_gpu, -1.0)
        worst = max(ready_operators._conditions(block, -1.0))
        half = all(
            factor.storage_dtype == torch.float16 or factor.kind == "diagonal" for factor in block.factors.values()
        )
        if block.A is None or not half:
            assert precision in ("fp32", "fp64")
            continue
        cheaper = [name for name in ("bf16", "tf32", "bf16x3") if UNITS[name] > UNITS[precision]]
        assert all(UNITS[name] * worst > 0.01 for name in cheaper)
        assert UNITS[precision] * worst <= 0.01 or precision in ("fp32", "fp64")
        seen.add(precision)
    assert seen


def test_a_model_that_became_float64_is_preconditioned_in_float64() -> None:
    model = net()
    kfac = gramian.KFACNaturalGradient(update_freq=9, damping=1e-4)
    refresh(kfac, model)
    ready_natural_gradient(kfac.state, model, gradients_of(model))
    wide = {name: t.double() for name, t in gradients_of(model).items()}
    found = ready_natural_gradient(kfac.state, model, wide)
    assert difference(found, kfac.compute_natural_gradient(model, gradients=wide)) <= 1e-12
