"""What the demo sees in an observed step, and how a run's observations become the rows and numbers it prints."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.models.gpt import GPT


@dataclass(frozen=True)
class ModuleHealth:
    """State of one module in one backward: norms of its output and of its gradient, zeros, non-finite values."""

    activation_norm: float
    gradient_norm: float
    zero_fraction: float
    nonfinite: int


@dataclass(frozen=True)
class Observation:
    """What one observed backward says.

    Attributes:
        sample_norms: Norm of each sample's gradient, B values.
        noise_scale: tr(Sigma) / |G|^2 in samples; not finite or not positive where the batch cannot tell.
        health: By module name.
        fisher_trace: Trace of the diagonal Fisher by parameter name.
    """

    sample_norms: tuple[float, ...]
    noise_scale: float
    health: dict[str, ModuleHealth]
    fisher_trace: dict[str, float]


@dataclass(frozen=True)
class GroupReport:
    """One row of the final table: a group of modules that belong together.

    Attributes:
        layer: Name of the group.
        parameters: Scalars in it.
        activation_norm: Largest of its modules.
        zero_fraction: Largest of its modules.
        gradient_norm: Of the group as one vector.
        nonfinite: Sum over its modules.
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
class ObservationReport:
    """Observations of the run's last quarter, summarised.

    Attributes:
        groups: Rows of the table; health from the last observation, Fisher averaged over the window.
        sample_norm_quantiles: 10 %, 50 %, 90 % and the largest, of all samples in the window.
        noise_scale: Median of the usable estimates in the window, None where there is none.
        observed_step_seconds: Median over the run, without the first.
        plain_step_seconds: Likewise, of the steps that were not observed.
        window: Number of observations summarised.
    """

    groups: tuple[GroupReport, ...]
    sample_norm_quantiles: tuple[float, float, float, float]
    noise_scale: float | None
    observed_step_seconds: float
    plain_step_seconds: float
    window: int


Observer = Callable[[GPT, Callable[[], Tensor]], tuple[Tensor, Observation | None]]


def observe_backward(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, Observation | None]:
    """Run `backward` (forward, mean loss, backward; returns the loss) inside an observation of `model`.

    This is the only place that touches the statistics API. The observation is None where the API is not there.
    """
    api: Any = importlib.import_module("gramian")
    if not hasattr(api, "observe"):
        return backward(), None
    norms, fisher, noise, health = api.PerSampleNorms(), api.DiagonalFisher(), api.NoiseScale(), api.Health()
    with api.observe(model, norms, fisher, noise, health, loss_reduction="mean") as seen:
        loss = backward()
    observation = Observation(
        sample_norms=tuple(seen[norms].values.tolist()),
        noise_scale=float(seen[noise].simple),
        health={
            name: ModuleHealth(
                activation_norm=float(state.activation_norm),
                gradient_norm=float(state.gradient_norm),
                zero_fraction=float(state.zero_fraction),
                nonfinite=int(state.nonfinite),
            )
            for name, state in seen[health].items()
        },
        fisher_trace={name: float(squares.sum()) for name, squares in seen[fisher].items()},
    )
    return loss, observation


def summarise(
    model: GPT,
    steps: int,
    observations: list[tuple[int, Observation]],
    observed_seconds: list[float],
    plain_seconds: list[float],
) -> ObservationReport | None:
    """Summarise (step, observation) pairs of a run of `steps` steps, and the seconds of its two kinds of step."""
    if not observations:
        return None
    window = [observation for step, observation in observations if step >= 0.75 * steps] or [observations[-1][1]]
    norms = torch.tensor([norm for observation in window for norm in observation.sample_norms], dtype=torch.float64)
    quantiles = norms.quantile(torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)).tolist()
    scales = [seen.noise_scale for seen in window if math.isfinite(seen.noise_scale) and seen.noise_scale > 0.0]
    return ObservationReport(
        groups=_group_reports(model, window),
        sample_norm_quantiles=(quantiles[0], quantiles[1], quantiles[2], quantiles[3]),
        noise_scale=statistics.median(scales) if scales else None,
        observed_step_seconds=_median_without_first(observed_seconds),
        plain_step_seconds=_median_without_first(plain_seconds),
        window=len(window),
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
                activation_norm=max((state.activation_norm for state in states), default=math.nan),
                zero_fraction=max((state.zero_fraction for state in states), default=math.nan),
                gradient_norm=math.hypot(*(state.gradient_norm for state in states)),
                nonfinite=sum(state.nonfinite for state in states),
                fisher_share=fisher[group] / whole_trace if whole_trace > 0.0 else math.nan,
            )
        )
    return tuple(reports)


def _median_without_first(seconds: list[float]) -> float:
    """Median; the first value, which pays for warm-up, counts only when it is alone."""
    return statistics.median(seconds[1:] or seconds) if seconds else math.nan
