"""Preconditioning: the user's own optimizer steps along natural gradients, and everything around it goes on working."""

import copy
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gramian
from gramian.curvature.apply.natural_gradient import ready_natural_gradient
from gramian.linalg import Dense
from gramian.optim.precondition import _overwrite
from tests.curvature.problems import normal
from tests.curvature.small import Net, assert_near, assert_same, kept, loss_of, net, opened, refresh, words
from tests.curvature.uses import flat, names_of, written_out
from tests.kit.refusals import refusal, refused

OPTIMIZERS = pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    ],
    ids=["sgd", "momentum", "fused sgd", "adamw", "fused adamw"],
)


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-2, **options})


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- the step --------------------------------------------------------------------------------------------------------


@OPTIMIZERS
def test_a_step_is_the_optimizers_own_on_natural_gradients(kind: type[Any], options: dict[str, Any]) -> None:
    model, twin, kfac = net(), net(), make()
    plain = kind(twin.parameters(), **options)
    optimizer = kind(model.parameters(), **options)
    assert gramian.precondition(optimizer, model, kfac, kl_clip=None) is optimizer and type(optimizer) is kind
    for seed in range(3):
        refresh(kfac, model, words(seed=seed))
        exact, natural = (
            kfac.compute_natural_gradient(model),
            ready_natural_gradient(kfac.state, model, _gradients(model)),
        )
        for name, p in twin.named_parameters():
            assert_near(natural[name], exact[name], 1e-4)
            p.grad = torch.empty_like(p).copy_(natural[name])
        optimizer.step()
        plain.step()
        assert_same(_parameters(model), _parameters(twin))
        assert_same(_gradients(model), natural)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()


def test_optimizers_that_need_a_closure_are_refused_at_once() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any, /, scale: float = 1.0) -> Any:
            return super().step(closure)

    model, kfac = net(), make()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which wraps step
        with refusal(f"^optimizer: {type(optimizer).__name__} .* in a closure") as no:
            gramian.precondition(optimizer, model, kfac)
        assert "\n" not in str(no.value)
    for kind in (torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD):
        gramian.precondition(kind(model.parameters()), model, kfac)


def test_steps_between_refreshes_use_the_factors_there_are() -> None:
    model, kfac = net(), make(update_freq=3)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac, kl_clip=None)
    for seed in range(3):
        refresh(kfac, model, words(seed=seed))
        before, natural = _parameters(model), kfac.compute_natural_gradient(model)
        optimizer.step()
        for name, p in model.named_parameters():
            assert_near(before[name] - p, 0.1 * natural[name], 1e-4)
    assert kfac.refreshes == 1


def test_preconditioned_steps_descend() -> None:
    model, kfac, batch = net(), make(), words()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.5), model, kfac, kl_clip=0.05)
    losses = []
    for _ in range(15):
        refresh(kfac, model, batch)
        losses.append(float(loss_of(model, batch).detach()))
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_natural_gradients_lie_in_memory_as_gradients_do(kind: type[Any]) -> None:
    # A fused step reads the memory of a gradient, whatever its strides say.
    model, kfac = net(), make()
    refresh(kfac, model)
    natural, start = kfac.compute_natural_gradient(model), copy.deepcopy(model)
    assert all(natural[name].stride() == p.grad.stride() for name, p in model.named_parameters())
    vector = {name: p.grad for name, p in model.named_parameters()}
    product = kfac.compute_fisher_vector_product(vector)
    assert all(product[name].stride() == p.grad.stride() for name, p in model.named_parameters())
    stepped = []
    for fused in (False, True):
        twin = copy.deepcopy(start)
        for name, p in twin.named_parameters():
            p.grad = torch.empty_like(p).copy_(natural[name])
        kind(twin.parameters(), lr=0.1, fused=fused).step()
        stepped.append(_parameters(twin))
    for name, p in stepped[0].items():
        assert_near(stepped[1][name], p, 1e-6)


