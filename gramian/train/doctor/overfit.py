"""A model that cannot learn a handful of windows by heart cannot learn: something between data, loss and step is broken."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepAttempt

ENOUGH = 0.1
"""Nats per token that are learnt by heart."""
RATES = {"adamw": (1e-3, 3e-3, 3e-4), "sgd": (0.1, 0.2)}
"""Tried after the config's own rate, which may be one for fine-tuning or for large batches. Widths of 64 to 512 learn by heart
at 1e-3, narrower ones take 3e-3, wider ones 3e-4; those of SGD are for momentum 0.9."""
EARLY, FALLEN = 1 / 3, 0.4
"""After this share of the steps the loss is down to that share of the first, where it gets to the end; measured on widths of 32
to 128, AdamW and SGD."""
MAX_NORM = 1.0
"""Where the config does not clip: a constant rate without warm-up needs it."""


@dataclass(frozen=True)
class _Try:
    """One rate."""

    rate: float
    loss: float
    """The lowest."""
    steps: int
    """After which it was reached."""
    left: bool
    """Not all steps were taken: it was too slow."""


def overfit(subject: ExaminedRun, on_step: Callable[[str], None] = lambda told: None) -> Check:
    """Train on the same few windows at a constant rate, until the loss is below 0.1 nat.

    Fresh models, and the config's optimizer, natural gradients and clipping; no dropout, weight decay, warm-up nor [privacy],
    all of which work against learning by heart. The config's rate is the first; where it is too slow, those in `RATES` follow;
    where all are, the best of them gets all its steps. Cost: `doctor.overfit_steps` steps, seldom more.

    Args:
        subject: what is examined.
        on_step: told how far it is.
    """
    steps, own = subject.config.doctor.overfit_steps, subject.config.optimizer.lr
    rates = [own, *(rate for rate in RATES[subject.config.optimizer.kind] if not math.isclose(rate, own))]
    tried: list[_Try] = []
    for rate in rates:
        tried.append(_learn(subject, rate, True, on_step))
        if tried[-1].loss < ENOUGH:
            break
    best, slow = min(tried, key=lambda one: one.loss), [one for one in tried if one.left]
    if best.loss >= ENOUGH and slow:
        again = _learn(subject, min(slow, key=lambda one: one.loss).rate, False, on_step)
        best = min(best, again, key=lambda one: one.loss)
    ok, hint = best.loss < ENOUGH, ""
    if not ok:
        hint = (
            "look at the other failed checks; if there is none: more doctor.overfit_steps or fewer doctor.overfit_windows, "
            "which a small model may need"
        )
    elif best.rate != own:
        hint = f"not at optimizer.lr = {own:g}, which is for longer runs, or too high"
    return Check("overfit", _told(best), f"{ENOUGH:g} nat, {steps} steps", ok, hint, best.loss)


def _learn(subject: ExaminedRun, rate: float, may_leave: bool, on_step: Callable[[str], None]) -> _Try:
    steps, batch = subject.config.doctor.overfit_steps, subject.batch(subject.config.doctor.overfit_windows)
    stepper, late = subject.stepper(subject.model(), rate, natural=True), DeferredMetrics()
    if stepper.kfac is None:
        stepper.max_norm = stepper.max_norm or MAX_NORM
    first = lowest = math.inf
    reached = 0
    for step in range(steps + 1):
        taken = stepper.take(batch, rate)
        late.add(StepAttempt(step, step, 0, rate, taken.stepped, None), taken.values)
        loss = late.read(wait=True)[-1].loss
        first = loss if step == 0 else first
        if loss < lowest:
            lowest, reached = loss, step
        on_step(f"overfit: loss {loss:.3f} after {step} steps at lr {rate:g}")
        if lowest < ENOUGH or not math.isfinite(loss):
            break
        if may_leave and EARLY * steps <= step < steps and lowest > FALLEN * first:
            return _Try(rate, lowest, reached, left=True)
    return _Try(rate, lowest, reached, left=False)


def _told(best: _Try) -> str:
    return f"{best.loss:.3f} nat, {best.steps} steps, lr {best.rate:g}"
