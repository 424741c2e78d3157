"""One sample at a time: a backward belongs to one forward, and no gradient that is not clipped is left anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gramian.oracles.clipped_sum import clipped_sum
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy.problems import assert_totals
from tests.privacy.test_regressions import loss_of, net, private

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling", "ignore:optimizer. does not have")

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).double()


def single(model: nn.Module, **options: Any) -> Any:
    return private(model, poisson_sampling=False, max_physical_batch=1, batch=1, **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)


def plain(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


CALLS = pytest.mark.parametrize("call", [plain, compiled])


@CALLS
def test_clipped_sums_equal_those_of_a_loop(call: Any) -> None:
    model = net()
    want = clipped_sum(model, loss_of, (X,), 0.01)
    single(model)
    run = call(model)
    for row in X.split(1):
        loss_of(run, row).backward()
    assert_totals(model, want)


@CALLS
def test_a_backward_through_two_forwards_is_refused_and_adds_nothing(call: Any) -> None:
    engine, model, *_ = single(net())
    run = call(model)
    loss_of(run, X[:1]).backward()
    before = gradients(model)
    with refusal("backward: goes through two forwards of the model"):
        (loss_of(run, X[:1]) + loss_of(run, X[1:2])).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    loss_of(run, X[1:2]).backward()
    assert engine.last.norms_B.numel() == 1


def test_a_graph_that_is_of_no_forward_is_refused_after_a_forward_too() -> None:
    _, model, *_ = single(net())
    many = model[2](torch.tanh(model[0](X))).sum()
    model(X[:1])
    with refusal("one forward of the model itself"):
        many.backward()
    assert gradients(model) == [None] * 4


def test_a_second_backward_through_one_forward_is_refused() -> None:
    _, model, *_ = single(net())
    loss = loss_of(model, X[:1])
    loss.backward(retain_graph=True)
    before = gradients(model)
    with refusal("ran twice through one forward"):
        loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_forwards_may_wait_for_their_backwards() -> None:
    model = net()
    want = clipped_sum(model, loss_of, (X,), 0.01)
    single(model)
    for loss in [loss_of(model, row) for row in X.split(1)]:
        loss.backward()
    assert_totals(model, want)


@CALLS
def test_gradients_of_inputs_are_not_a_backward(call: Any) -> None:
    engine, model, *_ = single(net())
    run, x = call(model), X[:1].clone().requires_grad_()
    loss = loss_of(run, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert engine.last is None
    loss.backward()
    assert engine.last is not None


def test_a_checkpoint_around_the_model_is_one_forward() -> None:
    model = net()
    want = clipped_sum(model, loss_of, (X[:1],), 0.01)
    single(model)
    loss_of(lambda x: checkpoint(model, x, use_reentrant=False), X[:1]).backward()
    assert_totals(model, want)


@dataclass
class Found:
    logits: Tensor
    rest: Any = None


def wrapped(wrap: Callable[[Tensor], Any]) -> Toy:
    """Returns its logits in some container."""
    return Toy(lambda net, x: net.wrap(net.inner(x)), inner=net(), wrap=wrap)


OUTPUTS = {
    "tuple": (lambda y: (None, y), lambda out: out[1]),
    "dict": (lambda y: {"y": y, "n": 3}, lambda out: out["y"]),
    "dataclass": (lambda y: Found(y), lambda out: out.logits),
    "inside a dataclass": (lambda y: Found(y.detach(), [y]), lambda out: out.rest[0]),
    "written to": (lambda y: y, lambda out: out.mul_(1.0)),
    "two of one forward": (lambda y: (y, y + 0), lambda out: (out[0] + out[1]) / 2),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_any_form_lead_to_their_forward(name: str) -> None:
    wrap, read = OUTPUTS[name]
    model = wrapped(wrap)
    want = clipped_sum(model, lambda m, x: loss_of(lambda x: read(m(x)), x), (X[:1],), 0.01)
    single(model)
    loss_of(lambda x: read(model(x)), X[:1]).backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want.totals[key])


def test_outputs_of_transformers_lead_to_their_forward() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(11, (2, 6))

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        return m(input_ids=ids, labels=ids).loss

    want = clipped_sum(model, loss, (ids,), 0.01)
    single(model)
    for row in ids.split(1):
        loss(model, row).backward()
    assert_totals(model, want)


# ---- raw gradients -----------------------------------------------------------------------------------------------------


@CALLS
@pytest.mark.parametrize("earlier", [None, 7.0])
@pytest.mark.parametrize("place", [0, 2], ids=["first layer trains", "last layer trains"])
def test_parameters_outside_the_optimizer_keep_what_they_had(place: int, earlier: float | None, call: Any) -> None:
    model = net()
    single(model, optimizer=torch.optim.SGD(model[place].parameters(), lr=1.0))
    other = model[2 - place].weight
    other.grad = None if earlier is None else torch.full_like(other, earlier)
    loss_of(call(model), X[:1]).backward()
    assert other.grad is None if earlier is None else bool((other.grad == earlier).all())
    assert model[place].weight.grad is not None


def test_a_backward_that_breaks_off_leaves_no_gradient_even_for_a_moment() -> None:
    _, model, *_ = single(net())
    loss_of(model, X[:1]).backward()
    before = gradients(model)

    def fail(_: Tensor) -> None:
        raise ValueError("stop")

    handle = model[0].register_forward_hook(lambda layer, args, y: y.register_hook(fail) and None)
    with pytest.raises(ValueError, match="stop"):
        loss_of(model, X[1:2]).backward()
    handle.remove()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_backward_may_follow_one_that_broke_off() -> None:
    model = net()
    want = clipped_sum(model, loss_of, (X[:1],), 0.01)
    single(model)
    good = loss_of(model, X[:1])

    def fail(_: Tensor) -> None:
        raise ValueError("stop")

    handle = model[0].register_forward_hook(lambda layer, args, y: y.register_hook(fail) and None)
    failing = loss_of(model, X[1:2])
    handle.remove()
    with pytest.raises(ValueError, match="stop"):
        failing.backward()
    good.backward()
    assert_totals(model, want)
