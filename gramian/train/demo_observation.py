"""What the demo sees in an observed step, and how a run's observations become the rows and numbers it prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.models.gpt import GPT
from gramian.statistics import (
    DiagonalFisher,
    Health,
    LayerHealth,
    NoiseScale,
    NoiseScaleResult,
    PerSampleNorms,
)
from gramian.taps import Capture


@dataclass(frozen=True)
class Observation:
    """What one observed backward says.

    Attributes:
        sample_norms: Norm of each sample's gradient, B values.
        trace_covariance: Unbiased estimate of tr(Sigma), Sigma the covariance of one sample's gradient.
        squared_gradient: Unbiased estimate of |G|^2; below 0 where the batch's noise hides the gradient G.
        health: By layer name.
        fisher_trace: Trace of the diagonal Fisher by parameter name.
    """

    sample_norms: tuple[float, ...]
    trace_covariance: float
    squared_gradient: float
    health: Mapping[str, LayerHealth]
    fisher_trace: dict[str, float]


@dataclass(frozen=True)
class GroupReport:
    """One row of the final table: a group of modules that belong together.

    Attributes:
        layer: Name of the group.
        parameters: Scalars in it.
        activation_norm: Root mean square of a layer's input, the largest in the group; nan where the input is indices.
        zero_fraction: Share of zeros in a layer's input, the largest in the group; nan where the input is indices.
        gradient_norm: Root mean square of a layer's output gradient, the largest in the group.
        nonfinite: Values that are not finite, in the whole group.
        fisher_share: Its part of the whole Fisher trace.
    """

    layer: str
    parameters: int
    activation_norm: float
    zero_fraction: float
    gradient_norm: float
    nonfinite: int
    fisher_share: float


@dataclass(frozen=True)
class HistoryRow:
    """One observed step: what its batch says about gradients, with the moments' meaning as in `Observation`."""

    step: int
    median_sample_norm: float
    trace_covariance: float
    squared_gradient: float


@dataclass(frozen=True)
class ObservationReport:
    """The observed steps of a run, summarised.

    Attributes:
        groups: Rows of the table; health from the last observation, Fisher averaged over the last quarter of the run.
        history: One row per observed step.
        observed_step_seconds: Median over the run, without the first.
        plain_step_seconds: Likewise, of the steps that were not observed.
    """

    groups: tuple[GroupReport, ...]
    history: tuple[HistoryRow, ...]
    observed_step_seconds: float
    plain_step_seconds: float


@dataclass(frozen=True)
class GradientNoise:
    """Spread of per-sample gradients at fixed weights.

    Attributes:
        samples: Number of samples behind it.
        sample_norm_quantiles: 10 %, 50 %, 90 % and the largest of their gradient norms.
        noise_scale: tr(Sigma) / |G|^2 in samples, the critical batch size; None where it is above `samples`, for then
            noise hides the mean gradient G and no number can be given.
    """

    samples: int
    sample_norm_quantiles: tuple[float, float, float, float]
    noise_scale: float | None


Observer = Callable[[GPT, Callable[[], Tensor]], tuple[Tensor, Observation]]


def observe_backward(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, Observation]:
    """Run `backward` (forward, mean loss, backward; returns the loss) inside an observation of `model`.

    This is the only place that touches the statistics.
    """
    norms, fisher, noise, health = PerSampleNorms(), DiagonalFisher(), NoiseScale(), Health()
    with Capture(model, norms, fisher, noise, health, loss_reduction="mean") as seen:
        loss = backward()
    moments: NoiseScaleResult = seen[noise]
    observation = Observation(
        sample_norms=tuple(seen[norms].values.tolist()),
        trace_covariance=moments.trace_covariance,
        squared_gradient=moments.squared_gradient,
        health=seen[health],
        fisher_trace={name: float(squares.sum()) for name, squares in seen[fisher].items()},
    )
    return loss, observation


def measure_noise(model: GPT, backwards: Iterable[Callable[[], Tensor]]) -> GradientNoise:
    """Run all `backwards` at the model's present weights, in one observation, and leave no gradients behind.

    One training batch of b samples cannot show a noise scale above b; all passes together make one large sample.
    """
    norms, noise = PerSampleNorms(), NoiseScale()
    with Capture(model, norms, noise, loss_reduction="mean") as seen:
        for backward in backwards:
            model.zero_grad()
            backward()
    model.zero_grad()
    moments: NoiseScaleResult = seen[noise]
    levels = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    low, median, high, largest = seen[norms].values.double().quantile(levels).tolist()
    resolved = 0.0 < moments.unbiased <= moments.samples
    return GradientNoise(
        samples=moments.samples,
        sample_norm_quantiles=(low, median, high, largest),
        noise_scale=moments.unbiased if resolved else None,
    )


def summarise(
    model: GPT,
    steps: int,
    observations: list[tuple[int, Observation]],
    observed_seconds: list[float],
    plain_seconds: list[float],
) -> ObservationReport:
    """Summarise (step, observation) pairs of a run of `steps` steps, and the seconds of its two kinds of step."""
    window = [observation for step, observation in observations if step >= 0.75 * steps] or [observations[-1][1]]
    history = [
        HistoryRow(step, statistics.median(seen.sample_norms), seen.trace_covariance, seen.squared_gradient)
        for step, seen in observations
    ]
    return ObservationReport(
        groups=_group_reports(model, window),
        history=tuple(history),
        observed_step_seconds=_median_without_first(observed_seconds),
        plain_step_seconds=_median_without_first(plain_seconds),
    )


def layer_group(name: str) -> str:
    """Group that a module or parameter of the GPT belongs to: `blocks.0.fc.weight` to `blocks.0.mlp`, and so on."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return parts[0]
    kind = "attention" if parts[2] in ("norm_attention", "qkv", "attention_out") else "mlp"
    return f"blocks.{parts[1]}.{kind}"


def _group_reports(model: GPT, window: list[Observation]) -> tuple[GroupReport, ...]:
    parameters: dict[str, int] = {}
    fisher: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        group = layer_group(name)
        parameters[group] = parameters.get(group, 0) + parameter.numel()
        traces = [observation.fisher_trace.get(name, 0.0) for observation in window]
        fisher[group] = fisher.get(group, 0.0) + statistics.fmean(traces)
    whole_trace = sum(fisher.values())
    reports = []
    for group in parameters:
        states = [state for name, state in window[-1].health.items() if layer_group(name) == group]
        reports.append(
            GroupReport(
                layer=group,
                parameters=parameters[group],
                activation_norm=_largest(state.activation_norm for state in states),
                zero_fraction=_largest(state.zero_fraction for state in states),
                gradient_norm=_largest(state.gradient_norm for state in states),
                nonfinite=sum(state.nonfinite for state in states),
                fisher_share=fisher[group] / whole_trace if whole_trace > 0.0 else math.nan,
            )
        )
    return tuple(reports)


def _largest(values: Iterable[float]) -> float:
    """The largest value that is a number; nan where there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _median_without_first(seconds: list[float]) -> float:
    """Median; the first value, which pays for warm-up, counts only when it is alone."""
    return statistics.median(seconds[1:] or seconds) if seconds else math.nan
