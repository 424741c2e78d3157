"""The learning rate as a pure function of the step.

Step s = 0 … S−1 of S, warm-up w, peak P, floor f, first step of the decay a, x = (s−a)/(S−1−a):
    warm-up   P·(s+1)/w for s < w
    cosine    f + (P−f)·½(1 + cos πx), a = w
    linear    P + (f−P)·x, a = w
    wsd       P + (f−P)·x, a = S−1−d: constant until the last d steps, by default a fifth of all
    constant  P
The last step has exactly f, except with "constant". A schedule is one entry of `SCHEDULES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gramian.train.config.config_sections import OptimizerSection, ScheduleSection


def _after_warmup(steps: int, schedule: ScheduleSection) -> int:
    return schedule.warmup


def _last_steps(steps: int, schedule: ScheduleSection) -> int:
    return max(schedule.warmup, steps - 1 - (schedule.decay or max(1, steps // 5)))


def _cosine(peak: float, floor: float, x: float) -> float:
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * x))


def _linear(peak: float, floor: float, x: float) -> float:
    return peak + (floor - peak) * x


@dataclass(frozen=True)
class Schedule:
    """One value of `schedule.kind`: the peak after warm-up, then a decay to the floor."""

    curve: Callable[[float, float, float], float]
    """Maps (peak, floor, fraction x of the decay that is done, 0 < x < 1) to the learning rate."""
    first: Callable[[int, ScheduleSection], int] = _after_warmup
    """Maps (steps of the run, options) to the step at which the decay begins."""
    decays: bool = True
    """False if the learning rate stays at the peak to the end."""


SCHEDULES = {
    "cosine": Schedule(_cosine),
    "linear": Schedule(_linear),
    "wsd": Schedule(_linear, _last_steps),
    "constant": Schedule(lambda peak, floor, x: peak, decays=False),
}
"""{value of `schedule.kind`: the schedule}."""


def learning_rate(step: int, steps: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    """Learning rate of step number `step` (from 0) of `steps`; later steps have the last one's. `optimizer.lr` is the peak.

    Example:
        >>> learning_rate(0, 100, ScheduleSection(kind="constant", warmup=10), OptimizerSection(lr=1.0))
        0.1
    """
    kind, peak, last = SCHEDULES[schedule.kind], optimizer.lr, steps - 1
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    first = kind.first(steps, schedule)
    if not kind.decays or step <= first < last:
        return peak
    if step >= last:
        return schedule.floor
    return kind.curve(peak, schedule.floor, (step - first) / (last - first))
