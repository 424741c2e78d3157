"""Weights that are computed before or in each forward: by hooks (the older `torch.nn.utils`) and by parametrizations.

The reference is a second model, built alike, of whose batch each sample's term is differentiated by itself; buffers of the
captured one (vectors of the power iteration) must then be the second one's.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import gramian
from gramian.oracles.clipped_sum import clip
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.refusals import refused
from tests.kit.toys import Toy
from tests.privacy.problems import assert_sums, private
from tests.taps.checks import assert_norms

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.few_proofs(short=True),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

WEIGHTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral norm, hook": spectral_norm,
    "weight norm, hook": weight_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "pruned twice": lambda layer: prune.random_unstructured(
        prune.random_structured(layer, "weight", 0.3, dim=0), "weight", 0.2
    ),
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (3, 2, 6)),
    "conv": (lambda: nn.Conv1d(4, 5, 2), (3, 4, 6)),
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 5, 2), (3, 4, 6)),
}
CELLS = [
    cell if cell[1] == ("linear" if "hook" in cell[0] else "conv") else pytest.param(*cell, marks=pytest.mark.full)
    for cell in product(WEIGHTS, LAYERS)
]


def build(weight: str, layer: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), WEIGHTS[weight](make())).double()
    return model, torch.randn(*shape, dtype=torch.float64)


def terms(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def rows(terms_B: Iterable[Tensor], model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [torch.autograd.grad(t, list(parameters.values()), retain_graph=True) for t in terms_B]
    return dict(zip(parameters, map(torch.stack, zip(*found, strict=True)), strict=True))


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    return sum((g.flatten(1).square().sum(1) for g in gradients.values()), torch.zeros(())).sqrt()


def assert_same_buffers(model: nn.Module, other: nn.Module) -> None:
    for (name, b), c in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(b, c), name


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("weight, layer", CELLS)
def test_norms_and_private_sums_are_exact(weight: str, layer: str, training: bool) -> None:
    (model, x), (other, _), (third, _) = (build(weight, layer) for _ in range(3))
    for one in (model, other, third):
        one.train(training)
    want = rows(terms(other, x), other)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert_norms(norms.values, norms_of(want), 1e-10)
    assert_same_buffers(model, other)
    limit = 0.9 * float(norms_of(want).median())
    with private(third, limit, loss_reduction="sum") as run:
        terms(third, x).sum().backward()
        assert_sums(run.gradients(), clip(want, limit / (1 + SLACK[torch.float64])).totals, 1e-10)
    assert_same_buffers(third, other)


def twice(layer: nn.Module) -> Toy:
    """As a discriminator is called, on real and on made samples, before one backward."""
    return Toy(lambda net, x: net.layer(x) + net.layer(x.flip(-1)).tanh(), layer=layer)


@pytest.mark.parametrize("weight", ["spectral norm, hook", "spectral norm"])
def test_each_call_runs_again_with_the_vectors_that_it_had(weight: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return twice(WEIGHTS[weight](nn.Linear(6, 5))).double()

    model, other, x = make(), make(), torch.randn(3, 6, dtype=torch.float64)
    want = rows(terms(other, x), other)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert_norms(norms.values, norms_of(want), 1e-10)
    assert_same_buffers(model, other)


def test_a_hook_on_a_recurrent_layers_weight() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = weight_norm(nn.LSTM(6, 4, batch_first=True), "weight_hh_l0")
        return Toy(lambda net, x: net.layer(x)[0], layer=layer).double()

    model, other, x = make(), make(), torch.randn(3, 4, 6, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(model, x).sum().backward()
    assert_norms(norms.values, norms_of(rows(terms(other, x), other)), 1e-10)


def test_a_buffer_that_counts_inside_a_layer_that_runs_again_begins_as_it_did() -> None:
    def run(net: Toy, x: Tensor) -> Tensor:
        net.calls += 1
        return x * net.gain * net.calls.clone()

    def make() -> Any:
        return Toy(run, gain=nn.Parameter(torch.linspace(1, 2, 6).double()), calls=nn.Buffer(torch.zeros(()).double()))

    model, x = make(), torch.randn(3, 6, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        (model(x).square().sum() + model(2 * x).square().sum()).backward()
    per_call = (
        2 * x.square() * model.gain
    ).detach()  # the second call has counted to 2: four times the squares, of twice x
    assert_norms(norms.values, torch.cat([per_call.norm(dim=1), 16 * per_call.norm(dim=1)]), 1e-10)
    assert float(model.calls) == 2


@pytest.mark.full
@pytest.mark.parametrize("weight", ["spectral norm, hook", "weight norm, hook"])
def test_a_compiled_model_whose_hooks_keep_a_weight_is_refused_by_name(weight: str) -> None:
    model, x = build(weight, "linear")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with refused("attribute 2.weight", "expected eager mode"), gramian.per_sample_norms(model, loss_reduction="sum"):
        terms(compiled, x).sum().backward()
