"""Which weights take whitened steps: those of layers without a formula too, with their biases, and parts without factors."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.optim import whitened_steps
from tests.kit.models import seeded


class Own(nn.Module):
    """A product with a weight of its own, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(20, 24)), nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Between(nn.Module):
    """A layer between two linear ones, the last of which is the output layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(5, 24), middle, nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x))
        return self.head(h[0] if isinstance(h, tuple) else h)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    **{kind.__name__: lambda kind=kind: kind(24, 20, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_matrices_with_a_bias_have_the_factors_of_kfac(layer: str) -> None:
    model = seeded(lambda: Between(LAYERS[layer]()).double(), 0.3)
    x, y = torch.randn(3, 4, 5).double(), torch.randint(6, (3, 4))
    optimizer, kfac = gramian.optim.KFAC(model, update_freq=1, max_tokens=None), gramian.KFACNaturalGradient()
    for capture in (
        optimizer.capture,
        partial(kfac.capture, model),
    ):  # one after the other: together they share records
        with capture(num_terms=12):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer._choose_layers()
    hidden = {n: b for n, b in kfac.kfac_factors.items() if b.A is not None and n != "head"}
    assert optimizer.kfac.kfac_factors.keys() == hidden.keys() and len(hidden) == (2 if layer == "own" else 3)
    for name, block in hidden.items():
        assert float((optimizer.kfac.kfac_factors[name].A.diagonal() - block.A.diagonal()).abs().max()) <= 1e-12


class Routed(nn.Module):
    """Tokens go to one expert each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.head = nn.Linear(5, 24), nn.Parameter(torch.zeros(3, 24, 20)), nn.Linear(20, 6)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        h, out = self.first(x), x.new_zeros(*x.shape[:2], 20)
        for e in range(3):
            here = (to == e).nonzero(as_tuple=True)
            if len(here[0]):
                out = out.index_put(here, torch.tanh(h[here] @ self.up[e]))
        return self.head(out)


def test_an_expert_that_the_last_refresh_did_not_see_steps_as_the_others_do() -> None:
    model = seeded(lambda: Routed().double(), 0.3)
    optimizer = gramian.optim.KFAC(model, lr=1e-2, update_freq=20, weight_decay=0.0)
    x, y = torch.randn(4, 6, 5).double(), torch.randint(6, (4, 6))
    lengths = []
    for experts in (2, 3):
        optimizer.zero_grad()
        before = model.up.detach().clone()
        with optimizer.capture(num_terms=24):
            F.cross_entropy(model(x, torch.arange(24).view(4, 6) % experts).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        lengths.append((model.up.detach() - before).flatten(1).norm(dim=1))
    assert set(optimizer.kfac.kfac_factors) == {"first", "up[0]", "up[1]"}
    want = 4 * 1e-2 * 0.2 * (24 * 20) ** 0.5  # the root mean square of every whitened step
    assert lengths[0].tolist() == pytest.approx([want, want, 0.0], rel=1e-6)
    assert lengths[1].tolist() == pytest.approx([want] * 3, rel=1e-6)


@pytest.mark.parametrize("shares", [2, 3])
def test_roots_made_alone_are_made_in_the_stacks_that_processes_would_have(
    shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may round the products of a stack by its size: a run resumed on several processes goes on bit for bit."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 4)).double(), 0.3)
    optimizer = gramian.optim.KFAC(model)
    with optimizer.capture(num_terms=8):
        F.cross_entropy(model(torch.randn(8, 6).double()), torch.randint(4, (8,))).backward()
    optimizer.step()
    whole, stacks = [group.P.clone() for group in optimizer._steps.groups], list[int]()
    plain = whitened_steps.relative_roots
    monkeypatch.setattr(whitened_steps, "relative_roots", lambda some, d: stacks.append(len(some)) or plain(some, d))
    optimizer._steps.make(*optimizer._whitened(optimizer._trained()), shares=shares)
    roots = 10  # A and G of five layers; all cost the same
    assert sorted(stack for stack in stacks if stack) == sorted(len(range(i, roots, shares)) for i in range(shares))
    for group, P in zip(optimizer._steps.groups, whole, strict=True):
        assert torch.equal(group.P, P)
