"""Whether a run is still sound: a pure state machine that sees a few numbers of every step and says what to do.

| fault | seen when | done |
|---|---|---|
| not finite | the loss is not, or a gradient is not and no loss scale explains it | rollback |
| loss spike | loss > median + max(d·1.4826·MAD, nats), on two of three steps | rollback |
| long gradient | norm > factor × median, d·1.4826·MAD in logarithms, and twice the longest, on one step | rollback |
| falling scale | so many halvings of the loss scale within the window | rollback |
| one high loss | as a spike, but alone | advice |
| clipping | more clipped steps in a window than `clip_share` | advice, once per window |

Medians and MADs (median absolute deviations) are of the last `window` sound steps; what was suspicious never enters them, and
nothing is compared before there are `ENOUGH` of them. A loss is judged in nats above the median, not as a multiple of it: a
collapse to the uniform distribution (ln V) is seen from any loss and for any vocabulary. A drift that is a straight line never
fires, however steep: over a window it rises by R, stands R/2 above the median and has d·1.4826·MAD = 2.2·R for d = 6. For the
same reason, and since a gradient is also compared with the longest of the window, gradients that grow step by step, as they
may where training begins with small ones, are no fault.

The loss of a step is computed before its update, so a bad loss may be the doing of the step before: that one is taken back
and skipped as well. Halvings before the first finite gradient are the scaler's search for a scale, and count only below 1.

Every process must see the same numbers in order to decide the same: reduce loss, norm and finiteness over all of them before
`observe`. There is no clock and no randomness in here. Cost: a few sorts of `window` numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gramian.core.errors import GramianError
from gramian.train.config import config

ENOUGH = 20
"""Sound steps before a loss or a norm is compared with them, or the whole window where that is shorter."""
ROLLBACK_STEPS = 1000
"""Steps within which `max_rollbacks` are allowed."""
NORMAL = 1.4826
"""MAD to standard deviation of a normal distribution."""


@dataclass(frozen=True)
class Observation:
    """What is told of one optimizer step, the same on every process."""

    step: int
    loss: float | None
    """Mean over the step's tokens, in nats, before the update; None: it is not judged."""
    grad_norm: float
    """Of the unscaled gradient, before clipping."""
    finite: bool = True
    """Whether every gradient was."""
    scale: float | None = None
    """The loss scale after the step's `GradScaler.update()`; None: there is no scaler."""
    clipped: bool = False


@dataclass(frozen=True)
class Fine:
    """Go on."""


@dataclass(frozen=True)
class Advice:
    """Go on, and tell."""

    text: str


@dataclass(frozen=True)
class Rollback:
    """Restore the newest state from before a step, and pass over some steps on the way back."""

    to_before: int
    """The first suspicious step: the state to restore has not made it."""
    skip: tuple[int, ...]
    """Steps whose data is not to be seen again."""
    reason: str
    lr_factor: float
    """`Guard.lr_scale` at `to_before`."""


@dataclass(frozen=True)
class Stop:
    """Give up."""

    reason: str
    report: str
    """The reason and what came before it, a line each."""


Verdict = Fine | Advice | Rollback | Stop


@dataclass(frozen=True)
class _Sound:
    """A step that the medians are taken over; the norm is None where the scaler skipped the step."""

    step: int
    loss: float | None
    log_norm: float | None


@dataclass(frozen=True)
class _Taken:
    """A rollback that was ordered."""

    step: int
    to_before: int
    reason: str


