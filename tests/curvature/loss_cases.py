"""Models with the losses that torch has for them, and what `collect_kfac_factors` is told: squared errors, Bernoulli outputs,
class probabilities, images of classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.oracles import dense_kfac
from tests.curvature.problems import IGNORE, calls_of, classes, has_bias, kfac, normal, seeded, tokens
from tests.kit.toys import Toy

SIGMA = 0.6


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, outputs))


def alone() -> nn.Module:
    """Outputs [B]."""
    return Toy(lambda m, x: m.out(m.first(x).tanh()).squeeze(-1), first=nn.Linear(7, 6), out=nn.Linear(6, 1))


def pictures(channels: int = 3) -> nn.Module:
    """Outputs [B, C, 4, 5]; the layer in the middle sees a quarter as many positions."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).tanh()
        small = F.interpolate(m.small(F.avg_pool2d(y, 2, ceil_mode=True)).tanh(), size=y.shape[2:])
        return m.out(y + small)

    convolutions = {
        "first": nn.Conv2d(2, 4, 3, padding=1),
        "small": nn.Conv2d(4, 4, 1),
        "out": nn.Conv2d(4, channels, 1),
    }
    return Toy(forward, **convolutions)


def distributions(*shape: int) -> Tensor:
    return normal(*shape, seed=3).softmax(-1)


def squared(f: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(f, y, reduction="sum") / (2 * SIGMA**2)


def binary(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y, reduction="sum")


def entropy(f: Tensor, y: Tensor) -> Tensor:
    """As torch has it: classes at axis 1."""
    return F.cross_entropy(f, y, reduction="sum", ignore_index=IGNORE)


def entropy_last(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.movedim(-1, 1), y.movedim(-1, 1), reduction="sum")


def ignoring(labels: Tensor) -> Tensor:
    labels[0, 1], labels[1, 2, 3] = IGNORE, IGNORE
    return labels


@dataclass(frozen=True)
class Case:
    """A model, a batch, the loss that torch has for it, and what `collect_kfac_factors` is told."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    told: dict[str, Any]
    layers: tuple[str, ...] = ("0", "2")
    axis: int = -1
    """Where the outputs have their classes."""
    family: str = "cross_entropy"
    counted: Tensor = field(init=False)
    """Bool, [*positions]."""

    def __post_init__(self) -> None:
        per_position = not self.labels.is_floating_point()
        shape = self.labels if per_position or self.labels.dim() < 2 else self.labels.movedim(self.axis, -1)[..., 0]
        object.__setattr__(self, "counted", shape != IGNORE if per_position else torch.ones(shape.shape) > 0)

    def model(self) -> nn.Module:
        return seeded(self.build)

    @property
    def terms(self) -> int:
        return int(self.counted.sum())

    def rows(self, outputs: Tensor) -> Tensor:
        """[*positions, V]."""
        return outputs[:, None] if outputs.dim() == 1 else outputs.movedim(self.axis, -1)

    def collected(self, kind: str, model: nn.Module | None = None, **more: Any) -> gramian.KFACNaturalGradient:
        found = kfac()
        found.collect_kfac_factors(model or self.model(), (self.inputs, self.labels), kind, **self.told, **more)
        return found

    def factors(self, model: nn.Module, *targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """{layer: A and G} from plain hooks, G the mean over several targets; tokens without a term are left out of A."""
        found: dict[str, Any] = {}
        for y in targets:
            backward = lambda y=y: self.loss(model(self.inputs), y).backward()  # noqa: E731
            for layer, uses in calls_of(model, backward, self.layers).items():
                module = model.get_submodule(layer)
                a_TI, g_TO = tokens(module, uses)
                keep = self.counted.flatten()
                if len(keep) == len(a_TI):
                    assert not g_TO[~keep].any() or layer != self.layers[-1]
                    a_TI, g_TO = a_TI[keep], g_TO[keep]
                A, G = dense_kfac.factors(dense_kfac.ReferenceTokens(a_TI, g_TO), self.terms, 1.0, has_bias(module))
                found[layer] = (A, found[layer][1] + G if layer in found else G)
        return {layer: (A, G / len(targets)) for layer, (A, G) in found.items()}


MSE = {"loss": "mse", "noise_scale": SIGMA}
IMAGES = ("first", "small", "out")
CASES = {
    "mse": Case(net, normal(5, 7), normal(5, 3), squared, MSE, family="mse"),
    "mse tokens": Case(net, normal(3, 4, 7), normal(3, 4, 3), squared, MSE, family="mse"),
    "mse of one number": Case(alone, normal(5, 7), normal(5), squared, MSE, ("first", "out"), family="mse"),
    "mse image": Case(
        pictures, normal(2, 2, 4, 5), normal(2, 3, 4, 5), squared, {**MSE, "class_axis": 1}, IMAGES, 1, "mse"
    ),
    "bce": Case(net, normal(5, 7), normal(5, 3).sigmoid().round(), binary, {"loss": "bce"}, family="bce"),
    "bce tokens": Case(net, normal(3, 4, 7), normal(3, 4, 3).sigmoid(), binary, {"loss": "bce"}, family="bce"),
    "probabilities": Case(net, normal(5, 7), distributions(5, 3), entropy, {"loss": "cross_entropy"}),
    "probability tokens": Case(net, normal(3, 4, 7), distributions(3, 4, 3), entropy_last, {"loss": "cross_entropy"}),
    "image": Case(pictures, normal(2, 2, 4, 5), classes(3, 2, 4, 5), entropy, {}, IMAGES, 1),
    "image with ignored positions": Case(
        pictures, normal(2, 2, 4, 5), ignoring(classes(3, 2, 4, 5)), entropy, {}, IMAGES, 1
    ),
    "image of probabilities": Case(
        pictures, normal(2, 2, 4, 5), distributions(2, 4, 5, 3).movedim(-1, 1), entropy, {"loss": "cross_entropy"}, IMAGES, 1
    ),
    "classes first": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv1d(5, 4, 1)),
        normal(3, 3, 6), classes(4, 3, 6), entropy, {}, axis=1,
    ),
}  # fmt: skip
