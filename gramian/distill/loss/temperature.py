"""The temperature of distillation: fixed, scheduled, learned, or an adversary's.

A learned temperature has a rule of its own: plain gradient steps on r, T = low + (high − low) σ(r). It is no parameter of the
model, so neither weight decay, nor clipping, nor Adam's division touches it. Everything stays on the device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gramian.core.errors import GramianError

NEAR = 0.01
"""Share of the range within which T sits on a bound."""
STUCK_STEPS = 100
"""Steps on a bound that are told."""
EARLY_STEPS = 20
"""Whose mean gradient stands for a constant one."""

Kind = Literal["fixed", "schedule", "learnable", "adversarial"]


@dataclass(frozen=True)
class TemperatureOptions:
    """How T moves."""

    kind: Kind = "fixed"
    start: float = 2.0
    end: float = 1.0
    """Of a schedule: T at the last step; linear."""
    low: float = 1.0
    high: float = 5.0
    rate: float = 0.1
    """Learning rate of r."""
    free: float = 0.2
    """Share of the steps before an adversary begins; then its strength rises from 0 to 1 along half a cosine."""

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            GramianError: naming the field.
        """
        if not 0 < self.low < self.high:
            raise GramianError(f"temperature_low: expected 0 < low < high, got {self.low} and {self.high}")
        if self.start <= 0 or self.end <= 0:
            raise GramianError(f"temperature: expected more than 0, got {min(self.start, self.end)}")
        if self.learns and not self.low < self.start < self.high:
            raise GramianError(
                f"temperature: expected more than temperature_low ({self.low}) and less than temperature_high ({self.high}) "
                f'for "{self.kind}", got {self.start}'
            )

    @property
    def learns(self) -> bool:
        """Whether the loss moves it."""
        return self.kind in ("learnable", "adversarial")


class Temperature:
    """T of every step, and how it got there.

    What was learned is told apart from what the schedule of rates alone would do: beside T goes one whose dL/dT is, after the
    first 20 steps that moved it, for ever their mean. A T that stays with it has learned nothing since: it adds up its rates.
    """

    FIELDS = ("temperature", "temperature_gradient", "temperature_schedule_only", "temperature_stuck")
    """Of `values`: T, dL/dT of the last step, T of a constant gradient, steps on a bound in a row."""

    def __init__(self, options: TemperatureOptions, steps: int, device: torch.device) -> None:
        """At its start.

        Args:
            options: how it moves.
            steps: of the run.
            device: of the loss.
        """
        self.options, self.steps = options, steps
        share = (options.start - options.low) / (options.high - options.low)
        raw = math.log(share / (1 - share)) if options.learns else 0.0
        # [r, dL/dT, r of a constant gradient, Σ of the first dL/dT, its terms, steps on a bound]
        self._state = torch.tensor([raw, 0, raw, 0, 0, 0], dtype=torch.float64, device=device)
        self._leaf: Tensor | None = None

    def begin(self, step: int) -> Tensor:
        """T of a step, 0-dim float32; one that learns asks for its gradient."""
        options = self.options
        if options.learns:
            self._leaf = self._bounded(self._state[0]).float().detach().requires_grad_()
            return self._leaf
        share = step / max(1, self.steps - 1) if options.kind == "schedule" else 0.0
        value = options.start + min(1.0, share) * (options.end - options.start)
        return torch.full((), value, device=self._state.device)

    def finish(self, step: int, gradient: Tensor | None) -> None:
        """One gradient step of r: down the loss if T is learned, up if it is an adversary's.

        Args:
            step: its number.
            gradient: dL/dT over all processes, unscaled; one that is not finite moves nothing.
        """
        self._leaf = None
        if not self.options.learns or gradient is None:
            return
        raw, _, alone, early, terms, stuck = self._state.unbind()
        rate = self._direction * self.options.rate * self.strength(step)
        gradient = gradient.detach().to(torch.float64)
        gradient = torch.where(gradient.isfinite(), gradient, 0.0)
        first = (gradient != 0) & (terms < EARLY_STEPS) if rate else torch.zeros_like(terms, dtype=torch.bool)
        early, terms = early + gradient * first, terms + first
        constant = torch.where(first, gradient, torch.where(terms < EARLY_STEPS, 0.0, early / terms.clamp(min=1)))
        raw, alone = raw - rate * gradient * self._slope(raw), alone - rate * constant * self._slope(alone)
        value, span = self._bounded(raw), self.options.high - self.options.low
        near = torch.minimum(value - self.options.low, self.options.high - value) <= NEAR * span
        stuck = torch.where(near, stuck + 1, 0.0)
        self._state = torch.stack([raw, gradient, alone, early, terms, stuck])

    def gradient(self) -> Tensor | None:
        """dL/dT of the last backwards on this process; None if T does not learn."""
        if self._leaf is None:
            return None
        return torch.zeros_like(self._leaf) if self._leaf.grad is None else self._leaf.grad

    def strength(self, step: int) -> float:
        """λ: 1 for a learned T; for an adversary 0 at first, then (1 − cos π x)/2."""
        if self.options.kind != "adversarial":
            return 1.0
        begin = self.options.free * self.steps
        share = min(1.0, max(0.0, (step - begin) / max(1.0, self.steps - 1 - begin)))
        return 0.5 * (1 - math.cos(math.pi * share))

    def values(self, step: int) -> Tensor:
        """[4] float64, after a step: see `FIELDS`."""
        raw, gradient, alone, _, _, stuck = self._state.unbind()
        if not self.options.learns:
            told = self.begin(step).to(torch.float64)
            return torch.stack([told, torch.zeros_like(told), told, torch.zeros_like(told)])
        return torch.stack([self._bounded(raw), gradient, self._bounded(alone), stuck])

    @property
    def _direction(self) -> float:
        return -1.0 if self.options.kind == "adversarial" else 1.0

    def _bounded(self, raw: Tensor) -> Tensor:
        return self.options.low + (self.options.high - self.options.low) * raw.sigmoid()

    def _slope(self, raw: Tensor) -> Tensor:
        share = raw.sigmoid()
        return (self.options.high - self.options.low) * share * (1 - share)

    def state_dict(self) -> dict[str, Any]:
        """The numbers that a resumed run goes on from."""
        return {"temperature": self._state.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._state = state["temperature"].to(self._state)
