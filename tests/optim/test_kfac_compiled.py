"""`gramian.optim.KFAC` on compiled models: the same layers take whitened steps, and one that cannot be known is named."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.models import GPT, GPTConfig
from tests.optim.test_kfac_optimizer import HIDDEN, OPTIONS, batch_of, model_of, same, stepped


def wrapped(model: nn.Module, backend: str) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=backend)
    return compiled


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def output_layer_alone(model: nn.Module, backend: str) -> nn.Module:
    model.head = torch.compile(model.head, backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "wrapped": wrapped,
    "in place": in_place,
    "output layer alone": output_layer_alone,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HIDDEN)
def test_the_layers_of_a_compiled_model_are_those_of_the_plain_one(kind: str, way: str) -> None:
    optimizer = gramian.optim.KFAC(WAYS[way](model_of(kind), "eager"), **OPTIONS)
    assert optimizer.kfac.state.only == {f"{layer}.weight" for layer in HIDDEN[kind]}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_compiled_model_steps_as_the_plain_one_does(
    kind: str, backend: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Three steps, two refreshes; factors of the hidden layers alone, and the weights of the plain run."""
    torch._dynamo.reset()
    plain, inside = model_of(kind), model_of(kind)
    compiled = WAYS[way](inside, backend)
    options = {**OPTIONS, "update_freq": 2}
    left, right = (gramian.optim.KFAC(model, **options) for model in (plain, compiled))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            batch = batch_of(kind, step)
            stepped(left, plain, batch)
            stepped(right, compiled, batch)
            assert set(left.kfac.kfac_factors) == set(right.kfac.kfac_factors) == set(HIDDEN[kind])
    same(plain, inside, 1e-9)
    assert "head" not in caplog.text


def test_the_output_layer_of_a_compiled_gpt_is_known_before_its_first_forward() -> None:
    model = GPT(GPTConfig(vocabulary=40, context=8, layers=2, width=16, heads=2))
    before = torch.get_rng_state()
    optimizer = gramian.optim.KFAC(wrapped(model, "eager"))
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.kfac.state.only == {
        f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("qkv", "attention_out", "fc", "mlp_out")
    }


class Pair(nn.Module):
    """Two arguments, so that no input is known before the first call; the buffer shows what a forward leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.out(self.second(self.first(x + y).tanh()).tanh())
        return logits


def pair_steps(model: nn.Module, **capture: Any) -> gramian.optim.KFAC:
    optimizer = gramian.optim.KFAC(model, update_freq=1)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.capture(num_terms=5, **capture):
            F.cross_entropy(model(x, x), y).backward()
        optimizer.step()
    return optimizer


def test_an_output_layer_that_cannot_be_known_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = Pair()
    with caplog.at_level(logging.WARNING):
        optimizer = pair_steps(wrapped(model, "eager"))
    (line,) = [record.getMessage() for record in caplog.records if "head" in record.getMessage()]
    assert line.startswith("head: the model is compiled") and "'out' takes whitened steps" in line and "head=" in line
    assert set(optimizer.kfac.kfac_factors) == {"first", "second", "out"}
    assert float(model.calls) == 2  # forwards to find it would show


@pytest.mark.full
def test_the_argument_head_is_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING):
        optimizer = pair_steps(wrapped(Pair(), "eager"), head="out")
    assert set(optimizer.kfac.kfac_factors) == {"first", "second"} and "head" not in caplog.text


def test_a_plain_model_keeps_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    """The second refresh has no factors of the output layer, by which it was found in the first."""
    with caplog.at_level(logging.WARNING):
        optimizer = pair_steps(Pair())
    assert optimizer.kfac.state.only == {"first.weight", "second.weight"} and "head" not in caplog.text


class Pictures(nn.Module):
    """Has buffers that its forward changes, and a table that it makes at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(4, 5)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3))
        self.table = torch.linspace(0, 1, 4, device=x.device) if self.table is None else self.table
        return self.last(x + self.table)  # type: ignore[no-any-return]


def test_the_search_for_the_output_layer_leaves_the_model_as_it_was() -> None:
    model = in_place(Pictures(), "eager")
    optimizer = gramian.optim.KFAC(model, **OPTIONS)
    assert optimizer.kfac.state.only == {"first.weight", "second.weight"}
    assert model.table is None and int(model.norm.num_batches_tracked) == 0 and not model.last._forward_hooks
    with optimizer.capture(num_terms=4):
        F.cross_entropy(model(torch.randn(4, 3, 6, 6)), torch.randint(5, (4,))).backward()
    optimizer.step()
