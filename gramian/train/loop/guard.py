"""The guard compares loss, gradient norm and loss scale of a step with recent steps: continue, advise, roll back or stop.

| fault | condition | verdict |
|---|---|---|
| not finite | the loss is not, or a gradient is not and there is no loss scaler | rollback |
| loss spike | loss > median + max(d·1.4826·MAD, `spike_nats`), on two of three steps | rollback |
| long gradient | norm > `gradient_factor` × median, > median + d·1.4826·MAD in logarithms, > 2 × the longest | rollback |
| falling scale | `halvings` halvings of the loss scale within the window | rollback |
| one high loss | as a spike, but alone | advice |
| clipping | more clipped steps in a window than `clip_share` | advice, once per window |

d is `spike_deviations`. Medians and MADs (median absolute deviations) are over the last `window` sound steps; suspicious steps
never enter them, and nothing is compared before there are `ENOUGH`. A loss is judged in nats above the median, not as a
multiple of it, so that a collapse to the uniform distribution (ln V) is detected from any loss and for any vocabulary. A linear
drift never fires, however steep: over a window it rises by R, is R/2 above the median and has d·1.4826·MAD = 2.2·R for d = 6.
For the same reason, and because a gradient is also compared with the longest of the window, gradients that grow step by step
are not a fault.

The loss of a step is computed before its update, so the step before may have caused a bad loss: it is rolled back and its data
skipped as well. Halvings before the first finite gradient are the scaler's search for a scale, and count only below 1.

Every process must pass the same numbers to get the same verdict: reduce loss, norm and finiteness over all processes before
`observe`. Nothing here depends on a clock or on random numbers. Cost: a few sorts of `window` numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gramian.core.errors import GramianError
from gramian.train.config import config_sections

ENOUGH = 20
"""Number of steps without fault that a loss or a norm is compared with at least; guard.window, if that is smaller."""
ROLLBACK_STEPS = 1000
"""Number of steps within which `max_rollbacks` rollbacks are allowed."""
NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""


@dataclass(frozen=True)
class Observation:
    """Loss, gradient norm and loss scale of one optimizer step, the same on every process."""

    step: int
    loss: float | None
    """Mean loss over the step's tokens, in nats, before the update; None if it must not influence the verdict (privacy)."""
    grad_norm: float
    """Norm of the gradient without the loss scale, before clipping."""
    finite: bool = True
    """Whether every gradient was finite."""
    scale: float | None = None
    """Loss scale after the step's `GradScaler.update()`; None without a scaler."""
    clipped: bool = False


@dataclass(frozen=True)
class Fine:
    """Verdict of the guard on a step: continue."""


@dataclass(frozen=True)
class Advice:
    """Verdict of the guard on a step: continue, and log the text."""

    text: str


@dataclass(frozen=True)
class Rollback:
    """Verdict of the guard: restore the newest state before a step, and skip the data of some steps from now on."""

    to_before: int
    """Number of the first suspicious step; the state to restore is from before it."""
    skip: tuple[int, ...]
    """Numbers of the steps whose data is skipped from now on."""
    reason: str
    lr_factor: float
    """Factor of the learning rate at step `to_before`, given by `Guard.lr_scale`."""


@dataclass(frozen=True)
class Stop:
    """Verdict of the guard: end the run."""

    reason: str
    report: str
    """The reason for the end and the rollbacks before it, a line each."""


Verdict = Fine | Advice | Rollback | Stop


@dataclass(frozen=True)
class _Sound:
    """A step without suspicion, which the medians include; its norm is None if the loss scaler skipped the step."""

    step: int
    loss: float | None
    log_norm: float | None


@dataclass(frozen=True)
class _PastRollback:
    """A rollback that the guard ordered earlier, and why."""

    step: int
    to_before: int
    reason: str


