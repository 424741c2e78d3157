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

from gramian.train.config.config_sections import OptimizerSection, ScheduleSection


def learning_rate(step: int, steps: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    """Learning rate of one step, counted from 0; steps past the end have the rate of the last. The optimizer has the peak.

    Example:
        >>> learning_rate(0, 100, ScheduleSection(kind="constant", warmup=10), OptimizerSection(lr=1.0))
        0.1
    """
    peak, floor, last = optimizer.lr, schedule.floor, steps - 1
    start = schedule.warmup
    if step < start:
        return peak * (step + 1) / start
    if schedule.kind == "wsd":
        start = max(start, last - (schedule.decay or max(1, steps // 5)))
    if schedule.kind == "constant" or step <= start < last:
        return peak
    if step >= last:
        return floor
    x = (step - start) / (last - start)
    if schedule.kind == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * x))
    return peak + (floor - peak) * x
