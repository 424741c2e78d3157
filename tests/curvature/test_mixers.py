"""Factors of layers that use weights of their children without calling these: mixers of state-space models, routers.

The reference is the same function with a module for each product, whose tokens plain hooks see, and the loop of single samples.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.oracles import dense_kfac, single_sample
from gramian.taps.model.whole_layers import whole_classes
from tests.curvature.problems import (
    assert_close,
    assert_tensors,
    calls_of,
    classes,
    cross_entropy,
    has_bias,
    kfac,
    normal,
    seeded,
    tokens,
)
from tests.kit.refusals import refusal

pytestmark = pytest.mark.oracle
D, STATES, RANK = 12, 3, 11


class Mixer(nn.Module):
    """A selective state space as Mamba's: the convolution and the step's projection are used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.select = nn.Linear(D, D), nn.Linear(D, RANK + 2 * STATES, bias=False)
        self.conv, self.step = nn.Conv1d(D, D, 3, groups=D), nn.Linear(RANK, D)
        self.decay, self.skip = nn.Parameter(torch.zeros(D, STATES)), nn.Parameter(torch.zeros(D))
        self.leave = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv1d(F.pad(self.enter(x).mT, (2, 0)), self.conv.weight, self.conv.bias, groups=D).mT.tanh()
        rank, into, out = self.select(h).split((RANK, STATES, STATES), -1)
        step = F.softplus((self.step.weight @ rank.mT).mT + self.step.bias)
        return self.leave(scan(h, step, into, out, self.decay) + h * self.skip)


def scan(h: Tensor, step: Tensor, into: Tensor, out: Tensor, decay: Tensor) -> Tensor:
    """States s_t = exp(−Δ_t e^a) s_{t−1} + Δ_t B_t h_t, and outputs C_t s_t."""
    state, found = h.new_zeros(len(h), D, STATES), []
    for t in range(h.shape[1]):
        state = (
            state * torch.exp(-step[:, t, :, None] * decay.exp()) + (step[:, t] * h[:, t])[..., None] * into[:, t, None]
        )
        found.append((state * out[:, t, None]).sum(-1))
    return torch.stack(found, 1)


class Unrolled(Mixer):
    """The same, with calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(F.pad(self.enter(x).mT, (2, 0))).mT.tanh()
        rank, into, out = self.select(h).split((RANK, STATES, STATES), -1)
        step = F.softplus(self.step(rank))
        return self.leave(scan(h, step, into, out, self.decay) + h * self.skip)


def network(mixer: type[Mixer]) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(D, D), mixer(), nn.LayerNorm(D), nn.Linear(D, 5)))


X, Y = normal(3, 4, D), classes(5, 3, 4)


def captured(model: nn.Module, found: gramian.KFACNaturalGradient, x: Tensor = X) -> None:
    model.zero_grad()
    with found.capture(model, loss_reduction="sum", num_terms=Y.numel()):
        cross_entropy(model, x, Y).backward()


def test_projections_have_factors_and_all_else_exact_blocks() -> None:
    """In the first capture of the model, without a proof before."""
    model, twin, found = network(Mixer), network(Unrolled), kfac(strict=True)
    captured(model, found)
    assert whole_classes(model) == {Mixer}
    layers = ["0", "1.enter", "1.select", "1.step", "1.leave", "3"]
    calls = calls_of(twin, lambda: cross_entropy(twin, X, Y).backward(), layers)
    kinds = {name: block.spec.kind for name, block in found.kfac_factors.items()}
    for layer in layers:
        A, G = dense_kfac.factors(
            tokens(twin.get_submodule(layer), calls[layer]), Y.numel(), 1.0, has_bias(twin.get_submodule(layer))
        )
        name = f"{layer}.weight" if layer.startswith("1.") else layer
        assert kinds.pop(name) == "kronecker"
        assert_close(found.kfac_factors[name].A.to_dense(), A, 1e-9, name)
        assert_close(found.kfac_factors[name].G.to_dense(), G, 1e-9, name)
    loop = single_sample.per_sample_gradients(twin, cross_entropy, (X, Y))
    for name, kind in kinds.items():
        g_BN = loop[name].flatten(1)
        assert kind == "block"
        assert_close(found.kfac_factors[name].G.to_dense(), g_BN.mT @ g_BN / Y.numel(), 1e-9, name)
    natural = found.compute_natural_gradient(model)
    assert natural.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("options", [{}, {"ekfac": True, "damping_mode": "joint"}], ids=["kfac", "ekfac"])
def test_factors_are_saved_and_used_in_a_process_that_has_not_seen_the_layers(tmp_path: Path, options: dict) -> None:
    model, found = network(Mixer), kfac(**options)
    captured(model, found)
    found.save(str(tmp_path / "kfac.safetensors"))
    other, again, third = network(Mixer), kfac(**options), kfac(**options)
    again.load(str(tmp_path / "kfac.safetensors"), other)
    natural = found.compute_natural_gradient(model)
    given = {name: p.grad for name, p in model.named_parameters()}
    assert_tensors(again.compute_natural_gradient(other, gradients=given), natural, 1e-12)
    third.load_state_dict(found.state_dict())
    for one in (again, third):
        other = network(Mixer)
        captured(other, one)
        assert_tensors(one.compute_natural_gradient(other), natural, 1e-9)


class Late(nn.Module):
    """Calls its child or uses the weight of it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(D, D)

    def forward(self, x: Tensor, direct: bool) -> Tensor:
        return F.linear(x, self.child.weight, self.child.bias) if direct else self.child(x)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late, self.out = Late(), nn.Linear(D, 5)

    def forward(self, x: Tensor, direct: bool = False) -> Tensor:
        return self.out(self.late(x, direct))


def test_a_layer_that_begins_to_use_a_child_s_weight_later_is_an_error() -> None:
    model, found = seeded(Root), kfac()
    with (
        refusal("Late: uses weights of its children in this forward, and did not in those before"),
        found.capture(model, loss_reduction="sum", num_terms=12) as cap,
    ):
        cross_entropy(model, X, Y).backward()
        cap.next(num_terms=12)
        F.cross_entropy(model(X, direct=True).flatten(0, 1), Y.flatten(), reduction="sum").backward()
    assert not found.kfac_factors
    with found.capture(model, loss_reduction="sum", num_terms=12):
        F.cross_entropy(model(X, direct=True).flatten(0, 1), Y.flatten(), reduction="sum").backward()
    assert "late.child.weight" in found.kfac_factors


def test_refreshes_go_on_with_batches_of_other_sizes() -> None:
    model, found = network(Mixer), kfac()
    captured(model, found)
    model.zero_grad()
    with found.capture(model, loss_reduction="sum", num_terms=10):
        cross_entropy(model, normal(2, 5, D), classes(5, 2, 5)).backward()
    assert found.refreshes == 2
