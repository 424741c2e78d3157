"""An exponential moving average of named tensors that is debiased from its first step on.

After step t it is Σ_s β^(t−s) w_s x_s / Σ_s β^(t−s) w_s, with values x_s, weights w_s and decay β. Both sums start at 0, so the
average divides by the weight that was really added. The usual correction by 1 − β^t would be wrong where a tensor is first seen
later, left out, or weighted.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.statistics.argument_checks import check_mapping, check_real, check_state
from gramian.statistics.reliability_weights import check_weight


class MovingAverage:
    """Debiased exponential moving averages of named tensors, float64.

    ```python
    average = gramian.statistics.MovingAverage(decay=0.99)
    average.update({"loss": loss}, weight=tokens)
    average.value()["loss"]
    ```

    Time is the number of updates: what was seen k updates ago has the factor β^k. A tensor that an update leaves out keeps its
    value. Averages are not merged, since they depend on the order: join the observations of one step first
    (`WeightedMoments.over`), then update.
    """

    def __init__(self, decay: float) -> None:
        """Set the decay β in [0, 1), otherwise a `GramianError`; with 0 the average is the last value seen."""
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise GramianError(f"decay: expected a number in [0, 1), got {decay!r}")
        self.decay = float(decay)
        self.steps = 0
        """Number of updates so far."""
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        self._last: dict[str, int] = {}
        """{name: the step up to which its total and weight are decayed}."""

    def update(self, values: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one step to the averages.

        Args:
            values: {name: tensor}, of the same shape every time.
            weight: weight of this step relative to other steps, before any decay; 0: the values do not count.

        Raises:
            GramianError: for an invalid weight or value, or another shape than before; nothing is added.
        """
        checked = check_weight(weight)
        check_mapping("values", values)
        for name, value in values.items():
            check_real(name, value)
            before = self._totals.get(name)
            if before is not None and before.shape != value.shape:
                raise GramianError(f"{name}: has shape {list(value.shape)}; expected {list(before.shape)}, as before")
        self.steps += 1
        for name, value in values.items() if checked else ():
            if name not in self._totals:
                self._totals[name] = torch.zeros_like(value, dtype=torch.float64, requires_grad=False)
                self._weights[name], self._last[name] = 0.0, self.steps
            faded = self.decay ** (self.steps - self._last[name])
            self._totals[name].mul_(faded).add_(value.detach().to(self._totals[name]), alpha=checked)
            self._weights[name] = faded * self._weights[name] + checked
            self._last[name] = self.steps

    def value(self) -> dict[str, Tensor]:
        """{name: the average so far}, float64."""
        return {name: total / self._weights[name] for name, total in self._totals.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the averages as a flat mapping of tensors, as safetensors stores it."""
        state = {"clock": torch.tensor([self.decay, self.steps], dtype=torch.float64)}
        for name, total in self._totals.items():
            state[f"total.{name}"] = total.clone()
            state[f"weight.{name}"] = torch.tensor([self._weights[name], self._last[name]], dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state_dict` of an average with the same decay.

        Raises:
            GramianError: for any other state; nothing is changed then.
        """
        check_state(state)
        names = [key.removeprefix("total.") for key in state if key.startswith("total.")]
        wanted = {"clock", *(f"{part}.{name}" for name in names for part in ("total", "weight"))}
        if set(state) != wanted:
            raise GramianError("state: holds other keys; expected what state_dict gave")
        decay, steps = _pair("clock", state["clock"], "decay and steps")
        if decay != self.decay:
            raise GramianError(f"decay: the state has {decay}; expected {self.decay}")
        if not (steps >= 0 and steps.is_integer()):
            raise GramianError(f"clock: has {steps} steps; expected a whole number")
        marks = {}
        for name in names:
            check_real(name, state[f"total.{name}"])
            weight, last = marks[name] = _pair(name, state[f"weight.{name}"], "a weight and its last step")
            if not (0 < weight < math.inf and 1 <= last <= steps and last.is_integer()):
                raise GramianError(
                    f"{name}: has weight {weight} at step {last} of {steps}; expected what state_dict gave"
                )
        self.steps = int(steps)
        self._totals = {name: state[f"total.{name}"].double().clone() for name in names}
        self._weights = {name: marks[name][0] for name in names}
        self._last = {name: int(marks[name][1]) for name in names}


def _pair(field: str, state: Tensor, meaning: str) -> tuple[float, float]:
    if state.shape != (2,) or state.is_complex():
        raise GramianError(f"{field}: the state has {list(state.shape)}; expected [2], {meaning}")
    first, second = state.double().tolist()
    return first, second
