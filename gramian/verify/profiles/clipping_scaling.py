"""Fit the growth of a private step's cost with the sequence length T, and give advice from its phases."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gramian.linalg.spectra.trace import student_quantile

COMMUNICATION_LIMIT = 0.30
"""Share of the backward above which communication is worth a change of settings."""
OTHER_LIMIT = 0.30
"""Share of the step above which norms or noise are worth a change of settings."""
ROUNDING = 0.05
"""Distance from 1 or 2 at which an exponent counts as 1 or 2: intervals of exact costs, such as memory, are very narrow."""
PASS = ("backward", "norm", "clip")
"""Phases of a private step that together are what a user sees as the backward, without communication."""


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law of cost: cost = constant · T^exponent, with T the sequence length."""

    exponent: float
    low: float | None
    """Lower end of the exponent's 95 % interval; None: two lengths do not give one."""
    high: float | None

    @property
    def growth(self) -> str:
        """Growth of the cost with length T, as text: "O(T)", "O(T²)" or what else the interval of the exponent allows."""
        if self.low is None or self.high is None:
            return f"about T^{self.exponent:.2f}; an interval needs three lengths"
        low, high = self.low - ROUNDING, self.high + ROUNDING
        one, two = low <= 1 <= high, low <= 2 <= high
        if one and two:
            return "O(T) or O(T²): the interval holds both"
        if one:
            return "O(T)"
        if two:
            return "O(T²)"
        if high < 1:
            return "less than O(T): a part does not grow with T"
        return "between O(T) and O(T²)" if high < 2 else "more than O(T²)"


def fit_power(lengths: Sequence[float], costs: Sequence[float]) -> PowerLaw | None:
    """Fit a power law of cost in the sequence length T: least squares of log cost on log T, with costs in any unit.

    The interval is Student's with n − 2 degrees of freedom, so it covers noise and departure from a power law alike. None with
    fewer than two different lengths, or a cost that is not above 0.
    """
    if len(set(lengths)) < 2 or any(not (math.isfinite(cost) and cost > 0) for cost in costs):
        return None
    x, y = [math.log(length) for length in lengths], [math.log(cost) for cost in costs]
    n, x_mean, y_mean = len(x), sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    if n < 3:
        return PowerLaw(slope, None, None)
    residual = sum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    error = student_quantile(0.975, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return PowerLaw(slope, slope - error, slope + error)


def shares(phases: Mapping[str, float]) -> dict[str, float]:
    """{phase: its share of the step's time}, from {phase: seconds}."""
    total = sum(phases.values())
    return {name: seconds / total if total > 0 else 0.0 for name, seconds in phases.items()}


def communication_share(phases: Mapping[str, float]) -> float:
    """Time of communication over the time of the backward (autograd, norms and clipped sums), from {phase: seconds}."""
    backward = sum(phases.get(name, 0.0) for name in PASS)
    return phases.get("communication", 0.0) / backward if backward > 0 else 0.0


def advice(phases: Mapping[str, float], kind: str) -> list[str]:
    """Lines of advice, one for every phase whose time is above its limit.

    `phases` is {phase: seconds}; `kind` is "one" (process), "ddp" or "fsdp2".
    """
    lines = []
    waits, share = communication_share(phases), shares(phases)
    if waits > COMMUNICATION_LIMIT:
        knob = "raise max_physical_batch: every piece of a draw is reduced by itself"
        if kind != "fsdp2":
            knob = "raise the batch of a step, with max_physical_batch against its memory: a draw is reduced once, however "
            knob += "many pieces it has"
        limit = f"(more than {COMMUNICATION_LIMIT:.0%})"
        lines.append(f"communication is {waits:.0%} of the backward {limit}: {knob}")
    if share.get("norm", 0.0) > OTHER_LIMIT:
        lines.append(
            f"norms take {share['norm']:.0%} of the step: leave mode and algorithm at auto, or raise memory_budget so that "
            "more layers may keep their per-sample gradients"
        )
    if share.get("noise", 0.0) > OTHER_LIMIT:
        lines.append(
            f"noise takes {share['noise']:.0%} of the step: it is drawn once per step, so a larger batch spreads it"
        )
    return lines