# ---- around it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
def test_schedulers_go_on_working(before: bool) -> None:
    model, kfac = net(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if before else None
    gramian.precondition(optimizer, model, kfac, kl_clip=None)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        refresh(kfac, model, words(seed=step))
        start, natural = _parameters(model), kfac.compute_natural_gradient(model)
        optimizer.step()
        scheduler.step()
        for name, p in model.named_parameters():
            assert_near(start[name] - p, 0.4 * 0.5**step * natural[name], 1e-4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@OPTIMIZERS
def test_a_state_dict_goes_to_another_preconditioned_optimizer_and_back(
    kind: type[Any], options: dict[str, Any]
) -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(kind(model.parameters(), **options), model, kfac)
    refresh(kfac, model)
    optimizer.step()
    other_model, other_kfac = copy.deepcopy(model), make()
    other = gramian.precondition(kind(other_model.parameters(), **options), other_model, other_kfac)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_kfac.load_state_dict(kfac.state_dict(), other_model)
    for one, its, stepping in ((model, kfac, optimizer), (other_model, other_kfac, other)):
        refresh(its, one, words(seed=5))
        stepping.step()
    assert_same(_parameters(other_model), _parameters(model))


def test_the_users_own_hooks_stay_in_order() -> None:
    model, kfac, order = net(), make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: order.append(("before", float(model.q.weight.grad.norm()))))
    gramian.precondition(optimizer, model, kfac)
    optimizer.register_step_post_hook(lambda *_: order.append(("after", float(model.q.weight.grad.norm()))))
    refresh(kfac, model)
    raw = float(model.q.weight.grad.norm())
    optimizer.step()
    assert [name for name, _ in order] == ["before", "after"]
    assert order[0][1] == raw != order[1][1]


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def _scaled_step(
    model: Net, kfac: gramian.KFACNaturalGradient, optimizer: Any, scaler: Any, batch: Any, unscale: bool, bad: bool
) -> None:
    model.zero_grad()
    with opened(kfac, model, batch, loss_scale=scaler):
        scaler.scale(loss_of(model, batch) * (float("inf") if bad else 1.0)).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer)
    scaler.update()


@OPTIMIZERS
@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscaled by the user"])
@pytest.mark.parametrize("kl_clip", [None, 1e-4])
def test_a_grad_scaler_changes_nothing(
    kl_clip: float | None, unscale: bool, kind: type[Any], options: dict[str, Any]
) -> None:
    found = []
    for scaled in (False, True):
        model, kfac = net(), make()
        optimizer = gramian.precondition(kind(model.parameters(), **options), model, kfac, kl_clip=kl_clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled, growth_interval=2)
        for seed in range(3):
            _scaled_step(model, kfac, optimizer, scaler, words(seed=seed), unscale and scaled, bad=False)
        assert kfac.refreshes == 3 and scaler.get_scale() == (2.0**11 if scaled else 1.0)
        found.append((_parameters(model), kept(kfac)))
    start = _parameters(net())
    for name, p in found[0][0].items():
        assert_near(found[1][0][name] - start[name], p - start[name], 1e-4)
    if options == {"lr": 0.1}:  # a scale is a power of two, so nothing is rounded otherwise
        assert_same(found[1][1], found[0][1])


@OPTIMIZERS
def test_a_batch_that_overflows_is_skipped_by_the_scaler_and_dropped_by_the_curvature(
    kind: type[Any], options: dict[str, Any]
) -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(kind(model.parameters(), **options), model, kfac)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _scaled_step(model, kfac, optimizer, scaler, words(), False, bad=False)
    before, factors = _parameters(model), kept(kfac)
    _scaled_step(model, kfac, optimizer, scaler, words(seed=2), False, bad=True)
    assert_same(_parameters(model), before)
    assert_same(kept(kfac), factors)
    assert len(kfac.dropped) == 1 and scaler.get_scale() == 2.0**9
    _scaled_step(model, kfac, optimizer, scaler, words(seed=3), False, bad=False)
    assert kfac.refreshes == 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not torch.equal(model.q.weight, before["q.weight"])


