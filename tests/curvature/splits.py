"""A refresh on several processes against one with all samples in the order of their ids: models, data, what is compared.

A case is a model and data that any process can build; a split says which samples each rank has.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.taps.hub import hub_of
from tests.curvature.loopback import one_at_a_time
from tests.curvature.small import Net
from tests.kit.toys import Toy

BUILT: dict[tuple[Any, torch.dtype], nn.Module] = {}
"""{(function that builds a model, dtype): the model}."""
IGNORE = -100
NOTHING = 1e-28
"""The square of rounding error, which is all of G where gradients add up to zero: keys of a softmax, summed over tokens."""


class Pictures(nn.Module):
    """A convolution with a bias, one without, a norm that mixes no samples, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 2, stride=2, bias=False)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh().mean((2, 3))
        return self.head(self.norm(h))


def reused() -> Toy:
    """One layer twice in a forward."""
    return Toy(lambda net, x: net.head(net.fc(net.fc(x).tanh()).tanh()), fc=nn.Linear(7, 7), head=nn.Linear(7, 5))


@dataclass(frozen=True)
class Case:
    """A model and its data."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    tokens: int = 0
    """Targets per sample; 0: one, without an axis of its own."""

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A copy of a model that is built once: the random state belongs to all threads, and proofs restore it."""
        with one_at_a_time:
            if (self.build, dtype) not in BUILT:
                BUILT[self.build, dtype] = self._built(dtype)
            model = copy.deepcopy(BUILT[self.build, dtype])
            hub_of(model)
        return model

    def _built(self, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = self.build().to(dtype)
            for p in model.parameters():
                p += (0.2 * torch.randn(p.shape, dtype=torch.float64)).to(dtype)
        return model

    def data(self, samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(samples)
        shape = (samples, self.tokens) if self.tokens else (samples,)
        targets = torch.randint(self.classes, shape, generator=generator)
        inputs = self.inputs(samples)
        return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets


def _normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def _words(tokens: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(11, (n, tokens), generator=torch.Generator().manual_seed(7 * n))


CASES = {
    "words": Case(Net, _words(2), 11, 2),
    "many words": Case(Net, _words(9), 11, 9),
    "tied": Case(lambda: Net(tied=True), _words(2), 11, 2),
    "pictures": Case(Pictures, _normal(2, 6, 6), 6),
    "reused": Case(reused, _normal(7), 5),
}


def refresh(
    kfac: gramian.KFACNaturalGradient,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    rows: Sequence[int],
    *,
    reduction: str = "mean",
    weights: Tensor | None = None,
    empty_pass: bool = True,
    micro: int | None = None,
    **told: Any,
) -> None:
    """One capture over these samples, each under its own id; in pieces of `micro` samples if given."""
    inputs, targets = data
    index = torch.tensor(list(rows), dtype=torch.long)
    pieces = [index] if micro is None else list(index.split(micro))
    if not len(index) and not empty_pass:
        pieces = []

    def telling(piece: Tensor) -> dict[str, Any]:
        terms = float((targets[piece] != IGNORE).sum())
        if weights is None:
            return {"num_terms": terms, "sample_ids": piece}
        return {"token_weights": weights[piece], "sample_ids": piece}

    with kfac.capture(model, loss_reduction=reduction, **telling(pieces[0] if pieces else index), **told) as cap:
        for number, piece in enumerate(pieces):
            if number:
                cap.next(**telling(piece))
            logits = model(inputs[piece])
            losses = F.cross_entropy(
                logits.flatten(0, -2), targets[piece].flatten(), ignore_index=IGNORE, reduction="none"
            )
            if weights is not None:
                losses = losses * weights[piece].flatten()
            count = float((targets[piece] != IGNORE).sum()) if weights is None else float(weights[piece].sum())
            (losses.sum() / (count or 1.0) if reduction == "mean" else losses.sum()).backward()


def vector(model: nn.Module) -> dict[str, Tensor]:
    """The same gradient on every rank."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def results(
    kfac: gramian.KFACNaturalGradient, model: nn.Module, powers: Sequence[float] = (-1.0, -0.5)
) -> dict[str, Tensor]:
    """Everything that is compared: factors, natural gradients, products."""
    found: dict[str, Tensor] = {}
    for name, block in kfac.kfac_factors.items():
        for side, factor in block.factors.items():
            found[f"{name} {side}"] = factor.to_dense()
    v = vector(model)
    for power in powers:
        natural = kfac.compute_natural_gradient(model, power=power, gradients=v)
        found.update({f"{name}^{power}": t for name, t in natural.items()})
    found.update({f"F {name}": t for name, t in kfac.compute_fisher_vector_product(v).items()})
    return found


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every entry within a tolerance relative to its norm."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, want in expected.items():
        error, size = float((actual[name].double() - want.double()).norm()), float(want.double().norm())
        assert error <= tolerance * size + NOTHING, f"{name}: off by {error:.3g} of {size:.3g}"
