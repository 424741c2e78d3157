"""The reference of all columns: the gradients of single samples, one backward each."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.zoo.example_batches import Batch
from tests.zoo.zoo_models import Example


@dataclass(frozen=True)
class Tolerance:
    """How far from the loop an exact cell may be, relative to it."""

    exact: float
    """At least so far: what rounding leaves."""
    times: float
    """And so many times the loop's own distance from the gradient of the batch, which shows how a model rounds."""
    most: float
    """But no further: a batch whose gradient is further from the sum over its samples couples them."""


TOLERANCES = {torch.float64: Tolerance(1e-8, 1000, 1e-6), torch.bfloat16: Tolerance(2.0**-6, 4, 0.1)}


@dataclass
class Loop:
    """Norms and gradients of single samples."""

    norms_B: Tensor
    samples: list[list[Tensor]]
    """Gradients of every trained parameter, one list a sample."""
    apart: float
    """Distance between their sum and the gradient of the batch, relative to it."""
    tolerances: Tolerance

    @classmethod
    def of(cls, one: Example) -> "Loop":
        """Run it; a model that cannot take a single sample (batch statistics) raises what its own layers raise."""
        trained = [p for p in one.model.parameters() if p.requires_grad]

        def gradients(batch: Batch) -> list[Tensor]:
            found = torch.autograd.grad(one.losses(batch).sum(), trained, allow_unused=True)
            return [(torch.zeros_like(p) if g is None else g).double() for g, p in zip(found, trained, strict=True)]

        samples = [gradients(one.rows(b, b + 1)) for b in range(len(next(iter(one.batch.values()))))]
        whole, total = gradients(one.batch), [sum(parts) for parts in zip(*samples, strict=True)]
        return cls(
            torch.stack([norm(own) for own in samples]),
            samples,
            float(norm([w - t for w, t in zip(whole, total, strict=True)]) / norm(total).clamp(min=1e-300)),
            TOLERANCES[trained[0].dtype],
        )

    @classmethod
    def nothing(cls, one: Example) -> "Loop":
        """In place of the loop of a model that takes no single sample: norms of 1, gradients of 0."""
        trained = [p for p in one.model.parameters() if p.requires_grad]
        samples = [[torch.zeros_like(p) for p in trained] for _ in next(iter(one.batch.values()))]
        return cls(torch.ones(len(samples), dtype=torch.float64), samples, math.inf, TOLERANCES[torch.float64])

    @property
    def coupled(self) -> bool:
        """Whether the gradient of the batch is another than the sum over samples alone."""
        return self.apart > self.tolerances.most

    @property
    def tolerance(self) -> float:
        """Largest relative error of an exact cell."""
        return min(max(self.tolerances.exact, self.tolerances.times * self.apart), self.tolerances.most)


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of several tensors taken as one vector."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()
