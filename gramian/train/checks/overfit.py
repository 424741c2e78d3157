"""A model that cannot learn a handful of windows by heart cannot learn: something between data, loss and step is broken."""

import math
from collections.abc import Callable

from gramian.train.checks.check import Check
from gramian.train.checks.subject import Subject
from gramian.train.late import Attempt, Late

ENOUGH = 0.1
"""Nats per token that are learnt by heart."""
RATES = {"adamw": (1e-3, 3e-3, 3e-4), "sgd": (0.1, 0.3)}
"""Tried after the config's own rate, which may be one for fine-tuning or for large batches. Widths of 64 to 512 learn by heart
at 1e-3, narrower ones take 3e-3, wider ones 3e-4; SGD as it is with momentum 0.9."""
EARLY, LITTLE = 1 / 3, 0.4
"""After this share of the steps a rate at which the loss fell by less than this share makes room for the next."""


def overfit(subject: Subject, on_step: Callable[[str], None] = lambda told: None) -> Check:
    """Train on the same few windows at a constant rate, until the loss is below 0.1 nat.

    Fresh models, the config's optimizer and clipping; no dropout, weight decay, warm-up, [kfac] nor [privacy], all of which
    work against learning by heart. The config's rate is the first; where it is not enough, those in `RATES` follow. Cost: at
    most `doctor.overfit_steps` steps for each.

    Args:
        subject: what is examined.
        on_step: told how far it is.
    """
    options, own = subject.config.doctor, subject.config.optimizer.lr
    rates = [own, *(rate for rate in RATES[subject.config.optimizer.kind] if not math.isclose(rate, own))]
    best, at = math.inf, own
    for number, rate in enumerate(rates):
        lowest, steps = _learn(subject, rate, number < len(rates) - 1, on_step)
        if lowest < best:
            best, at = lowest, rate
        if best < ENOUGH:
            hint = "" if rate == own else f"not at optimizer.lr = {own:g}, which is for longer runs, or too high"
            return Check("overfit", _told(best, steps, at), _threshold(options.overfit_steps), True, hint, best)
    hint = (
        "look at the other failed checks; without one, a larger doctor.overfit_steps, or fewer doctor.overfit_windows: "
        "a small model takes longer"
    )
    measured = _told(best, options.overfit_steps, at)
    return Check("overfit", measured, _threshold(options.overfit_steps), False, hint, best)


def _learn(subject: Subject, rate: float, may_leave: bool, on_step: Callable[[str], None]) -> tuple[float, int]:
    """The lowest loss at a rate, and after how many steps it was reached."""
    options = subject.config.doctor
    batch = subject.batch(options.overfit_windows)
    stepper, late = subject.stepper(subject.model(), rate), Late()
    first = lowest = math.inf
    reached = 0
    for step in range(options.overfit_steps + 1):
        taken = stepper.take(batch, rate)
        late.add(Attempt(step, step, 0, rate, taken.stepped, None), taken.values)
        loss = late.read(wait=True)[-1].loss
        first = loss if step == 0 else first
        if loss < lowest:
            lowest, reached = loss, step
        on_step(f"overfit: loss {loss:.3f} after {step} steps at lr {rate:g}")
        stuck = may_leave and step >= EARLY * options.overfit_steps and lowest > (1 - LITTLE) * first
        if lowest < ENOUGH or stuck or not math.isfinite(loss):
            break
    return lowest, reached


def _told(loss: float, steps: int, rate: float) -> str:
    return f"{loss:.3f} nat after {steps} steps at lr {rate:g}"


def _threshold(steps: int) -> str:
    return f"{ENOUGH:g} nat in {steps}"
