"""Ready operators against the exact path in float64, over options, models, dtypes and precisions: their bound, and the error
that they measure themselves; and that none is used after what it was made of changed.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.apply import ready_operators
from gramian.curvature.apply.natural_gradient import ready_natural_gradient
from gramian.curvature.apply.ready_operators import ReadyOperators
from gramian.linalg.tensor_core_products import UNITS
from tests.curvature.problems import PROBLEMS, normal
from tests.curvature.small import FEW, MANY, net, refresh, words

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "strong": {"damping": 1.0},
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


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    assert all(found[name].shape == t.shape for name, t in expected.items())
    off = sum(float((found[name].double() - t.double()).square().sum()) for name, t in expected.items())
    return (off / max(sum(float(t.double().square().sum()) for t in expected.values()), 1e-300)) ** 0.5


def forced(precision: str, kfac: gramian.KFACNaturalGradient, power: float = -1.0) -> ReadyOperators:
    """Operators whose products are all in one precision; TF32 is float32 on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready_operators, "_precision", lambda block, power: precision)
        return operators_of(kfac, power)


def errors_of(
    operators: ReadyOperators, kfac: gramian.KFACNaturalGradient, vector: dict[str, Tensor]
) -> dict[str, float]:
    """{block: relative error} against the exact path in float64, of the blocks with operators; `vector` in their dtype.

    After the operators were made, so that the float64 of the exact path is not theirs.
    """
    assert kfac.state.model is not None
    wide = {name: t.double() for name, t in vector.items()}
    expected = kfac.compute_natural_gradient(kfac.state.model, power=operators.power, gradients=wide)
    found, errors = operators.apply(vector), {}
    assert found.keys() == expected.keys()
    for name in operators.errors:
        own = [n for n in kfac.kfac_factors[name].spec.parameters if n in expected]
        errors[name] = difference({n: found[n] for n in own}, {n: expected[n] for n in own})
    return errors


@pytest.mark.parametrize("power", [-1.0, -0.5, -0.25, 0.5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_operators_are_within_their_bound_of_the_exact_path(
    name: str, dtype: torch.dtype, options: dict[str, Any], power: float
) -> None:
    problem = PROBLEMS[name]
    model = problem.model().to(dtype)
    if problem.inputs.is_floating_point():
        problem = replace(problem, inputs=problem.inputs.to(dtype))
    kfac = problem.captured(model, **options)
    gradients, operators = gradients_of(model), operators_of(kfac, power)
    others = [forced(precision, kfac, power) for precision in ("bf16", "bf16x3", "fp32")]
    found, exact = operators.apply(gradients), kfac.compute_natural_gradient(model, power=power)
    for n in (n for block in operators.exact for n in kfac.kfac_factors[block].spec.parameters if n in found):
        assert torch.equal(found[n], exact[n])
    for vector in (gradients, {n: normal(*t.shape, seed=1).to(dtype) for n, t in gradients.items()}):
        narrow = {n: t.float() for n, t in vector.items()}
        for made, given in ((operators, vector), *((made, narrow) for made in others)):
            for block, error in errors_of(made, kfac, given).items():
                assert error <= made.errors[block], f"{block}: {error:.3g}, bound {made.errors[block]:.3g}"
    kronecker = {name for name, block in kfac.kfac_factors.items() if block.A is not None}
    if options.get("damping_mode") == "joint":
        assert set(operators.exact) == kronecker
    elif name != "hf_gpt2" and not options.get("kfac_true_fisher_head"):  # those have diagonal ± low-rank factors
        assert not operators.exact
        if dtype == torch.float64:
            assert operators.facts()["blocks_by_precision"] == {"fp64": len(kfac.kfac_factors)}


@pytest.mark.parametrize("precision", ["bf16", "bf16x3", "fp32", "fp64"])
def test_the_bound_is_at_most_ten_times_the_largest_error(precision: str) -> None:
    """Of well-conditioned factors, for gradients and for random vectors; and it holds."""
    dtype, shares = torch.float64 if precision == "fp64" else torch.float32, []
    for shape, power, seed in itertools.product((FEW, MANY), (-1.0, -0.5), range(4)):
        model = net(dtype=dtype)
        kfac = gramian.KFACNaturalGradient(update_freq=1, damping=1.0)
        refresh(kfac, model, words(shape, seed=seed))
        operators, gradients = forced(precision, kfac, power), gradients_of(model)
        drawn = {name: normal(*t.shape, seed=seed).to(dtype) for name, t in gradients.items()}
        for vector in (gradients, drawn, kfac.compute_fisher_vector_product(drawn)):
            errors = errors_of(operators, kfac, vector)
            shares += [error / operators.errors[name] for name, error in errors.items()]
    assert 0.1 < max(shares) <= 1


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("precision", ["bf16", "bf16x3", "fp32"])
def test_the_measured_error_is_that_of_a_vector_like_a_gradient(precision: str, shape: tuple[int, int]) -> None:
    """Within a factor of 5 of the same blocks' errors for F v, v of rank one, by the exact path."""
    model = net()
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1, damping=1e-3), model, words(shape))
    operators = forced(precision, kfac)
    expected = []
    for seed in range(5):
        rows = {n: normal(*p.shape[:1], *[1] * (p.dim() - 1), seed=seed) for n, p in model.named_parameters()}
        drawn = {n: (rows[n] * normal(*p.shape[-1:], seed=seed + 9)).float() for n, p in model.named_parameters()}
        expected.append(errors_of(operators, kfac, kfac.compute_fisher_vector_product(drawn, damped=True)))
    assert len(operators.measured) == len(operators.groups)
    for name, error in operators.measured.items():
        assert median(errors[name] for errors in expected) / 5 < error < 5 * max(errors[name] for errors in expected)
        assert error < operators.errors[name]


def test_operators_that_are_off_by_a_thousandth_are_measured_so() -> None:
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), net(dtype=torch.float64))
    right, wrong = operators_of(kfac), operators_of(kfac)
    for group in wrong.groups:
        for part in (group.G._operands[0].stored, group.G._scale_BN):
            if part is not None:
                part *= 1.001
    assert right.measured.keys() == wrong.measured.keys() and max(right.measured.values()) < 1e-12
    assert all(error == pytest.approx(1e-3, rel=1e-6) for error in wrong.measured.values())


def test_measuring_factorises_nothing_and_is_of_the_damping_that_operators_have() -> None:
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), net(dtype=torch.float64))
    operators, before = operators_of(kfac), {n: b.nbytes for n, b in kfac.kfac_factors.items()}
    for block in kfac.kfac_factors.values():
        assert block.damping is not None
        block.damping = replace(block.damping, lambda_A=7.0, lambda_G=7.0)
    assert 0 < operators.facts()["largest_measured_error"] < 1e-12
    assert before == {name: block.nbytes for name, block in kfac.kfac_factors.items()}


def test_roots_and_clipped_inverses_are_not_measured() -> None:
    model = net()
    for options, power in (({}, -0.5), ({"max_condition_number": 2.0, "damping": 1e-4}, -1.0)):
        kfac = refresh(gramian.KFACNaturalGradient(update_freq=1, **options), model)
        operators = operators_of(kfac, power)
        assert operators.groups and operators.facts()["largest_measured_error"] is None


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
    assert 0 < facts["largest_measured_error"] < facts["largest_error_bound"] < 1e-4
    assert kfac.record()["operators"] == facts


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
        worst = max(ready_operators._conditions(block))
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