class Guard:
    """Detects faults of a run; the caller passes each step's numbers to `observe` and follows the verdict.

    After a rollback, steps are repeated: when a step is observed again, the earlier observations of it and of all later steps
    are forgotten. A step that the scaler skipped may be followed by another of the same number. Rollbacks are not forgotten, so
    the guard is saved with the run, but not rolled back with it.

    Example:
        >>> Guard(config.GuardSection()).observe(Observation(step=0, loss=2.0, grad_norm=1.0))
        Fine()
    """

    def __init__(self, options: config_sections.GuardSection) -> None:
        self.options = options
        self._sound: list[_Sound] = []
        self._recent: list[tuple[int, bool]] = []
        """(step, whether its loss was high) of the last three steps."""
        self._clipped: list[tuple[int, bool]] = []
        self._halved: list[int] = []
        self._scale: float | None = None
        self._searching = True
        self._rollbacks: list[_PastRollback] = []

    def observe(self, seen: Observation) -> Verdict:
        """Return the verdict on a step: what to do before the next one. Step numbers may decrease only after a rollback."""
        if not self.options.on:
            return Fine()
        if not self._recent or seen.step < self._recent[-1][0]:
            self._forget_from(seen.step)
        self._halved = [step for step in self._halved if step > seen.step - self.options.window]
        finite = seen.finite and math.isfinite(seen.grad_norm)
        high = self._high_loss(seen.loss)
        self._recent = [*self._recent, (seen.step, bool(high))][-3:]
        self._note_scale(seen, finite)

        broken = seen.loss is not None and not math.isfinite(seen.loss)
        if broken or high and sum(was_high for _, was_high in self._recent) > 1:
            return self._fault(seen.step, high)
        if not finite and seen.scale is None:
            return self._fault(seen.step, "a gradient is not finite")
        if len(self._halved) >= self.options.halvings:
            window, times = self.options.window, len(self._halved)
            return self._fault(seen.step, f"the loss scale fell {times} times within {window} steps, to {seen.scale}")
        long = self._long_gradient(seen.grad_norm) if finite else ""
        if long:
            return self._fault(seen.step, long)

        advice = [f"step {seen.step}: {high}; one such step is passed over"] if high else []
        if not high:
            log_norm = math.log(max(seen.grad_norm, 1e-300)) if finite else None
            self._sound = [*self._sound, _Sound(seen.step, seen.loss, log_norm)][-self.options.window :]
        advice += self._clipping(seen)
        return Advice("; ".join(advice)) if advice else Fine()

    def broken(self, step: int, reason: str) -> Verdict:
        """Return the verdict on the last observed step if something other than its metrics, `reason`, shows a broken model.

        Rollback or Stop; Fine if the guard is off.
        """
        return self._fault(step, reason) if self.options.on else Fine()

    def lr_scale(self, step: int) -> float:
        """Factor of the schedule's learning rate at a step, below 1 for some time after a rollback.

        Each rollback contributes a factor that is f = `lr_factor` at its first suspicious step t and returns to 1 linearly:
        f + (1 − f)·(step − t)/lr_return. Factors of several rollbacks multiply. Steps before t are repeated unchanged, so that
        nothing depends on how far back the restored state was.
        """
        scale = 1.0
        for past in self._rollbacks:
            passed = step - past.to_before
            if 0 <= passed < self.options.lr_return:
                scale *= self.options.lr_factor + (1 - self.options.lr_factor) * passed / self.options.lr_return
        return scale

    @property
    def calm(self) -> bool:
        """Whether none of the last three losses was high, so that no later rollback needs a state from before this step."""
        return not any(high for _, high in self._recent)

    def state_dict(self) -> dict[str, Any]:
        """The stored observations of past steps and the rollbacks, as JSON values."""
        return {
            "sound": [[sound.step, sound.loss, sound.log_norm] for sound in self._sound],
            "recent": [list(entry) for entry in self._recent],
            "clipped": [list(entry) for entry in self._clipped],
            "halved": list(self._halved),
            "scale": self._scale,
            "searching": self._searching,
            "taken": [asdict(past) for past in self._rollbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raises `GramianError` if a key is missing or unknown."""
        if set(state) != set(self.state_dict()):
            raise GramianError(f"guard state: got {sorted(state)}; expected {sorted(self.state_dict())}")
        self._sound = [_Sound(*entry) for entry in state["sound"]]
        self._recent = [(step, high) for step, high in state["recent"]]
        self._clipped = [(step, clipped) for step, clipped in state["clipped"]]
        self._halved = list(state["halved"])
        self._scale = state["scale"]
        self._searching = state["searching"]
        self._rollbacks = [_PastRollback(**past) for past in state["taken"]]

    def _forget_from(self, step: int) -> None:
        """Forget the observations of `step` and of later steps, because it is observed again."""
        self._sound = [sound for sound in self._sound if sound.step < step]
        self._recent = [entry for entry in self._recent if entry[0] < step]
        self._clipped = [entry for entry in self._clipped if entry[0] < step]
        self._halved = [halved for halved in self._halved if halved < step]

    def _high_loss(self, loss: float | None) -> str:
        """Text that says why a loss is too high; "" if it is not."""
        if loss is None:
            return ""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        losses = [sound.loss for sound in self._sound if sound.loss is not None]
        if not self._enough(losses):
            return ""
        middle, deviation = _middle(losses)
        allowed = max(self.options.spike_deviations * deviation, self.options.spike_nats)
        if loss <= middle + allowed:
            return ""
        return f"the loss {loss:.4g} is more than {allowed:.3g} nats above its median {middle:.4g}"

    def _long_gradient(self, norm: float) -> str:
        """Text that says why a gradient norm is too large; "" if it is not."""
        logs = [sound.log_norm for sound in self._sound if sound.log_norm is not None]
        if not self._enough(logs) or norm <= 0:
            return ""
        middle, deviation = _middle(logs)
        allowed = max(
            math.log(self.options.gradient_factor),
            self.options.spike_deviations * deviation,
            max(logs) + math.log(2) - middle,
        )
        if math.log(norm) <= middle + allowed:
            return ""
        return (
            f"the gradient norm {norm:.3g} is more than {math.exp(allowed):.3g} times its median {math.exp(middle):.3g}"
        )

    def _enough(self, values: Sequence[float]) -> bool:
        return len(values) >= min(ENOUGH, self.options.window)

    def _suspects(self, step: int) -> tuple[int, ...]:
        """Numbers of the suspicious steps, in ascending order.

        These are `step`, the overflows of a falling loss scale, and all steps from the one before the first high loss on.
        """
        steps = {step, *(self._halved if len(self._halved) >= self.options.halvings else [])}
        high = [seen for seen, was_high in self._recent if was_high]
        if high:
            known = [*(sound.step for sound in self._sound), *(seen for seen, _ in self._recent)]
            before = max((seen for seen in known if seen < high[0]), default=high[0])
            steps |= {before, *(seen for seen, _ in self._recent if seen >= high[0])}
        return tuple(sorted(steps))

    def _note_scale(self, seen: Observation, finite: bool) -> None:
        """Record a halving of the loss scale, except to 1 or more while the scaler searches for its first scale."""
        fell = seen.scale is not None and self._scale is not None and seen.scale < self._scale
        if fell and (not self._searching or (seen.scale or 0) < 1):
            self._halved.append(seen.step)
        self._scale = seen.scale
        self._searching = self._searching and not finite

    def _clipping(self, seen: Observation) -> list[str]:
        window = self.options.window
        self._clipped = [*self._clipped, (seen.step, seen.clipped)][-window:]
        share = sum(clipped for _, clipped in self._clipped) / window
        if len(self._clipped) < window or share <= self.options.clip_share:
            return []
        self._clipped = []
        return [
            f"step {seen.step}: {share:.0%} of the last {window} gradients were clipped, more than "
            f"{self.options.clip_share:.0%}; a lower optimizer.lr may help"
        ]

    def _fault(self, step: int, reason: str) -> Rollback | Stop:
        """Order a rollback of the suspicious steps, or the end of the run after `max_rollbacks`."""
        skip = self._suspects(step)
        close = [past for past in self._rollbacks if past.step > step - ROLLBACK_STEPS]
        if len(close) >= self.options.max_rollbacks:
            lines = [f"step {past.step}: {past.reason}; rolled back to before step {past.to_before}" for past in close]
            last = f"step {step}: {reason}; guard.max_rollbacks = {self.options.max_rollbacks} within {ROLLBACK_STEPS} steps"
            return Stop(reason, "\n".join([*lines, last]))
        self._rollbacks.append(_PastRollback(step, skip[0], reason))
        self._sound = [sound for sound in self._sound if sound.step < skip[0]]
        self._recent = []
        self._halved = []
        self._scale = None
        return Rollback(skip[0], skip, reason, self.lr_scale(skip[0]))


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation (1.4826 · median absolute deviation) of `values`."""
    middle = median(values)
    return middle, NORMAL * median([abs(value - middle) for value in values])
