"""A model must be able to overfit a few windows; if it cannot, something between data, loss and step is broken."""

import math
from dataclasses import dataclass

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepAttempt

ENOUGH = 0.1
"""Loss, in nats per token, below which the windows are overfitted."""
RATES = {"adamw": (1e-3, 3e-3, 3e-4), "sgd": (0.1, 0.2), "kfac": (2e-3, 1e-3, 4e-3)}
"""Learning rates to try after the config's own, which may be for fine-tuning or for large batches. Widths of 64 to 512 overfit
at 1e-3, narrower ones at 3e-3, wider ones at 3e-4; those of SGD are for momentum 0.9."""
EARLY, FALLEN = 1 / 3, 0.4
"""After the fraction `EARLY` of the steps, a learning rate is given up unless the loss is at most `FALLEN` times the first;
measured on widths of 32 to 128 with AdamW and SGD."""
MAX_NORM = 1.0
"""Gradient norm to clip at if the config clips none: a constant rate without warm-up needs clipping."""


@dataclass(frozen=True)
class _Try:
    """Result of training on the same few windows at one learning rate."""

    rate: float
    loss: float
    """Lowest loss that was reached, in nats per token."""
    steps: int
    """Number of steps until the lowest loss."""
    given_up: bool
    """Whether training stopped early because the loss fell too slowly."""

    def __str__(self) -> str:
        return f"{self.loss:.3f} nat, {self.steps} steps, lr {self.rate:g}"


def overfit(run: ExaminedRun) -> list[Check]:
    """Train new models on the same few windows at a constant rate, until the loss is below 0.1 nat.

    Uses the config's optimizer, natural gradients and clipping, without dropout, weight decay, warm-up and [privacy], which
    work against overfitting. The config's learning rate is tried first; if the loss falls too slowly, those in `RATES` follow;
    if it does at all of them, the best is tried again with all steps. Cost: `doctor.overfit_steps` steps, rarely more.
    """
    steps, own = run.config.doctor.overfit_steps, run.config.optimizer.lr
    tries: list[_Try] = []
    for rate in (own, *(rate for rate in RATES[run.config.optimizer.kind] if not math.isclose(rate, own))):
        tries.append(_train(run, rate, may_give_up=True))
        if tries[-1].loss < ENOUGH:
            break
    best, slow = min(tries, key=lambda one: one.loss), [one for one in tries if one.given_up]
    if best.loss >= ENOUGH and slow:
        again = _train(run, min(slow, key=lambda one: one.loss).rate, may_give_up=False)
        best = min(best, again, key=lambda one: one.loss)
    ok, hint = best.loss < ENOUGH, ""
    if not ok:
        hint = (
            "look at the other failed checks; if there are none: more doctor.overfit_steps or fewer doctor.overfit_windows, "
            "which a small model may need"
        )
    elif best.rate != own:
        hint = f"not at optimizer.lr = {own:g}, which is for longer runs, or too high"
    return [Check("overfit", str(best), f"{ENOUGH:g} nat, {steps} steps", ok, hint, best.loss)]


def _train(run: ExaminedRun, rate: float, may_give_up: bool) -> _Try:
    steps, batch = run.config.doctor.overfit_steps, run.batch(run.config.doctor.overfit_windows)
    stepper = run.stepper(run.model(), rate, natural=True)
    metrics = DeferredMetrics(stepper.extra)
    if stepper.kfac is None:
        stepper.max_norm = stepper.max_norm or MAX_NORM
    first = lowest = math.inf
    reached = 0
    for step in range(steps + 1):
        taken = stepper.take(batch, rate)
        metrics.add(StepAttempt(step, step, 0, rate, taken.stepped, None), taken.values)
        loss = metrics.read(wait=True)[-1].loss
        first = loss if step == 0 else first
        if loss < lowest:
            lowest, reached = loss, step
        run.on_step(f"overfit: loss {loss:.3f} after {step} steps at lr {rate:g}")
        if lowest < ENOUGH or not math.isfinite(loss):
            break
        if may_give_up and EARLY * steps <= step < steps and lowest > FALLEN * first:
            return _Try(rate, lowest, reached, given_up=True)
    return _Try(rate, lowest, reached, given_up=False)
