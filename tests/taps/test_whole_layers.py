"""Layers that use weights of their children without calling them: found by the proof, tapped as one, exact."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.taps.hub import hub_of
from gramian.taps.model.whole_layers import whole_classes
from tests.kit.refusals import refusal
from tests.oracles import sample_statistics
from tests.taps.test_batch_free import assert_norms_of, assert_private_sums_of

pytestmark = pytest.mark.oracle
D = 4


def only_directly(own: "Mixer", x: Tensor) -> Tensor:
    y = F.conv1d(F.pad(own.enter(x).mT, (2, 0)), own.conv.weight, own.conv.bias, groups=D).mT
    step = F.softplus(F.linear(y, own.rate.weight) + own.rate.bias)
    state, outputs = x.new_zeros(len(x), D), []
    for t in range(x.shape[1]):
        state = state * torch.exp(-step[:, t] * own.decay.exp()) + y[:, t]
        outputs.append(state)
    return own.leave(torch.stack(outputs, 1))


def called_and_directly(own: "Mixer", x: Tensor) -> Tensor:
    """The taps explain a part of the gradient of `rate.weight`."""
    return own.leave(own.rate(x).tanh() + F.linear(x, own.rate.weight.mT) * own.decay)


def in_a_penalty_of_each_sample(own: "Mixer", x: Tensor) -> Tensor:
    return own.leave(own.enter(x) * (own.rate.weight.square().sum() * x.mean((1, 2), keepdim=True)))


class Mixer(nn.Module):
    def __init__(self, use: Callable[["Mixer", Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.rate, self.leave = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.conv, self.decay = nn.Conv1d(D, D, 3, groups=D), nn.Parameter(torch.linspace(-1, 1, D))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Around(nn.Module):
    """Uses a weight of a grandchild, inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](F.linear(self.parts[0](x), self.parts[0][0].weight))


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), *middle, nn.LayerNorm(D), nn.Linear(D, 3)).double()


def batch(samples: int, length: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


USES = [only_directly, called_and_directly, in_a_penalty_of_each_sample]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_norms_are_those_of_the_loop(use: Callable[..., Tensor]) -> None:
    """Then a batch of another size, and one sample."""
    model = network(Mixer(use), Mixer(use))
    for samples, length in ((3, 5), (5, 4), (1, 5)):
        assert_norms_of(model, batch(samples, length))


def test_the_layer_around_a_list_is_found_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network(Around())
    assert_norms_of(model, batch(3, 5))
    assert_norms_of(model, batch(4, 5))
    assert [line for line in caplog.messages if "Around: uses weights of its children" in line] == caplog.messages[:1]
    assert whole_classes(model) == {Around}


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_private_sums_are_those_of_the_loop(use: Callable[..., Tensor]) -> None:
    assert_private_sums_of(network(Mixer(use)), batch(4, 5))


def test_a_small_gradient_in_half_precision_is_no_rounding() -> None:
    """Of a weight that no tap counts: a twentieth of all gradients together at most, which others may be off by."""

    def faintly(own: "Mixer", x: Tensor) -> Tensor:
        return own.leave(own.enter(x) + 0.05 * F.linear(x, own.rate.weight))

    model, x = network(Mixer(faintly)), batch(3, 5)
    (model(x).square().sum()).backward()
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert 0 < model[1].rate.weight.grad.norm() < 0.05 * torch.stack(gradients).norm()
    model.zero_grad()
    expected = sample_statistics.per_sample_norms(model, lambda m, one: m(one).square().sum(), (x,))
    model.zero_grad()
    model.bfloat16()
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        model(x.bfloat16()).square().sum().backward()
    torch.testing.assert_close(norms.values.double(), expected, rtol=3e-2, atol=0)


class Coupled(nn.Module):
    """Uses a child's weight, and mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x - x.mean(0), self.child.weight)


def test_what_is_still_not_exact_is_refused_and_leaves_no_trace() -> None:
    model = network(Coupled())
    with refusal(r"1\.child\.weight: got a gradient, but none through its layer"), gramian.per_sample_norms(model):
        model(batch(3, 5))
    assert not whole_classes(model)
    assert not any("forward" in vars(module) for module in model.modules())


class Root(nn.Module):
    """Uses weights past their layers in the model itself: one that is not called, and a tied table as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(7, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x) if not x.is_floating_point() else x
        return F.linear(F.linear(self.first(rows), self.second.weight).tanh(), self.table.weight)


@pytest.mark.parametrize("x", [batch(3, 5), torch.randint(7, (3, 5))], ids=["numbers", "tokens"])
def test_a_root_that_uses_weights_is_tapped_as_one(x: Tensor) -> None:
    torch.manual_seed(0)
    model = Root().double()
    assert_norms_of(model, x)
    assert whole_classes(model) == {Root}
    assert_private_sums_of(Root().double(), x)


class TwoTowers(nn.Module):
    """Returns logits between all samples and embeddings of each, scaled by a parameter of its own (as CLIP does)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = self.left(x.mean(1)), self.right(x.amax(1))
        return {"logits": self.scale.exp() * left @ right.mT, "left": left, "right": right}


def test_a_loss_of_embeddings_is_exact_beside_logits_between_samples() -> None:
    model, x = TwoTowers().double(), batch(3, 5)

    def loss(own: nn.Module, rows: Tensor) -> Tensor:
        found = own(rows)
        return (found["left"] * found["right"].tanh()).sum()

    want = sample_statistics.per_sample_norms(model, loss, (x,))
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        loss(model, x).backward()
    torch.testing.assert_close(norms.values, want, rtol=1e-9, atol=0)
    with refusal("output 0 of the model couples samples"), gramian.per_sample_norms(model, loss_reduction="sum"):
        F.cross_entropy(model(x)["logits"], torch.arange(3), reduction="sum").backward()


def test_a_check_leaves_no_class_behind() -> None:
    model, x = network(Mixer(only_directly)), batch(3, 5)
    assert gramian.check(model, x, show=False).finding("per-sample norms").verdict == "exact"
    assert not whole_classes(model)


class ManyOutputs(TwoTowers):
    """The same, with five more outputs of single samples."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        return found | {f"left {power}": found["left"] ** power for power in range(2, 7)}


def test_outputs_beside_logits_between_samples_are_proven_together_in_few_runs() -> None:
    model, x = ManyOutputs().double(), batch(5, 5)
    with gramian.per_sample_norms(model, loss_reduction="sum"):
        model(x)["left 3"].sin().sum().backward()
    (proven,) = hub_of(model).proof.proven.values()
    assert list(proven.open_outputs) == [0]
    assert {layer for layer, _, _ in proven.silent} == {""}  # its scale is behind the logits alone
    assert proven.runs < 50
