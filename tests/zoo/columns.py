"""The columns of the matrix: what is computed for a model, and whether it is what a loop over single samples computes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gramian
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.privacy.clipping.clip_factors import SLACK
from tests.zoo.example_batches import Batch
from tests.zoo.tiny_configs import AutoConfig, model_class
from tests.zoo.zoo_models import Example

COUPLED = 1e-6
"""A batch whose gradient is further than this from the sum over its samples alone, relative to it, couples them."""
EXACT = 1e-8
"""Largest relative error in float64; 1,000 times the loop's own distance to the batch where a model computes in float32."""


@dataclass(frozen=True)
class Cell:
    """What came of one column for one model."""

    outcome: str
    """"exact", "refused", "coupled" (refused, and no method could be exact), "wrong" or "crash"."""
    detail: str = ""
    """The error of exact and wrong cells, the message of the others."""


@dataclass
class Loop:
    """Gradients of single samples, one backward each: the reference of all columns."""

    norms_B: Tensor
    samples: list[list[Tensor]]
    """Gradients of every trained parameter, one list a sample."""
    apart: float
    """Distance between their sum and the gradient of the batch, relative to it."""

    @classmethod
    def of(cls, one: Example) -> "Loop":
        """Run it; a model that cannot take a single sample (batch statistics) raises what its own layers raise."""
        trained = [p for p in one.model.parameters() if p.requires_grad]

        def gradients(batch: Batch) -> list[Tensor]:
            found = torch.autograd.grad(one.losses(batch).sum(), trained, allow_unused=True)
            return [torch.zeros_like(p) if g is None else g for g, p in zip(found, trained, strict=True)]

        samples = [gradients(one.rows(b, b + 1)) for b in range(len(next(iter(one.batch.values()))))]
        whole, total = gradients(one.batch), [sum(parts) for parts in zip(*samples, strict=True)]
        return cls(
            torch.stack([norm(own) for own in samples]),
            samples,
            float(norm([w - t for w, t in zip(whole, total, strict=True)]) / norm(total).clamp(min=1e-300)),
        )

    @property
    def tolerance(self) -> float:
        """Largest relative error of an exact cell."""
        return max(EXACT, 1000 * self.apart)


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of several tensors taken as one vector."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


def norms(one: Example, loop: Loop) -> float:
    """Per-sample norms: the largest relative error."""
    with gramian.per_sample_norms(one.model, loss_reduction="sum") as found:
        one.losses().sum().backward()
    return float(((found.values.double() - loop.norms_B) / loop.norms_B.clamp(min=1e-30)).abs().max())


def private_sum(one: Example, loop: Loop) -> float:
    """The sum of clipped gradients, as a private step without noise applies it: its relative error.

    Clip factors have a margin for rounding, that of float32 where a model computes in it inside.
    """
    limit = float(loop.norms_B.median())
    trained = [p for p in one.model.parameters() if p.requires_grad]
    optimizer = Kept(trained, lr=1.0)
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=7)
    data = [{name: value[b] for name, value in one.batch.items()} for b in range(len(loop.samples))]
    module, private, _ = engine.make_private(
        module=one.model, optimizer=optimizer, data_loader=DataLoader(data, len(data)),
        noise_multiplier=0.0, max_grad_norm=limit, poisson_sampling=False, loss_reduction="sum",
    )  # fmt: skip
    Example(module, one.batch, one.size, one.inputs).losses().sum().backward()
    private.step()
    found = [len(data) * gradient for gradient in optimizer.gradients]
    return min(_distance(found, loop, limit / (1 + SLACK[dtype])) for dtype in (torch.float64, torch.float32))


def _distance(found: list[Tensor], loop: Loop, limit: float) -> float:
    weights = [min(1.0, limit / float(own)) for own in loop.norms_B]
    want = [sum(w * g for w, g in zip(weights, own, strict=True)) for own in zip(*loop.samples, strict=True)]
    return float(norm([f - w for f, w in zip(found, want, strict=True)]) / norm(want))


class Kept(torch.optim.SGD):
    """An optimizer that keeps the gradients of its step, which a difference of weights would round."""

    def step(self, closure: Any = None) -> Any:
        self.gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]
        ]
        return super().step(closure)


def compiled(one: Example, loop: Loop) -> float:
    """Norms of the compiled model, backend aot_eager."""
    torch._dynamo.reset()
    one.model.compile(backend="aot_eager")
    return norms(one, loop)


def checkpointed(one: Example, loop: Loop) -> float:
    """Norms with activations computed again in the backward, as transformers does it."""
    one.model.gradient_checkpointing_enable({"use_reentrant": False})
    return norms(one, loop)


COLUMNS: dict[str, Callable[[Example, Loop], float]] = {
    "norms": norms,
    "private sum": private_sum,
    "compiled": compiled,
    "checkpointed": checkpointed,
}


def cell(column: str, one: Example) -> Cell:
    """Compute one column for one model and judge it."""
    try:
        loop = Loop.of(one)
    except ValueError as error:  # batch statistics of one sample
        loop, why = None, " ".join(str(error).split())
    try:
        error = COLUMNS[column](one, loop or _no_loop(one))
    except GramianError as refusal:
        coupled = loop is None or loop.apart > COUPLED or "mixes the samples of a batch" in str(refusal)
        return Cell("coupled" if coupled else "refused", " ".join(str(refusal).split()))
    except Exception as crash:  # whatever it is, it is not a refusal: a bug of ours, or of the model under this column
        return Cell("crash", f"{type(crash).__name__}: {' '.join(str(crash).split())}"[:300])
    if loop is None:
        return Cell("wrong", f"values for a model that takes no single sample: {why}")
    return Cell("exact" if error <= min(loop.tolerance, COUPLED) else "wrong", f"{error:.1e}")


def _no_loop(one: Example) -> Loop:
    trained = [p for p in one.model.parameters() if p.requires_grad]
    samples = [[torch.zeros_like(p) for p in trained] for _ in next(iter(one.batch.values()))]
    return Loop(torch.ones(len(samples), dtype=torch.float64), samples, 0.0)


def kfac_shares(name: str) -> dict[str, float]:
    """{"kronecker" | "block" | "diagonal": share of the parameters} of a type at its default configuration, on no device."""
    with torch.device("meta"), _quiet():
        model: nn.Module = model_class(name)(AutoConfig.for_model(name))
    shares = dict.fromkeys(("kronecker", "block", "diagonal"), 0)
    sizes = {key: p.numel() for key, p in model.named_parameters()}
    for spec in find_blocks(model, gramian.KFACNaturalGradient().options).values():
        shares[spec.kind] += sum(sizes[key] for key in spec.parameters)
    whole = max(1, sum(shares.values()))
    return {kind: count / whole for kind, count in shares.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers about default configurations."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
