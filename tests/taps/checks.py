"""What the tests of the taps compare with: a float64 loop of single-sample backward passes, and an untouched copy."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gramian
from tests.kit.models import Batch, Case
from tests.oracles import sample_statistics

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative, by the dtype the model computes in."""


def problem(
    case: Case, samples: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Batch, Callable[..., Tensor]]:
    """A model of the table, a batch, and the loss without its reduction."""
    return case.make(dtype), case.make_batch(samples, dtype, torch.Generator().manual_seed(1)), case.loss


def wave(model: nn.Module, *inputs: Any, reduction: str = "mean") -> Tensor:
    """A loss for any output [B, …] or tuple of outputs: one term per sample that depends on every entry, not linearly."""
    outputs = model(*inputs)
    terms_B: Tensor | float = 0.0
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if output is not None:
            phase = torch.linspace(0, 5, output[:1].numel() if output.shape[0] else 0).to(output)
            terms_B = terms_B + torch.sin(output.flatten(1) + phase).sum(1)
    return {"mean": terms_B.mean, "sum": terms_B.sum}[reduction]()


def loop_norms(model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Any, ...]) -> Tensor:
    """Norms of the single-sample loop on a float64 copy: [B]."""
    batch = torch.utils._pytree.tree_map(lambda t: t.double() if _is_real(t) else t, batch)
    return sample_statistics.per_sample_norms(deepcopy(model).double(), partial(loss, reduction="sum"), batch)


def assert_norms(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal relative to each sample's own norm."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-3 * tolerance)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """What is in `p.grad`."""
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_bits(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Gradients that are equal bit for bit, and None where the other is None."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        found = actual[name]
        if gradient is None:
            assert found is None, name
        else:
            assert found is not None and torch.equal(found, gradient), name


def captured(
    model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Any, ...], reduction: str = "mean", **options: Any
) -> gramian.statistics.norms.NormCapture:
    """The norms of one backward; options go to `per_sample_norms`."""
    with gramian.per_sample_norms(model, **options) as norms:
        loss(model, *batch, reduction=reduction).backward()
    return norms


def assert_exact(
    model: nn.Module, *inputs: Any, loss: Callable[..., Tensor] = wave, tolerance: float | None = None, **options: Any
) -> gramian.statistics.norms.NormCapture:
    """Capture once: norms are the loop's, and `p.grad` is an untouched copy's.

    Options go to `per_sample_norms`; `loss_reduction` also to the loss.
    """
    reduction = options.setdefault("loss_reduction", "mean")
    model.zero_grad()
    untouched = deepcopy(model)
    expected = loop_norms(model, loss, inputs)
    with gramian.per_sample_norms(model, **options) as norms:
        loss(model, *inputs, reduction=reduction).backward()
    loss(untouched, *inputs, reduction=reduction).backward()
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    assert_norms(norms.values, expected, TOLERANCE[dtype] if tolerance is None else tolerance)
    assert_same_bits(gradients(model), gradients(untouched))
    return norms


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
