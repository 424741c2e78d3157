"""The EWC penalty against δᵀFδ with F written out."""

import pytest
import torch
from torch import nn

from gramian.curvature import EWCPenalty
from tests.curvature.problems import TOLERANCE, assert_close, kfac, normal, seeded
from tests.curvature.small import loss_of, words
from tests.curvature.uses import KINDS, TASKS, flat, moved, names_of, network, task, written_out
from tests.kit.refusals import refused
from tests.oracles import dense_uses

pytestmark = pytest.mark.oracle
STRENGTHS = (3.0, 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_of_two_tasks_and_its_gradient_are_those_of_the_whole_matrix(kind: str) -> None:
    model = network(kind)
    names, penalty, dense = names_of(model), EWCPenalty(), []
    for seed, strength in zip(TASKS, STRENGTHS, strict=True):
        found = task(model, seed, kind)
        penalty.add_task(found, model, strength)
        dense.append((written_out(found, model), flat(model, names), strength))
        moved(model, seed)
    want, gradient = dense_uses.ewc(dense, flat(model, names))
    got = penalty(model)
    assert got.shape == () and got.dtype == torch.float64
    assert got.item() == pytest.approx(want, rel=TOLERANCE)
    (2.0 * got).backward()
    assert_close(flat({n: p.grad for n, p in model.named_parameters()}, names), 2 * gradient)
    assert penalty.free_parameters(model) == []


@pytest.mark.parametrize("mode", ["pi", "factored", "joint"])
def test_damping_takes_no_part(mode: str) -> None:
    model = network()
    found = task(model, TASKS[0], damping_mode=mode, damping=0.3)
    penalty = EWCPenalty()
    penalty.add_task(found, model)
    assert penalty(model).item() == 0.0
    before, names = flat(model, names_of(model)), names_of(model)
    moved(model, 5)
    want, _ = dense_uses.ewc([(written_out(found, model), before, 1.0)], flat(model, names))
    assert penalty(model).item() == pytest.approx(want, rel=TOLERANCE)


def test_the_trace_has_delta_between_both_sides() -> None:
    """tr((Gδ)(δᵀA)) does not fit unless o = m, and is another number where it does: right is tr(δᵀGδA)."""
    model = seeded(lambda: nn.Linear(6, 6, bias=False))
    x = normal(9, 6)
    found = kfac(kfac_policy="small_only")
    with found.capture(model, loss_reduction="sum", num_terms=9):
        model(x).sin().sum().backward()
    penalty = EWCPenalty()
    penalty.add_task(found, model)
    delta = normal(6, 6, seed=3)
    with torch.no_grad():
        model.weight += delta
    block = found.kfac_factors["model"]
    assert block.A is not None
    A, G = block.A.to_dense(), block.G.to_dense()
    right = 0.5 * float(torch.trace(delta.mT @ G @ delta @ A))
    trap = 0.5 * float(torch.trace((G @ delta) @ (delta.mT @ A)))
    assert abs(trap - right) > 0.01 * right
    assert penalty(model).item() == pytest.approx(right, rel=TOLERANCE)


def test_a_step_of_the_user_sees_loss_and_penalty_together() -> None:
    model = network()
    penalty = EWCPenalty()
    found = task(model, TASKS[0])
    penalty.add_task(found, model, 2.0)
    moved(model, 5)
    batch = words(seed=3)
    plain = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    held = torch.autograd.grad(penalty(model), list(model.parameters()))
    (loss_of(model, batch) + penalty(model)).backward()
    for p, one, other in zip(model.parameters(), plain, held, strict=True):
        torch.testing.assert_close(p.grad, one + other, rtol=1e-12, atol=1e-14)


def test_a_bfloat16_model_is_held_as_well_as_its_parameters_can_tell() -> None:
    model = network()
    found = task(model, TASKS[0])
    model.bfloat16()
    penalty, names = EWCPenalty(), names_of(model)
    penalty.add_task(found, model)
    before = flat(model, names)
    moved(model, 5)
    want, gradient = dense_uses.ewc([(written_out(found, model), before, 1.0)], flat(model, names))
    got = penalty(model)
    got.backward()
    assert got.dtype == torch.float32 and got.item() == pytest.approx(want, rel=1e-5)
    assert_close(flat({n: p.grad for n, p in model.named_parameters()}, names), gradient, 1e-2)


def test_parameters_without_curvature_are_named_as_free() -> None:
    model = network()
    penalty = EWCPenalty()
    penalty.add_task(task(model, TASKS[0]), model)
    model.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert penalty.free_parameters(model) == ["extra"]
    assert penalty(model).item() == 0.0


def test_invalid_arguments_of_a_penalty_are_refused_in_one_line() -> None:
    model, penalty = network(), EWCPenalty()
    with refused("tasks:", "expected add_task"):
        penalty(model)
    with refused("kfac:", "expected"):
        penalty.add_task(kfac(), model)
    with refused("kfac:", "KFACNaturalGradient"):
        penalty.add_task("fisher", model)  # type: ignore[arg-type]
    found = task(model, TASKS[0])
    with refused("strength:", "expected"):
        penalty.add_task(found, model, -1.0)
    with refused("model:", "table.weight", "expected"):
        penalty.add_task(found, nn.Linear(2, 2))
    wider = network()
    wider.fc.bias = nn.Parameter(wider.fc.bias.detach().repeat(2))
    with refused("model:", "fc.bias", "expected"):
        penalty.add_task(found, wider)
    penalty.add_task(found, model)
    with refused("model:", "fc.bias", "expected"):
        penalty(wider)
    loaded = task(model, TASKS[0])
    penalty.add_task(loaded, model)
    loaded.load_state_dict(task(model, TASKS[1]).state_dict())
    with refused("kfac:", "loaded", "expected"):
        penalty(model)
    penalty.tasks.pop()
    with found.capture(model, num_terms=24):
        loss_of(model, words()).backward()
    with refused("kfac:", "refreshed", "expected"):
        penalty(model)
