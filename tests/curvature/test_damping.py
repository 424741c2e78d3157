"""Damping, clip and powers against the whole matrix, written out and raised by its eigenvalues."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.oracles import dense_kfac, single_sample
from tests.curvature.problems import (
    PROBLEMS,
    TOLERANCE,
    assert_close,
    assert_tensors,
    cross_entropy,
    gradients,
    has_bias,
    kfac,
    normal,
    oracle,
)
from tests.kit.matrix import sample
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]

POWERS = (-1.0, -0.5, 0.5, 1.0, 0.3)
MODES: dict[str, dict[str, Any]] = {
    "factored": {"damping_mode": "factored", "damping": 9.0, "damping_A": 0.03, "damping_G": 0.004},
    "pi": {"damping_mode": "pi", "damping": 1e-4},
    "joint": {"damping_mode": "joint", "damping": 0.01},
}
CLIPS: dict[str, dict[str, Any]] = {"off": {"use_eigenvalue_correction": False}, "on": {"max_condition_number": 7.0}}
POLICIES = ("all", "small_only")


def as_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[W | b] as [o, m]."""
    matrix = weight.mT if isinstance(module, Conv1D | nn.Embedding) else weight.flatten(1)
    return matrix if bias is None else torch.cat([matrix, bias[:, None]], dim=1)


def expected(name: str, vector: dict[str, Tensor], p: float, mode: str, clip: str) -> dict[str, Tensor]:
    """{layer: (F + damping)^p Y [o, m]} from the factors of plain hooks."""
    model, condition = PROBLEMS[name].model(), CLIPS[clip].get("max_condition_number")
    found = {}
    for layer, (A, G) in oracle(name).items():
        module = model.get_submodule(layer)
        bias = vector[f"{layer}.bias"] if has_bias(module) else None
        Y = as_matrix(module, vector[f"{layer}.weight"], bias)
        options = {**MODES[mode], "max_condition": condition}
        found[layer] = dense_kfac.natural(A, G, Y, p, mode=options.pop("damping_mode"), **options)
    return found


