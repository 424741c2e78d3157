"""What the tests of statistics share: a case with its data, the loop's answers, and how close is close enough.

The loop runs once per (case, samples, dtype); everything else is read off its gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

from gramian.oracles import single_sample
from gramian.statistics import LayerHealth, NoiseScaleResult
from tests.kit.models import CASES, Batch, Case, squared_error
from tests.oracles import sample_statistics

# Models that treat every token alone, so that the gradient of one token's loss is defined by a pass over that token.
INDEPENDENT_TOKENS = (
    "linear_3d", "linear_4d", "padded_embedding", "rmsnorm", "lora", "partially_frozen",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A case, N samples and the gradient g_i of each of them, from a loop of float64 backward passes."""

    case: Case
    batch: Batch
    gradients: dict[str, Tensor]
    dtype: torch.dtype

    def model(self) -> nn.Module:
        """A fresh model, the same weights every time."""
        return self.case.make(self.dtype)

    def rows(self, index: slice | Sequence[int]) -> Batch:
        """Some of the samples."""
        return tuple(t[index] for t in self.batch)

    def backward(self, model: nn.Module, batch: Batch, reduction: str = "mean") -> None:
        """One ordinary step."""
        self.case.loss(model, *batch, reduction=reduction).backward()

    @property
    def tolerance(self) -> float:
        """Largest relative difference from the loop."""
        if self.dtype == torch.bfloat16:
            return 1e-2
        if self.dtype == torch.float32:
            return 1e-5
        return 1e-6 if self.case.computes_in_float32 else 1e-9

    def norms(self, index: slice | Sequence[int] = slice(None)) -> Tensor:
        """‖g_i‖ over all parameters."""
        squares = [g[index].flatten(1).square().sum(1) for g in self.gradients.values()]
        return torch.stack(squares).sum(0).sqrt()

    def fisher(self, index: slice | Sequence[int] = slice(None)) -> dict[str, Tensor]:
        """(1/N) Σ_i g_i ⊙ g_i."""
        return {name: g[index].square().mean(0) for name, g in self.gradients.items()}

    def noise(self, index: slice | Sequence[int] = slice(None)) -> sample_statistics.ReferenceNoiseScale:
        """Unbiased moments."""
        return sample_statistics.noise_scale({name: g[index] for name, g in self.gradients.items()})


@lru_cache(maxsize=256)
def problem(name: str, samples: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Problem:
    """A case by name. The loop runs in float64 on the rounded weights and data, whatever the dtype of the problem."""
    case = CASES[name]
    batch = case.make_batch(samples, dtype, torch.Generator().manual_seed(seed))
    exact = tuple(t.double() if t.is_floating_point() else t for t in batch)
    model = case.make(dtype).double()
    gradients = single_sample.per_sample_gradients(model, partial(case.loss, reduction="sum"), exact)
    return Problem(case, batch, gradients, dtype)


@lru_cache
def token_fisher(name: str, samples: int) -> dict[str, Tensor]:
    """(1/N) Σ_t g_t ⊙ g_t over the tokens of N samples: a loop in which every token is a sample of one token.

    A sample's loss is the mean over its T tokens, so that each of them carries 1/T.
    """
    p = problem(name, samples)
    axes = 2 if p.case.loss is squared_error else 1
    tokens = tuple(t.flatten(0, axes).unflatten(0, (-1, *[1] * axes)) for t in p.batch)
    count = len(tokens[0]) // samples
    squares = sample_statistics.diagonal_fisher(p.model(), partial(p.case.loss, reduction="sum"), tokens)
    return {key: s / count**2 / samples for key, s in squares.items()}


@lru_cache
def health_by_hooks(name: str, samples: int) -> dict[str, LayerHealth]:
    """{layer: health} from plain hooks in a loop over single samples, in which a shared row is one sample's row."""
    p = problem(name, samples)
    model, sums = p.model(), {}
    for module in model.modules():  # a hook on a view does not survive the in-place form
        if hasattr(module, "inplace"):
            module.inplace = False

    def watch(
        layer: str, module: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: object
    ) -> None:
        entry = sums.setdefault(layer, dict.fromkeys(("a", "zeros", "values", "g", "elements"), 0.0))
        x = [*inputs, *kwargs.values()][0].detach()
        weight = module._parameters.get("weight")
        bias_only = isinstance(module, nn.Linear) and weight is not None and not weight.requires_grad
        if x.is_floating_point() and not bias_only:
            entry["a"] += float(x.double().square().sum())
            entry["zeros"] += int((x == 0).sum())
            entry["values"] += x.numel()

        def gradient(g: Tensor) -> None:
            entry["g"] += float(g.double().square().sum())
            entry["elements"] += g.numel()

        while not isinstance(output, Tensor):
            output = next(iter(output.values())) if hasattr(output, "values") else output[0]
        output.register_hook(gradient)

    inside = {m for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules() if m is not a}
    for layer, module in model.named_modules():
        if module not in inside and any(q.requires_grad for q in module.parameters(recurse=False)):
            module.register_forward_hook(partial(watch, layer), with_kwargs=True)
            sums.setdefault(layer, dict.fromkeys(("a", "zeros", "values", "g", "elements"), 0.0))
    for i in range(samples):
        p.backward(model, p.rows([i]), "sum")
    nan = float("nan")
    return {
        layer: LayerHealth(
            activation_norm=(s["a"] / s["values"]) ** 0.5 if s["values"] else nan,
            zero_fraction=s["zeros"] / s["values"] if s["values"] else nan,
            gradient_norm=(s["g"] / s["elements"]) ** 0.5 if s["elements"] else nan,
            nonfinite=0,
        )
        for layer, s in sums.items()
    }


def assert_health(actual: dict[str, LayerHealth], expected: dict[str, LayerHealth], tolerance: float) -> None:
    """The same layers, and every number within a relative tolerance."""
    assert actual.keys() == expected.keys()
    for layer, want in expected.items():
        for field in ("activation_norm", "zero_fraction", "gradient_norm", "nonfinite"):
            close = pytest.approx(getattr(want, field), rel=tolerance, abs=0, nan_ok=True)
            assert getattr(actual[layer], field) == close, f"{layer}.{field}"


def assert_norms(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every norm within a relative tolerance."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=0)


def assert_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """The same names, and every tensor within a tolerance relative to its norm."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name].double()
        assert got.shape == want.shape, f"{name}: {got.shape} instead of {want.shape}"
        error, size = float((got - want.double()).norm()), float(want.double().norm())
        assert error <= tolerance * size, f"{name}: off by {error:.3g} of {size:.3g}"


def assert_noise(
    actual: NoiseScaleResult, expected: sample_statistics.ReferenceNoiseScale, samples: int, tolerance: float
) -> None:
    """Both moments within a tolerance relative to E‖g‖², from which they are differences; ratios follow from them."""
    mean_square = expected.squared_gradient + expected.trace_covariance
    plug_in = expected.squared_gradient + expected.trace_covariance / samples
    assert actual.samples == samples
    assert abs(actual.trace_covariance - expected.trace_covariance) <= 4 * tolerance * mean_square
    assert abs(actual.squared_gradient - expected.squared_gradient) <= 4 * tolerance * mean_square
    slack = 16 * tolerance * mean_square
    unbiased = slack * (1 + abs(expected.simple)) / abs(expected.squared_gradient)
    assert abs(actual.unbiased - expected.simple) <= unbiased
    assert abs(actual.simple - expected.trace_covariance / plug_in) <= slack * (1 + abs(expected.simple)) / plug_in


def splits(parts: Sequence[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    return [slice(end - part, end) for end, part in zip(ends, parts, strict=True)]
