"""The learning rate as a pure function of the step: it ends where it says.

Step s = 0 … S−1 of S, w of them warm-up, peak P, floor f:
    warm-up   P·(s+1)/w
    cosine    f + (P−f)·½(1 + cos πx), x = (s−w)/(S−1−w)
    linear    P + (f−P)·x
    wsd       P until the last d steps, then linear to f
    constant  P
The last step has exactly f, except under "constant".
"""

import math

from gramian.train.config.config import OptimizerSection, ScheduleSection


def learning_rate(step: int, steps: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    """Of one step.

    Args:
        step: 0 for the first; those past the end keep the last one's rate.
        steps: of the run.
        schedule: its shape.
        optimizer: brings the peak.
    """
    peak, floor, warmup = optimizer.lr, schedule.floor, schedule.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    last = steps - 1
    start = warmup
    if schedule.kind == "wsd":
        start = max(warmup, last - decay_steps(steps, schedule))
    if step <= start < last:
        return peak
    if step >= last:
        return floor
    progress = (step - start) / (last - start)
    if schedule.kind == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak + (floor - peak) * progress


def decay_steps(steps: int, schedule: ScheduleSection) -> int:
    """Steps in which "wsd" goes down."""
    return schedule.decay or max(1, steps // 5)