def assert_layers(name: str, got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    model = PROBLEMS[name].model()
    for layer, matrix in want.items():
        module = model.get_submodule(layer)
        bias = got[f"{layer}.bias"] if has_bias(module) else None
        assert_close(as_matrix(module, got[f"{layer}.weight"], bias), matrix, tolerance, layer)


@pytest.mark.parametrize(
    "name, p, mode, clip, policy",
    sample([*itertools.product(["mlp", "embedding", "conv1d"], POWERS, MODES, CLIPS, POLICIES)], 90),
)
def test_powers_are_those_of_the_whole_matrix(name: str, p: float, mode: str, clip: str, policy: str) -> None:
    model = PROBLEMS[name].model()
    found = PROBLEMS[name].captured(model, kfac_policy=policy, **MODES[mode], **CLIPS[clip])
    before = gradients(model)
    got = found.compute_natural_gradient(model, power=p)
    assert got.keys() == before.keys()
    assert_layers(name, got, expected(name, before, p, mode, clip))
    kinds = {f.kind for block in found.kfac_factors.values() for f in block.factors.values()}
    assert ("low rank" in kinds) == (policy == "all")


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("mode", MODES)
def test_powers_of_a_transposed_weight(p: float, mode: str) -> None:
    """Hugging Face's Conv1D holds [in, out]."""
    model = PROBLEMS["hf_gpt2"].model()
    found = PROBLEMS["hf_gpt2"].captured(model, **MODES[mode], **CLIPS["on"])
    got = found.compute_natural_gradient(model, power=p)
    assert_layers("hf_gpt2", got, expected("hf_gpt2", gradients(model), p, mode, "on"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_clip_is_at_work_on_both_sides_and_says_so(mode: str, policy: str) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found = p.captured(model, kfac_policy=policy, **MODES[mode], **CLIPS["on"])
    found.compute_natural_gradient(model)
    for layer, (A, G) in oracle("mlp").items():
        about = found.record()["layers"][layer]
        damping = {"A": about["lambda_A"], "G": about["lambda_G"]}
        whole = {"joint": torch.kron(G, A)} if mode == "joint" else {"A": A, "G": G}
        for side, M in whole.items():
            clip = about["clip_joint"] if mode == "joint" else about["sides"][side]["clip"]
            values = torch.linalg.eigvalsh(M).clamp(min=0) + damping.get(side, MODES["joint"]["damping"])
            floor = float(values.max()) / 7
            low = values[values < floor * (1 - 1e-12)]
            assert (clip["count"], clip["total"]) == (len(low), len(M)) and len(low) > 0
            assert clip["floor"] == pytest.approx(floor, rel=1e-9)
            assert clip["mass"] == pytest.approx(float((floor - low).sum()), rel=1e-9)


@pytest.mark.parametrize("mode, value", [("factored", 0.004), ("pi", 1e-4), ("joint", 0.01)])
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_blocks_without_two_sides_are_damped_whole(mode: str, value: float, p: float, clip: str) -> None:
    problem = PROBLEMS["gpt"]
    model = problem.model()
    found = problem.captured(model, **MODES[mode], **CLIPS[clip])
    names = ["blocks.0.norm_attention.weight", "final_norm.bias"]
    loop = single_sample.per_sample_gradients(model, cross_entropy, (problem.inputs, problem.targets), names)
    got = found.compute_natural_gradient(model, power=p)
    for name in names:
        F = loop[name].mT @ loop[name] / problem.terms
        power = dense_kfac.matrix_power(F, p, value, CLIPS[clip].get("max_condition_number"))
        assert_close(got[name], power @ model.get_parameter(name).grad, what=name)


def test_pi_balances_the_two_sides() -> None:
    p = PROBLEMS["mlp"]
    about = p.captured(**MODES["pi"]).record()["layers"]
    for layer, (A, G) in oracle("mlp").items():
        entry = about[layer]
        assert entry["lambda_A"] * entry["lambda_G"] == pytest.approx(1e-4)
        ratio = float((A.trace() / len(A)) / (G.trace() / len(G)))
        assert entry["lambda_A"] / entry["lambda_G"] == pytest.approx(ratio)
        assert entry["pi"] == pytest.approx(ratio**0.5)


# ---- Fisher-vector products ------------------------------------------------------------------------------------------


def vector_like(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: normal(*p.shape, seed=seed + i) for i, (name, p) in enumerate(trained)}


@pytest.mark.parametrize("mode, clip, policy", [*itertools.product(MODES, CLIPS, POLICIES)])
def test_the_fisher_vector_product_is_undamped_unless_asked(mode: str, clip: str, policy: str) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found, v = p.captured(model, kfac_policy=policy, **MODES[mode], **CLIPS[clip]), vector_like(model)
    plain = found.compute_fisher_vector_product(v)
    assert_layers("mlp", found.compute_fisher_vector_product(v, damped=True), expected("mlp", v, 1.0, mode, clip))
    for layer, (A, G) in oracle("mlp").items():
        module = model.get_submodule(layer)
        bias = v[f"{layer}.bias"] if has_bias(module) else None
        want = G @ as_matrix(module, v[f"{layer}.weight"], bias) @ A
        assert_layers("mlp", plain, {layer: want})


@pytest.mark.parametrize("mode, clip, policy", [*itertools.product(MODES, CLIPS, POLICIES)])
@pytest.mark.parametrize("name", ["gpt", "conv2d"])
def test_the_damped_product_undoes_the_natural_gradient(name: str, mode: str, clip: str, policy: str) -> None:
    p = PROBLEMS[name]
    model = p.model()
    found = p.captured(model, kfac_policy=policy, **MODES[mode], **CLIPS[clip])
    natural = found.compute_natural_gradient(model)
    assert_tensors(found.compute_fisher_vector_product(natural, damped=True), gradients(model), 1e-9)
    half = found.compute_natural_gradient(model, power=-0.5)
    again = found.compute_natural_gradient(model, power=-0.5, gradients=half)
    assert_tensors(again, natural, 1e-9)


def inner(u: dict[str, Tensor], v: dict[str, Tensor]) -> float:
    return float(sum((u[name] * v[name]).sum() for name in u))


@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt", "hf_gpt2", "conv2d"])
def test_the_product_is_symmetric(name: str, mode: str, damped: bool) -> None:
    p = PROBLEMS[name]
    model = p.model()
    found = p.captured(model, **MODES[mode])
    u, v = vector_like(model), vector_like(model, 100)
    left = inner(u, found.compute_fisher_vector_product(v, damped))
    assert left == pytest.approx(inner(found.compute_fisher_vector_product(u, damped), v), rel=1e-9)
    form = found.quadratic_form(v, damped)
    assert form == pytest.approx(inner(v, found.compute_fisher_vector_product(v, damped)), rel=1e-12)
    assert form > 0


@pytest.mark.parametrize("mode", MODES)
def test_norm_and_trust_region_are_measured_by_the_fisher(mode: str) -> None:
    p = PROBLEMS["gpt"]
    model = p.model()
    found = p.captured(model, **MODES[mode])
    g, natural = gradients(model), found.compute_natural_gradient(model)
    norm = found.natural_gradient_norm(model)
    assert norm == pytest.approx(inner(g, natural) ** 0.5)
    assert norm == pytest.approx(inner(natural, found.compute_fisher_vector_product(natural, damped=True)) ** 0.5)
    moved = 0.5 * found.quadratic_form(natural)
    scale = found.trust_region_scale(natural, kl=moved / 9)
    assert scale == pytest.approx(1 / 3)
    assert 0.5 * found.quadratic_form({n: t * scale for n, t in natural.items()}) == pytest.approx(moved / 9)
    assert found.trust_region_scale(natural, kl=2 * moved) == 1.0
    assert found.trust_region_scale({n: 0 * t for n, t in natural.items()}, kl=1.0) == 1.0
    with refusal("kl: expected a number above 0"):
        found.trust_region_scale(natural, kl=0.0)


# ---- what is missing, and what is not there --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("missing", ["bias", "weight"])
def test_a_missing_bias_or_weight_counts_as_zero(mode: str, missing: str) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found, v = p.captured(model, **MODES[mode]), vector_like(model)
    there = "weight" if missing == "bias" else "bias"
    part = {f"0.{there}": v[f"0.{there}"]}
    whole = {**part, f"0.{missing}": torch.zeros_like(v[f"0.{missing}"])}
    for damped in (False, True):
        got = found.compute_fisher_vector_product(part, damped)
        assert_tensors({n: got[n] for n in whole}, found.compute_fisher_vector_product(whole, damped))
        assert found.quadratic_form(part, damped) == pytest.approx(found.quadratic_form(whole, damped))
    natural = found.compute_natural_gradient(model, gradients=part)
    assert_tensors(natural, {n: found.compute_natural_gradient(model, gradients=whole)[n] for n in part})
    model.get_parameter(f"0.{missing}").grad = None
    from_model = found.compute_natural_gradient(model)
    assert f"0.{missing}" not in from_model and f"0.{there}" in from_model


@pytest.mark.parametrize("name", ["0.wieght", "4.bias", "nowhere"], ids=["misspelt", "frozen", "unknown"])
def test_an_unknown_name_is_refused(name: str) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found, v = p.captured(model), {name: normal(6)}
    for damped in (False, True):
        with refusal(f"{name}: is not a parameter with curvature"):
            found.compute_fisher_vector_product(v, damped)
    with refusal(f"{name}: is not a parameter with curvature"):
        found.compute_natural_gradient(model, gradients=v)


def test_a_tensor_of_another_shape_is_refused() -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    with refusal(r"0.weight: has shape \[7, 9\]; expected \[9, 7\]"):
        p.captured(model).compute_fisher_vector_product({"0.weight": normal(7, 9)})


def test_nothing_in_the_model_changes() -> None:
    p = PROBLEMS["gpt"]
    model = p.model()
    found = p.captured(model)
    parameters = {name: t.detach().clone() for name, t in model.named_parameters()}
    before, held = gradients(model), {name: t.grad for name, t in model.named_parameters()}
    for power in POWERS:
        natural = found.compute_natural_gradient(model, power=power)
    found.compute_fisher_vector_product(before)
    found.natural_gradient_norm(model)
    for name, t in model.named_parameters():
        assert torch.equal(t, parameters[name]) and t.grad is held[name] and torch.equal(t.grad, before[name])
        assert natural[name].data_ptr() != t.grad.data_ptr()
        assert (natural[name].dtype, natural[name].shape) == (t.grad.dtype, t.grad.shape)
    assert list(natural) == list(before)


# ---- which algebra ---------------------------------------------------------------------------------------------------


def decomposed(found: gramian.KFACNaturalGradient) -> set[bool]:
    sides = [side for about in found.record()["layers"].values() for side in about["sides"].values()]
    return {side["eigendecomposition"] != "" for side in sides if side["representation"] in ("dense", "low rank")}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["factored", "pi"])
@pytest.mark.parametrize("clip", [{"use_eigenvalue_correction": False}, {"max_condition_number": 1e9}])
def test_the_inverse_goes_by_cholesky_where_nothing_is_clipped(mode: str, policy: str, clip: dict[str, Any]) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found = p.captured(model, kfac_policy=policy, **MODES[mode], **clip)
    natural = found.compute_natural_gradient(model)
    assert decomposed(found) == {False}
    for about in found.record()["layers"].values():
        for side in about["sides"].values():
            assert [attempt["result"] for attempt in side["cholesky"]] == ["ok"]
            assert side["clip"] is None or side["clip"]["count"] == 0
    assert_layers("mlp", natural, expected("mlp", gradients(model), -1.0, mode, "off"))
    found.compute_natural_gradient(model, power=-0.5)
    assert decomposed(found) == {True}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode, clip", [("factored", "on"), ("pi", "on"), ("joint", "off"), ("joint", "on")])
def test_the_inverse_goes_by_eigenvectors_otherwise(mode: str, clip: str, policy: str) -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    found = p.captured(model, kfac_policy=policy, **MODES[mode], **CLIPS[clip])
    assert decomposed(found) == {False}
    found.compute_natural_gradient(model)
    assert decomposed(found) == {True}


def test_damping_options_that_do_not_fit_are_refused() -> None:
    for options, message in (
        ({"damping_A": 0.1}, 'damping_A: damping_mode "pi" splits damping by itself'),
        ({"damping_G": 0.1}, 'damping_G: damping_mode "pi" splits damping by itself'),
        (
            {"damping_mode": "joint", "damping_A": 0.1, "damping_G": 0.2},
            "damping_A, damping_G: joint damping has one λ",
        ),
        ({"damping": 0.0}, "damping: expected a number above 0"),
        ({"damping_mode": "both"}, "damping_mode: expected one of"),
    ):
        with refusal(message):
            kfac(**options)
    assert kfac(damping_mode="joint", damping_A=0.1, damping_G=0.1).options.joint_lambda == 0.1