# ---- gradients are overwritten ---------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_all_dtypes_and_layouts_are_overwritten_together_as_one_by_one(scaled: bool) -> None:
    """Bit for bit; with operations for every kind of tensor and not for every tensor."""
    scale = torch.tensor(0.1234567890123, dtype=torch.float64) if scaled else None
    gradients, natural = {}, {}
    dtypes = [(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    for number, (to, given) in enumerate([*dtypes, (torch.float32, torch.float64)] * 3):
        drawn = normal(7, 6, seed=number).to(given)
        one, two, three, four = (drawn.clone() for _ in range(4))  # each is the step's own
        for layout, value in {"whole": one, "part": two[:, :5], "turned": three.mT, "vector": four[:, 0]}.items():
            natural[f"{number}.{layout}"] = value
            gradients[f"{number}.{layout}"] = torch.zeros(value.shape, dtype=to)
    expected = {name: torch.empty_like(t) for name, t in gradients.items()}
    for name, t in expected.items():
        t.copy_(natural[name] if scale is None else natural[name] * scale)
    with _Operations() as seen:
        _overwrite(gradients, natural, scale)
    assert_same(gradients, expected)
    assert seen.count["_foreach_copy_"] <= 10 and not seen.count["copy_"] and not seen.count["mul"]


# ---- trust region ----------------------------------------------------------------------------------------------------


def _moved(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["pi", "joint"])
@pytest.mark.parametrize("rate", [0.1, 5.0])
@pytest.mark.parametrize("kl_clip", [1e-8, 1e-3, 0.1, 1e3])
def test_the_clip_bounds_the_step_measured_by_the_damped_fisher_exactly(kl_clip: float, rate: float, mode: str) -> None:
    model, kfac = net(dtype=torch.float64), make(damping_mode=mode)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=rate), model, kfac, kl_clip=kl_clip)
    refresh(kfac, model)
    before, natural, gradients = _parameters(model), kfac.compute_natural_gradient(model), _gradients(model)
    unclipped = 0.5 * rate**2 * sum(float((gradients[n] * natural[n]).sum()) for n in natural)
    optimizer.step()
    step = _moved(model, before)
    # ½ δᵀ(F+λ)δ, through the product and not through the inverse.
    assert 0.5 * kfac.quadratic_form(step, damped=True) == pytest.approx(min(kl_clip, unclipped), rel=1e-7)
    scale = min(1.0, math.sqrt(kl_clip / unclipped))
    for name in natural:
        assert_near(step[name], -rate * scale * natural[name], 1e-9)


def _damped_fisher(kfac: gramian.KFACNaturalGradient, model: nn.Module) -> Tensor:
    """F + damping [P, P], every side written out in float64."""
    damped = []
    for block in kfac.kfac_factors.values():
        damping = block.damping
        assert damping is not None
        shift = {"G": 0.0, "A": 0.0} if damping.joint else {"G": damping.lambda_G, "A": damping.lambda_A}
        G, A = (
            None if factor is None else Dense.of(factor.to_dense() + shift[side] * torch.eye(factor.dim).double())
            for side, factor in (("G", block.G), ("A", block.A))
        )
        assert G is not None
        damped.append(block.with_factors(A, G, block.facts))
    F = written_out(SimpleNamespace(kfac_factors={block.spec.name: block for block in damped}), model)
    return F + (kfac.options.damping * torch.eye(len(F)) if kfac.options.damping_mode == "joint" else 0.0)


@pytest.mark.parametrize("mode", ["factored", "pi", "joint"])
@pytest.mark.parametrize("rates", ["scheduled", "scheduled before", "set"])
@pytest.mark.parametrize("kl_clip", [1e-4, 1e3], ids=["binding", "not binding"])
def test_the_trust_region_follows_the_schedule(kl_clip: float, rates: str, mode: str) -> None:
    """½ δᵀ(F + damping)δ of a step δ at the rate lr is (lr/lr₀)² min(kl_clip, KL) for a schedule that starts from lr₀."""
    model, kfac, first = net(dtype=torch.float64), make(damping_mode=mode), 4.0
    optimizer = torch.optim.SGD(model.parameters(), lr=first)
    scheduler = None if rates == "set" else torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if rates == "scheduled before":  # as of a run that is resumed
        optimizer.param_groups[0]["lr"] *= 0.5
    gramian.precondition(optimizer, model, kfac, kl_clip=kl_clip)
    for step in range(4):
        refresh(kfac, model, words(seed=step))
        F, names, before = _damped_fisher(kfac, model), names_of(model), _parameters(model)
        gradient, rate = flat(_gradients(model), names), optimizer.param_groups[0]["lr"]
        unclipped = 0.5 * first**2 * float(gradient @ torch.linalg.solve(F, gradient))
        optimizer.step()
        moved = flat(_moved(model, before), names)
        assert (unclipped > kl_clip) == (kl_clip < 1)
        assert 0.5 * float(moved @ F @ moved) == pytest.approx((rate / first) ** 2 * min(kl_clip, unclipped), rel=1e-7)
        assert rate == first * 0.5 ** (step + (rates == "scheduled before"))
        if scheduler is None:
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            scheduler.step()