class Guard:
    """Feed every step to `observe` and do what it says.

    After a rollback steps come again: what was seen of a step and of all later ones is forgotten when it is observed anew. A
    step that the scaler skipped may be followed by another of the same number. Rollbacks are not forgotten, so the guard is
    saved with the run, but not rolled back with it.

    Args:
        options: thresholds; with `on = false` every step is fine.
    """

    def __init__(self, options: config.GuardSection) -> None:
        self.options = options
        self._sound: list[_Sound] = []
        self._recent: list[tuple[int, bool]] = []
        """The last three steps, and whether their loss was high."""
        self._clipped: list[tuple[int, bool]] = []
        self._halved: list[int] = []
        self._scale: float | None = None
        self._searching = True
        self._taken: list[_Taken] = []

    def observe(self, seen: Observation) -> Verdict:
        """Judge a step.

        Args:
            seen: the step; numbers never fall but after a rollback.

        Returns:
            What to do before the next step.
        """
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
        """Judge a step whose numbers were sound, after something else has shown that it broke the model.

        Args:
            step: the last one that was observed.
            reason: what has shown it.

        Returns:
            What to do: take the step back, or give up.
        """
        return self._fault(step, reason) if self.options.on else Fine()

    def lr_scale(self, step: int) -> float:
        """What the schedule's learning rate is multiplied by at a step.

        Each rollback contributes f = `lr_factor` at its first suspicious step t and returns on a straight line:
        f + (1 − f)·(step − t)/lr_return, until it is 1. Several multiply. Steps before t are repeated as they were, so that
        nothing depends on how far back the restored state lay.
        """
        scale = 1.0
        for taken in self._taken:
            passed = step - taken.to_before
            if 0 <= passed < self.options.lr_return:
                scale *= self.options.lr_factor + (1 - self.options.lr_factor) * passed / self.options.lr_return
        return scale

    @property
    def calm(self) -> bool:
        """True if none of the last steps is under suspicion: a state copied now is one that no rollback goes past."""
        return not any(high for _, high in self._recent)

    @property
    def rollbacks(self) -> int:
        """How many were ordered so far."""
        return len(self._taken)

    def state_dict(self) -> dict[str, Any]:
        """All that `observe` remembers, for JSON."""
        return {
            "sound": [[sound.step, sound.loss, sound.log_norm] for sound in self._sound],
            "recent": [list(entry) for entry in self._recent],
            "clipped": [list(entry) for entry in self._clipped],
            "halved": list(self._halved),
            "scale": self._scale,
            "searching": self._searching,
            "taken": [asdict(taken) for taken in self._taken],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            GramianError: if something is missing or unknown.
        """
        if set(state) != set(self.state_dict()):
            raise GramianError(f"guard state: got {sorted(state)}; expected {sorted(self.state_dict())}")
        self._sound = [_Sound(*entry) for entry in state["sound"]]
        self._recent = [(step, high) for step, high in state["recent"]]
        self._clipped = [(step, clipped) for step, clipped in state["clipped"]]
        self._halved = list(state["halved"])
        self._scale = state["scale"]
        self._searching = state["searching"]
        self._taken = [_Taken(**taken) for taken in state["taken"]]

    def _forget_from(self, step: int) -> None:
        """A step that comes again replaces what was seen of it and of later ones."""
        self._sound = [sound for sound in self._sound if sound.step < step]
        self._recent = [entry for entry in self._recent if entry[0] < step]
        self._clipped = [entry for entry in self._clipped if entry[0] < step]
        self._halved = [halved for halved in self._halved if halved < step]

    def _high_loss(self, loss: float | None) -> str:
        """Why a loss is high; empty if it is not."""
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
        """Why a gradient is too long; empty if it is not."""
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
        """The step, overflows in the window of a falling scale, and all from the step before the first high loss on."""
        steps = {step, *(self._halved if len(self._halved) >= self.options.halvings else [])}
        high = [seen for seen, was_high in self._recent if was_high]
        if high:
            known = [*(sound.step for sound in self._sound), *(seen for seen, _ in self._recent)]
            before = max((seen for seen in known if seen < high[0]), default=high[0])
            steps |= {before, *(seen for seen, _ in self._recent if seen >= high[0])}
        return tuple(sorted(steps))

    def _note_scale(self, seen: Observation, finite: bool) -> None:
        """Remember a halving, unless the scaler is still searching for its first scale."""
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
        """Take back the suspicious steps, or give up where that was done too often."""
        skip = self._suspects(step)
        close = [taken for taken in self._taken if taken.step > step - ROLLBACK_STEPS]
        if len(close) >= self.options.max_rollbacks:
            lines = [
                f"step {taken.step}: {taken.reason}; rolled back to before step {taken.to_before}" for taken in close
            ]
            last = f"step {step}: {reason}; guard.max_rollbacks = {self.options.max_rollbacks} within {ROLLBACK_STEPS} steps"
            return Stop(reason, "\n".join([*lines, last]))
        self._taken.append(_Taken(step, skip[0], reason))
        self._sound = [sound for sound in self._sound if sound.step < skip[0]]
        self._recent = []
        self._halved = []
        self._scale = None
        return Rollback(skip[0], skip, reason, self.lr_scale(skip[0]))


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = _median(values)
    return middle, NORMAL * _median([abs(value - middle) for value in values])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
