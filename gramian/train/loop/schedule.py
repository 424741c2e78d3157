"""The learning rate as a pure function of the step.

Step s = 0 … S−1 of S, warm-up w, peak P, floor f, first step of the decay a, x = (s−a)/(S−1−a):
    warm-up   P·(s+1)/w for s < w
    cosine    f + (P−f)·½(1 + cos πx), a = w
    linear    P + (f−P)·x, a = w
    wsd       P + (f−P)·x, a = S−1−d: constant until the last d steps, by default a fifth of all
    constant  P
The last step has exactly f, except with "constant".
"""

import math
from collections.abc import Callable

from gramian.train.config.config_sections import OptimizerSection, ScheduleSection

Shape = Callable[[int, int, float, ScheduleSection], float]
"""Learning rate of a step after warm-up, from (step, steps of the run, peak, options)."""


def learning_rate(step: int, steps: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    """Learning rate of one step.

    Args:
        step: 0 for the first; steps past the end have the rate of the last.
        steps: of the run.
        schedule: kind, warm-up, floor and length of the decay.
        optimizer: has the peak.

    Example:
        >>> learning_rate(0, 100, ScheduleSection(kind="constant", warmup=10), OptimizerSection(lr=1.0))
        0.1
    """
    if step < schedule.warmup:
        return optimizer.lr * (step + 1) / schedule.warmup
    return SCHEDULES[schedule.kind](step, steps, optimizer.lr, schedule)


def _constant(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    return peak


def _cosine(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    floor = schedule.floor
    return _decayed(
        step, steps, schedule.warmup, peak, floor, lambda x: floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * x))
    )


def _linear(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    floor = schedule.floor
    return _decayed(step, steps, schedule.warmup, peak, floor, lambda x: peak + (floor - peak) * x)


def _warmup_stable_decay(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    floor, start = schedule.floor, max(schedule.warmup, steps - 1 - (schedule.decay or max(1, steps // 5)))
    return _decayed(step, steps, start, peak, floor, lambda x: peak + (floor - peak) * x)


SCHEDULES: dict[str, Shape] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _warmup_stable_decay,
}
"""One entry for each value of `schedule.kind`."""


def _decayed(step: int, steps: int, start: int, peak: float, floor: float, curve: Callable[[float], float]) -> float:
    """The peak up to `start`, then `curve` of the fraction of the decay that is done, then the floor."""
    last = steps - 1
    if step <= start < last:
        return peak
    if step >= last:
        return floor
    return curve((step - start) / (last - start))