def test_groups_with_their_own_rates_are_bounded_together() -> None:
    model, kfac = net(dtype=torch.float64), make()
    layers = [[*model.table.parameters(), *model.norm.parameters(), *model.fc.parameters()], []]
    layers[1] = [p for p in model.parameters() if all(p is not q for q in layers[0])]
    groups = [{"params": layers[0], "lr": 3.0}, {"params": layers[1], "lr": torch.tensor(0.2, dtype=torch.float64)}]
    optimizer = gramian.precondition(torch.optim.SGD(groups, lr=1.0), model, kfac, kl_clip=1e-3)
    refresh(kfac, model)
    before, natural = _parameters(model), kfac.compute_natural_gradient(model)
    optimizer.step()
    step = _moved(model, before)
    assert 0.5 * kfac.quadratic_form(step, damped=True) == pytest.approx(1e-3, rel=1e-7)
    ids = {id(p) for p in layers[0]}
    scales = {
        round(
            float(-(step[name] * natural[name]).sum() / natural[name].square().sum()) / (3.0 if id(p) in ids else 0.2),
            9,
        )
        for name, p in model.named_parameters()
    }
    assert len(scales) == 1 and scales.pop() < 1


@pytest.mark.parametrize("mode", ["pi", "joint"])
def test_a_memory_budget_that_changes_no_factor_changes_no_step(mode: str) -> None:
    """Also where the parameters of a layer have rates of their own: the trust region takes the largest of a block."""
    ends = []
    for budget in (None, "1GB"):
        model, kfac = net(dtype=torch.float64), make(damping_mode=mode, memory_budget=budget)
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        rest = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        optimizer = torch.optim.SGD([{"params": biases, "lr": 0.01}, {"params": rest, "lr": 1.0}])
        gramian.precondition(optimizer, model, kfac)
        for seed in range(2):
            refresh(kfac, model, words(seed=seed))
            optimizer.step()
            assert float(kfac.state.trust_region) < 0.9
        ends.append(_parameters(model))
    for name, p in ends[0].items():
        assert_near(ends[1][name], p, 1e-10)
    assert set(kfac.record()["operators"]["exact"]) == set(kfac.kfac_factors)


def test_layers_that_the_optimizer_does_not_have_are_outside_the_trust_region() -> None:
    """The q, k and v of one shape are multiplied together; k and v stay as they are, and count for nothing."""
    model, kfac = net(dtype=torch.float64), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.q.parameters(), lr=50.0), model, kfac, kl_clip=1e-3)
    refresh(kfac, model)
    before = _parameters(model)
    optimizer.step()
    step = _moved(model, before)
    assert 0.5 * kfac.quadratic_form(step, damped=True) == pytest.approx(1e-3, rel=1e-7)
    assert not any(bool(moved.any()) for name, moved in step.items() if not name.startswith("q."))


def test_without_a_bound_a_step_may_be_as_long_as_it_is() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=50.0), model, kfac, kl_clip=None)
    refresh(kfac, model)
    before, natural = _parameters(model), kfac.compute_natural_gradient(model)
    optimizer.step()
    assert_near(_moved(model, before)["fc.weight"], -50.0 * natural["fc.weight"], 1e-5)


def test_a_rate_that_grows_from_zero_has_no_bound_and_is_refused() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.0), model, kfac, kl_clip=1e-3)
    refresh(kfac, model)
    optimizer.step()  # a rate of 0 moves nothing
    optimizer.param_groups[0]["lr"] = 0.1
    before, gradients = _parameters(model), _gradients(model)
    with refused("kl_clip: bounds no step of param_groups[0]", "starts from lr 0", "initial_lr"):
        optimizer.step()
    assert_same(_parameters(model), before)
    assert_same(_gradients(model), gradients)


def test_a_gradient_of_zero_is_a_step_of_zero() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1.0), model, kfac, kl_clip=1e-3)
    refresh(kfac, model)
    for p in model.parameters():
        p.grad.zero_()
    before = _parameters(model)
    optimizer.step()
    assert_same(_parameters(model), before)


# ---- whose parameters ------------------------------------------------------------------------------------------------


