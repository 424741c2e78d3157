r"""Norms, Fisher matrices and the noise scale of per-sample gradients, by their definitions: the reference of statistics.

Arguments are those of :func:`gramian.oracles.single_sample.per_sample_gradients`. Everything summed is float64.

Shape legend: B samples, P entries of all named parameters together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gramian.oracles.single_sample import LossFunction, per_sample_gradients


class ReferenceNoiseScale(NamedTuple):
    """The simple gradient noise scale and its two parts.

    Attributes:
        simple: ``trace_covariance / squared_gradient``; negative where the estimate of the latter is.
        trace_covariance: unbiased estimate of the trace of the covariance of one sample's gradient.
        squared_gradient: unbiased estimate of the squared norm of the expected gradient; may be negative.
    """

    simple: float
    trace_covariance: float
    squared_gradient: float


def _rows(g: Tensor) -> Tensor:
    """Per-sample gradients [B, *shape] as rows [B, P] in float64; P is 1 for a scalar parameter."""
    return g.double()[:, None].flatten(1)


def per_sample_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> Tensor:
    r"""Return :math:`\|g_i\|_2` over all named parameters together, [B] in float64 on the CPU."""
    gradients = per_sample_gradients(model, loss_fn, batch, params)
    return torch.stack([_rows(g).square().sum(1).cpu() for g in gradients.values()]).sum(0).sqrt()


def diagonal_fisher(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> dict[str, Tensor]:
    r"""Return the sum :math:`\sum_i g_i \odot g_i`, not divided by B, as ``{name: [*parameter.shape]}`` in float64."""
    gradients = per_sample_gradients(model, loss_fn, batch, params)
    return {name: g.double().square().sum(0) for name, g in gradients.items()}


def dense_fisher(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], params: Sequence[str] | None = None
) -> Tensor:
    r"""Return the sum :math:`\sum_i \mathrm{vec}(g_i)\, \mathrm{vec}(g_i)^\top`, not divided by B, [P, P] in float64.

    ``vec`` concatenates the named parameters in order, each flattened row by row.
    """
    gradients = per_sample_gradients(model, loss_fn, batch, params)
    g_BP = torch.cat([_rows(g) for g in gradients.values()], dim=1)
    return g_BP.T @ g_BP


def noise_scale(per_sample: dict[str, Tensor]) -> ReferenceNoiseScale:
    r"""Return the simple noise scale :math:`\mathrm{tr}\,\Sigma / |G|^2` from unbiased estimates of both.

    .. math::
        \mathrm{tr}\,\Sigma = \frac{\sum_i \|g_i\|^2 - B \|\bar g\|^2}{B - 1}, \qquad
        |G|^2 = \|\bar g\|^2 - \frac{\mathrm{tr}\,\Sigma}{B}

    Cost: one reading of the B·P numbers.

    Args:
        per_sample: ``{name: [B, *shape]}`` as :func:`per_sample_gradients` returns it, B at least 2.
    """
    g_BP = torch.cat([_rows(g) for g in per_sample.values()], dim=1)
    samples = g_BP.shape[0]
    if samples < 2:
        raise ValueError(f"per_sample holds {samples} sample(s); the variance between samples needs at least 2")
    mean_square = g_BP.mean(0).square().sum().item()
    trace_covariance = (g_BP.square().sum().item() - samples * mean_square) / (samples - 1)
    squared_gradient = mean_square - trace_covariance / samples
    return ReferenceNoiseScale(trace_covariance / squared_gradient, trace_covariance, squared_gradient)
