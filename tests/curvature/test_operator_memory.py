"""The operators that optimizers keep of K-FAC's factors: planned bytes against the tensors that a run then has."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature.apply.ready_operators import ReadyOperators, SideProducts
from gramian.curvature.apply.ready_sides import THIN
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.models import GPT
from gramian.train.build.build_model import build_model
from gramian.train.build.build_optimizer import build_curvature, build_optimizer
from gramian.train.build.memory_needs import needs_of, plan_run_curvature
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.precision import Precision
from tests.curvature.planned import CASES, ODD, refresh
from tests.kit.memory import measured
from tests.kit.refusals import refused

OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "exact head": {"kfac_true_fisher_head": True},
    "averaged": {"ema_decay": 0.9},
    "few tokens": {"max_tokens": 9},
    "joint": {"damping_mode": "joint"},
    "ekfac": {"damping_mode": "joint", "ekfac": True},
    "budget": {"memory_budget": 10**8},
    "fp64": {"dtype": torch.float64},
}


def tensors_of(operators: ReadyOperators) -> list[Tensor]:
    """Every tensor of the operators, found without their own count."""
    sides = [side for group in operators.groups for side in (group.G, group.A) if isinstance(side, SideProducts)]
    found = [side._scale_BN for side in sides if side._scale_BN is not None]
    return found + [operand.stored for side in sides for operand in side._operands]


def preconditioned(
    case: str, options: dict[str, Any], **more: Any
) -> tuple[CurvaturePlan, gramian.KFACNaturalGradient]:
    """A plan, and the K-FAC object after steps of a preconditioned optimizer, whose memory is within the plan for float64."""
    problem, dtype = {**CASES, **ODD}[case], options.get("dtype", torch.float32)
    torch.manual_seed(0)
    model, inputs = problem.build().to(dtype), problem.inputs()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    given = {name: value for name, value in options.items() if name != "dtype"}
    kfac = gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-2, **given})
    plan = kfac.plan(model, inputs=inputs, operators="inverse", **more)
    bound = kfac.plan(model, inputs=inputs, operators="inverse")
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1e-4), model, kfac)
    for _ in range(3 if "ema_decay" in options else 1):
        refresh(kfac, model, inputs, problem.classes)
        with measured() as step:
            optimizer.step()
    total = bound.totals["cpu"]
    assert total.ready >= plan.totals["cpu"].ready
    if "memory_budget" not in options:
        assert step.peak <= total.peak - total.settled, case
    return plan, kfac


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["gpt", "shared inputs", "tied", "conv", "mlp"])
def test_ready_operators_take_what_is_planned(case: str, options: str) -> None:
    """Where κ lets float32 do, as in these models, a plan for float32 is exact, and that for float64 a bound."""
    algebra = torch.float64 if options == "averaged" else torch.float32
    plan, kfac = preconditioned(case, OPTIONS[options], algebra=algebra)
    ready, planned = kfac.state.ready, plan.totals["cpu"].ready
    assert ready is not None
    held = sum(t.nbytes for t in tensors_of(ready))
    assert held == kfac.record()["operators"]["bytes"]
    if options == "averaged":  # a bound of every rank that the average passes through
        assert held <= planned
    else:
        assert held == planned == sum(row.bytes["ready"]["cpu"] for row in plan.rows)
        assert held or options in ("joint", "ekfac", "budget")


@pytest.mark.parametrize("algebra", [torch.float32, torch.float64])
def test_float32_factors_are_planned_in_the_dtype_that_is_given(algebra: torch.dtype) -> None:
    """Which one it is depends on condition numbers: float64 is the bound, float32 what a well-conditioned model takes."""
    plan, kfac = preconditioned("mlp", {"woodbury_dtype": "fp32", "damping": 1.0}, algebra=algebra)
    assert kfac.state.ready is not None
    assert {t.dtype for t in tensors_of(kfac.state.ready)} == {torch.float32}
    held = sum(t.nbytes for t in tensors_of(kfac.state.ready))
    assert plan.totals["cpu"].ready == held * (algebra.itemsize // 4)


def test_a_plan_for_any_number_of_tokens_bounds_every_number() -> None:
    """Two thin products of rank ¾·n take more than a matrix, so the bound is not at an end of the range."""
    model = nn.Linear(64, 64, bias=False)
    kfac = gramian.KFACNaturalGradient(max_tokens=64)
    most = kfac.plan(model, operators="inverse").totals["cpu"].ready
    each = {n: kfac.plan(model, tokens=n, operators="inverse").totals["cpu"].ready for n in range(1, 80)}
    assert max(each.values()) == each[int(THIN * 64)] == most > each[79]
    averaged = gramian.KFACNaturalGradient(max_tokens=64, ema_decay=0.5)
    assert averaged.plan(model, tokens=5, operators="inverse").totals["cpu"].ready >= most


def test_half_precision_on_a_gpu_is_planned_as_pairs_of_bfloat16() -> None:
    """Whether bfloat16, TF32 or pairs of bfloat16 do is up to condition numbers; pairs take most."""
    model = nn.Linear(64, 128, bias=False)
    here, there = (
        gramian.KFACNaturalGradient().plan(model, tokens=200, operators="inverse", device=device).totals[device].ready
        for device in ("cpu", "cuda")
    )
    assert here == 4 * (64**2 + 128**2) and there == 6 * (64**2 + 128**2)


@pytest.mark.parametrize("operators", ["inverse", "root"])
def test_a_step_with_operators_that_are_there_stays_within_the_plan(operators: str) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4)), nn.Linear(96, 2, bias=False))
    x, y = torch.randn(300, 96), torch.randint(2, (300,))
    optimizer: torch.optim.Optimizer
    if operators == "root":
        optimizer = gramian.optim.KFAC(model)
        kfac = optimizer.kfac
    else:
        kfac = gramian.KFACNaturalGradient(update_freq=9, woodbury_dtype="fp32", damping=1.0)
        optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1e-4), model, kfac)
    total = kfac.plan(model, tokens=300, operators=operators, algebra=torch.float32).totals["cpu"]
    with kfac.capture(model, num_terms=300):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with measured() as step:
        optimizer.step()
    assert step.peak <= total.stepping <= 2 * step.peak


def test_factors_on_another_device_have_no_operators() -> None:
    model = nn.Linear(64, 128, bias=False)
    kfac = gramian.KFACNaturalGradient(woodbury_store_device="cpu")
    plan = kfac.plan(model, tokens=200, operators="inverse", device="cuda")
    assert [total.ready for total in plan.totals.values()] == [0, 0]


def test_unknown_operators_are_refused() -> None:
    with refused("operators: expected", "root", "'cholesky'"):
        gramian.KFACNaturalGradient().plan(nn.Linear(3, 3), tokens=4, operators="cholesky")


# ---- runs ------------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "kfac": {"optimizer": {"kind": "kfac"}},
    "kfac, tied": {"optimizer": {"kind": "kfac"}, "model": {"tied": True}},
    "kfac, fp64": {"optimizer": {"kind": "kfac"}},
    "goose": {"optimizer": {"kind": "kfac"}, "model": {"kind": "goose"}},
    "adamw": {"kfac": {"update_freq": 2}},
    "sgd, joint": {"kfac": {"update_freq": 2, "damping_mode": "joint"}, "optimizer": {"kind": "sgd", "momentum": 0.9}},
}


def config_of(run: dict[str, Any]) -> Config:
    model = {"layers": 2, "width": 32, "heads": 2, **run.get("model", {})}
    return parse_config({**run, "model": model, "data": {"length": 12, "batch": 5}})


SLOWER = ("goose", "sgd, joint", "kfac, fp64")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOWER else []) for n in RUNS])
def test_the_state_of_a_run_is_what_its_config_plans(name: str) -> None:
    """Momentum, moments and operators: all tensors that an optimizer has after three steps."""
    config = config_of(RUNS[name])
    kind = "fp64" if "fp64" in name else "fp32"
    needs = needs_of(config, 257, kind, "cpu")
    numbers = Precision(kind, "cpu")
    plan = plan_run_curvature(config, 257, numbers, "cpu", 1)
    model = build_model(config, 257).to(numbers.weights)
    optimizer = build_optimizer(model, config.optimizer, torch.device("cpu"), config.kfac)
    x, y = torch.randint(257, (5, 12)), torch.randint(257, (5, 12))
    own = isinstance(optimizer, gramian.optim.KFAC)
    if isinstance(optimizer, gramian.optim.KFAC):
        kfac = optimizer.kfac
    else:
        found = build_curvature(config, model)
        assert found is not None
        kfac = found
        gramian.precondition(optimizer, model, kfac)
    for _ in range(3):
        optimizer.zero_grad()
        with kfac.capture(model, num_terms=60) if not own else optimizer.capture(num_terms=60):  # type: ignore[attr-defined]
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    assert sum(t.nbytes for t in states) == needs.state
    if isinstance(optimizer, gramian.optim.KFAC):
        operators = [p for group in optimizer._steps.groups for p in (group.P, group.D)]
        planned_on_gpu = plan_run_curvature(config, 257, numbers, "cuda", 1).totals["cuda"].ready
        half = sum(p.numel() * (8 if p.dtype == torch.float64 else 2) for p in operators)  # float16, float64 as it is
        assert planned_on_gpu == half
    else:
        assert kfac.state.ready is not None
        operators = tensors_of(kfac.state.ready)
    assert sum(t.nbytes for t in operators) == plan.totals["cpu"].ready > 0


@pytest.mark.parametrize("kind", ["fp32", pytest.param("fp64", marks=pytest.mark.full)])
def test_steps_of_the_optimizer_stay_within_the_plan(kind: Any) -> None:
    """The refresh's factors, both generations of them, roots in the making, and the step's matrices."""
    config = config_of({"optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 1}})
    numbers = Precision(kind, "cpu")
    total = plan_run_curvature(config, 257, numbers, "cpu", 1).totals["cpu"]
    model = build_model(config, 257).to(numbers.weights)
    optimizer = gramian.optim.KFAC(model, update_freq=1)
    x, y = torch.randint(257, (5, 12)), torch.randint(257, (5, 12))
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.capture(num_terms=60):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        with measured() as found:
            optimizer.step()
        if step:  # the first one makes momenta too
            assert found.peak <= total.peak - total.settled
            assert total.ready <= found.peak


def test_roots_have_the_widths_of_the_weight() -> None:
    """P has no coordinate for the bias, and a diagonal side is a vector."""
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))
    optimizer = gramian.optim.KFAC(model)
    plan = optimizer.kfac.plan(model, tokens=30, operators="root")
    assert [row.layer for row in plan.rows] == ["0", "2", "4"]  # the first refresh has factors of the output layer too
    assert [row.bytes["ready"]["cpu"] for row in plan.rows] == [4 * (24**2 + 40), 8 * 40**2, 0]
    assert optimizer.kfac.plan(model, tokens=30, operators="root", device="cuda").totals["cuda"].ready == (
        2 * (24**2 + 40) + 4 * 40**2
    )


def test_the_planned_gpt_is_the_one_that_runs() -> None:
    """A guard of the tests above: the model of a config is the reference GPT, with a head that is not whitened."""
    config = config_of(RUNS["kfac"])
    model = build_model(config, 257)
    assert isinstance(model, GPT)
    needs = needs_of(config, 257, "fp32", "cpu")
    hidden = 2 * (3 + 1 + 4 + 4) * 32 * 32
    assert needs.whitened == hidden
    assert needs.state == replace(needs, optimizer="adamw", whitened=0).state - 4 * hidden