def test_parameters_outside_the_optimizer_are_not_touched() -> None:
    model, kfac = net(dtype=torch.float64), make()
    chosen = [model.q.weight, model.fc.weight]  # fc's bias is not among them
    optimizer = gramian.precondition(torch.optim.SGD(chosen, lr=1.0), model, kfac, kl_clip=None)
    refresh(kfac, model)
    gradients, before = _gradients(model), _parameters(model)
    given = {name: gradients[name] for name in ("q.weight", "fc.weight")}
    natural = kfac.compute_natural_gradient(model, gradients=given)
    optimizer.step()
    for name, p in model.named_parameters():
        if name in given:
            assert_near(p.grad, natural[name], 1e-12)
        else:
            assert torch.equal(p.grad, gradients[name]) and torch.equal(p, before[name]), name


def test_parameters_of_another_model_in_the_same_optimizer_are_stepped_as_they_are() -> None:
    model, other, kfac = net(), nn.Linear(3, 2), make()
    parameters = [*model.parameters(), *other.parameters()]
    optimizer = gramian.precondition(torch.optim.SGD(parameters, lr=1.0), model, kfac)
    refresh(kfac, model)
    other(torch.ones(1, 3)).sum().backward()
    gradient, before = other.weight.grad.clone(), other.weight.detach().clone()
    optimizer.step()
    assert torch.equal(other.weight.grad, gradient) and torch.equal(other.weight, before - gradient)


def test_a_tied_parameter_is_preconditioned_once() -> None:
    model, kfac = net(tied=True, dtype=torch.float64), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1.0), model, kfac, kl_clip=None)
    refresh(kfac, model)
    natural, before = kfac.compute_natural_gradient(model), _parameters(model)
    assert set(natural) == set(before) and "head.weight" not in natural
    optimizer.step()
    assert model.head.weight is model.table.weight
    assert_near(before["table.weight"] - model.head.weight, natural["table.weight"], 1e-12)


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    model, kfac = net(), make()
    model.v.weight.requires_grad_(False)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1.0), model, kfac)
    refresh(kfac, model)
    model.k.weight.grad = None
    before = _parameters(model)
    optimizer.step()
    assert torch.equal(model.v.weight, before["v.weight"]) and torch.equal(model.k.weight, before["k.weight"])
    assert not torch.equal(model.q.weight, before["q.weight"])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_optimizer_is_preconditioned_once() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    for other in (kfac, make()):
        with refused("optimizer", "already", "expected"):
            gramian.precondition(optimizer, model, other)
    gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)  # another one may be


@pytest.mark.parametrize("wrong", [None, "sgd", torch.optim.SGD, net()], ids=["None", "name", "class", "model"])
def test_an_optimizer_of_another_type_is_refused(wrong: Any) -> None:
    with refused("optimizer", "expected a torch.optim.Optimizer"):
        gramian.precondition(wrong, net(), make())


@pytest.mark.parametrize("wrong", [0, 0.0, -1e-3, float("nan"), True, "1e-3"], ids=str)
def test_an_invalid_bound_is_refused_and_takes_nothing(wrong: Any) -> None:
    model, kfac = net(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("kl_clip", "expected a number above 0 or None", repr(wrong)):
        gramian.precondition(optimizer, model, kfac, kl_clip=wrong)
    gramian.precondition(optimizer, model, kfac, kl_clip=1e-3)


def test_a_step_without_factors_is_one_line_and_moves_nothing() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    loss_of(model, words()).backward()
    gradients, before = _gradients(model), _parameters(model)
    with refused("kfac", "no factors yet", "expected a capture"):
        optimizer.step()
    assert_same(_gradients(model), gradients)
    assert_same(_parameters(model), before)
    refresh(kfac, model)
    optimizer.step()


def test_a_step_without_gradients_does_nothing() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    before = _parameters(model)
    optimizer.step()
    assert_same(_parameters(model), before)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_which_would_go_unpreconditioned_is_refused(by_name: bool) -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)

    def closure() -> Tensor:
        refresh(kfac, model)
        return loss_of(model, words())

    before = _parameters(model)
    with refused("closure", "expected step() after a backward"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert_same(_parameters(model), before)


def test_a_model_that_changed_is_noticed_by_the_step() -> None:
    model, kfac = net(), make()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    refresh(kfac, model)
    model.fc.bias.requires_grad_(False)
    before = _parameters(model)
    with refused("fc", "expected its bias as at the capture"):
        optimizer.step()
    assert_same(_parameters(model), before)
