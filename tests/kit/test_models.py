"""Every case of the table is what its docstring says: seeded, and a loss of independent terms."""

import pytest
import torch

from tests.kit.models import CASES, Case

pytestmark = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _batch(case: Case, samples: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return case.make_batch(samples, dtype, torch.Generator().manual_seed(1))


def _tolerance(case: Case) -> float:
    return 1e-6 if case.computes_in_float32 else 1e-12


def test_construction_is_seeded_and_leaves_the_random_state(case: Case) -> None:
    before = torch.get_rng_state()
    first, second = case.make(torch.float64), case.make(torch.float64)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_float32_and_float64_are_the_same_problem(case: Case) -> None:
    losses = [
        case.loss(case.make(dtype), *_batch(case, 3, dtype), reduction="mean")
        for dtype in (torch.float32, torch.float64)
    ]
    assert losses[1].dtype == torch.float64
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=0)


def test_mean_is_the_sum_divided_by_the_batch(case: Case) -> None:
    model, batch = case.make(torch.float64), _batch(case, 5)
    mean, total = (case.loss(model, *batch, reduction=reduction) for reduction in ("mean", "sum"))
    torch.testing.assert_close(mean * 5, total, rtol=1e-12, atol=0)


def test_losses_of_single_samples_sum_to_the_loss_of_the_batch(case: Case) -> None:
    model, batch = case.make(torch.float64), _batch(case, 5)
    singles = [case.loss(model, *(t[i : i + 1] for t in batch), reduction="mean") for i in range(5)]
    torch.testing.assert_close(sum(singles), case.loss(model, *batch, reduction="sum"), rtol=_tolerance(case), atol=0)


def test_every_trainable_parameter_but_the_unused_one_has_a_gradient(case: Case) -> None:
    model = case.make(torch.float64)
    case.loss(model, *_batch(case, 3), reduction="sum").backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert missing == (["spare.weight", "spare.bias"] if case.name == "unused" else [])


def test_an_empty_batch_has_loss_and_gradient_zero_or_is_refused(case: Case) -> None:
    model = case.make(torch.float64)
    if not case.accepts_empty_batch:
        with pytest.raises((RuntimeError, IndexError)):
            case.loss(model, *_batch(case, 0), reduction="sum")
        return
    loss = case.loss(model, *_batch(case, 0), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
