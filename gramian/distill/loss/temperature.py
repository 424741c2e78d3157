"""The temperature T of distillation: fixed, scheduled, learned, or adversarial.

A learned temperature moves by plain gradient steps on r, with T = low + (high − low) σ(r). It is not a parameter of the model,
so weight decay, clipping and Adam do not change it. Its state stays on the device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gramian.core.errors import GramianError

NEAR = 0.01
"""T counts as at a bound if it is within this fraction of the range from `low` to `high`."""
STUCK_STEPS = 100
"""Number of consecutive steps at a bound of T after which an event is logged."""
EARLY_STEPS = 20
"""Number of first non-zero gradients dL/dT whose mean later moves the comparison temperature `temperature_schedule_only`."""

TemperatureKind = Literal["fixed", "schedule", "learnable", "adversarial"]


@dataclass(frozen=True)
class TemperatureOptions:
    """Options of the temperature T: whether it is fixed, scheduled, learned or adversarial, and its bounds and rate."""

    kind: TemperatureKind = "fixed"
    start: float = 2.0
    end: float = 1.0
    """T at the last step of a linear schedule."""
    low: float = 1.0
    high: float = 5.0
    rate: float = 0.1
    """Learning rate of r, where T = low + (high − low) · sigmoid(r)."""
    free: float = 0.2
    """Fraction of the steps before an adversarial T begins to move; its strength then rises from 0 to 1 along half a cosine."""

    def __post_init__(self) -> None:
        """Raise a GramianError that names the first field out of range."""
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
        """True if gradients of the loss move T."""
        return self.kind in ("learnable", "adversarial")


class Temperature:
    """The temperature T of each step: `begin` returns it; `finish` moves it by dL/dT if it is learned or adversarial.

    A second, comparison temperature is moved by the same first 20 non-zero gradients, and then by their mean as a constant
    gradient. If T stays close to it, later gradients have taught T nothing.

    Example:
        >>> temperature = Temperature(TemperatureOptions("schedule", start=4.0, end=1.0), 10, torch.device("cpu"))
        >>> float(temperature.begin(9))
        1.0
    """

    FIELDS = ("temperature", "temperature_gradient", "temperature_schedule_only", "temperature_stuck")
    """Names of the numbers that `values` returns: T, dL/dT of the last step, T under a constant gradient, steps at a bound."""

    def __init__(self, options: TemperatureOptions, steps: int, device: torch.device) -> None:
        """Set T to its start, for a run of `steps` steps whose loss is computed on `device`."""
        self.options, self.steps = options, steps
        share = (options.start - options.low) / (options.high - options.low)
        raw = math.log(share / (1 - share)) if options.learns else 0.0
        # [r, dL/dT, r of a constant gradient, Σ of the first dL/dT, its terms, steps on a bound]
        self._state = torch.tensor([raw, 0, raw, 0, 0, 0], dtype=torch.float64, device=device)
        self._leaf: Tensor | None = None

    def begin(self, step: int) -> Tensor:
        """T of step number `step`, 0-dim float32; it requires grad if T learns."""
        options = self.options
        if options.learns:
            self._leaf = self._bounded(self._state[0]).float().detach().requires_grad_()
            return self._leaf
        share = step / max(1, self.steps - 1) if options.kind == "schedule" else 0.0
        value = options.start + min(1.0, share) * (options.end - options.start)
        return torch.full((), value, device=self._state.device)

    def finish(self, step: int, gradient: Tensor | None) -> None:
        """Take one gradient step on r, T = low + (high − low) · sigmoid(r): down the loss if T is learned, up if adversarial.

        `gradient` is dL/dT over all processes, unscaled; T stays if it is None or not finite.
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
        """dL/dT that the backward passes of this step left on this process; None if T does not learn."""
        if self._leaf is None:
            return None
        return torch.zeros_like(self._leaf) if self._leaf.grad is None else self._leaf.grad

    def strength(self, step: int) -> float:
        """Factor on the learning rate at a step: 1 for a learned T; for an adversarial T 0 at first, then rising to 1."""
        if self.options.kind != "adversarial":
            return 1.0
        begin = self.options.free * self.steps
        share = min(1.0, max(0.0, (step - begin) / max(1.0, self.steps - 1 - begin)))
        return 0.5 * (1 - math.cos(math.pi * share))

    def values(self, step: int) -> Tensor:
        """The four numbers named by `FIELDS` for this step, [4] float64."""
        raw, gradient, alone, _, _, stuck = self._state.unbind()
        if not self.options.learns:
            value = self.begin(step).to(torch.float64)
            return torch.stack([value, torch.zeros_like(value), value, torch.zeros_like(value)])
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
        """The state of T as a tensor, for a checkpoint."""
        return {"temperature": self._state.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._state = state["temperature"].to(self._state)
