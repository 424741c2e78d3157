"""What distillation adds to a training step: the teacher's signal, a temperature, a weight of the feature loss, and metrics."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramian.distill.cache.reader import Cache
from gramian.distill.distill_objective import REPORTED_SUMS
from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.loss_metrics import metrics_of
from gramian.distill.loss.temperature import STUCK_STEPS, Temperature
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, Signal
from gramian.parallel.process_grid import ProcessGrid

EXTRA_FIELDS = (*REPORTED_SUMS[1:], *Temperature.FIELDS)
"""Names, in order, of the values that a training step with a teacher reports in addition to those of a plain step."""


class Teaching:
    """A teacher with the state of distillation from step to step: temperature, feature weight, and which events are logged.

    Args:
        source: live teacher or cache that returns the signal of a micro-batch.
        temperature: T of each step.
        switch: weight of the loss on features at each step.
        grid: the process grid of the run.
        correlation: an evaluation logs an event if Pearson's r between the targets' log-probabilities under student and teacher
            is below this.
    """

    def __init__(
        self,
        source: LiveTeacher | Cache,
        temperature: Temperature,
        switch: FeatureSwitch,
        grid: ProcessGrid,
        *,
        correlation: float = 0.9,
    ) -> None:
        self.source, self.temperature, self.switch, self.grid = source, temperature, switch, grid
        self._least_correlation = correlation
        self._correlation: float | None = None
        self._far = self._stuck = False
        self._step, self._now = 0, torch.ones(())

    @property
    def teacher(self) -> str:
        """Hash of the teacher's class, config and weights. Collective if the teacher is sharded."""
        return self.source.hash

    def begin(self, step: int) -> None:
        """Set the temperature for training step number `step`."""
        self._step, self._now = step, self.temperature.begin(step)

    def arguments(self, micro: Mapping[str, Tensor]) -> dict[str, Any]:
        """Keyword arguments of `DistillObjective` for a micro-batch: teacher's signal, temperature and feature weight."""
        signal: Signal = self.source(micro)
        return {"signal": signal, "temperature": self._now, "feature_weight": self.switch.weight(self._step)}

    def finish(self, scale: float, stepped: bool = True) -> Tensor:
        """Update T after the backward passes of a step; returns the values of `Temperature.FIELDS` for the T of that step.

        The loss of each process was multiplied by `scale` times the number of processes, which dL/dT is divided by. With
        `stepped` false (the loss scaler skipped the step) T stays.
        """
        values = self.temperature.values(self._step)
        gradient = self.temperature.gradient()
        if gradient is not None:
            gradient = self.grid.sum_(gradient.to(torch.float64)) / (scale * self.grid.size)
        self.temperature.finish(self._step, gradient if stepped else None)
        return values

    def observe_step(self, extra: Mapping[str, float]) -> list[dict[str, Any]]:
        """Record the correlation and temperature of a finished step from its `EXTRA_FIELDS`; returns the events to log."""
        self._correlation = step_metrics(extra, 1)["correlation"]
        before, self._stuck = self._stuck, extra["temperature_stuck"] >= STUCK_STEPS
        if before or not self._stuck:  # a step that the scaler skips is reported twice
            return []
        low, high = self.temperature.options.low, self.temperature.options.high
        text = (
            f"temperature {extra['temperature']:.3f} has been at a bound ({low:g} to {high:g}) for {STUCK_STEPS} steps: "
            "learning drives it to the bound; expected an adversary, a fixed temperature, or a smaller rate"
        )
        return [{"event": "temperature_stuck", "temperature": extra["temperature"], "text": text}]

    def validated(self, done: int, loss: float) -> list[dict[str, Any]]:
        """Record the validation loss after `done` steps, which may switch the feature loss off; returns the events to log."""
        events: list[dict[str, Any]] = []
        if (text := self.switch.validated(done, loss)) is not None:
            events.append({"event": "features_off", "text": text})
        correlation = self._correlation
        if correlation is not None and correlation < self._least_correlation and not self._far:
            self._far = True
            text = (
                f"correlation of the targets' log-probabilities with the teacher's is {correlation:.3f}, below "
                f"{self._least_correlation:g}; expected it to rise: by a longer run, a larger student, or a smaller temperature"
            )
            events.append({"event": "teacher_far", "correlation": correlation, "text": text})
        elif correlation is not None and correlation >= self._least_correlation:
            self._far = False  # logged again if it falls again
        return events

    def similarity(self, module: nn.Module, batch: Mapping[str, Tensor]) -> float | None:
        """Debiased CKA of the student's final hidden states with the teacher's; None if the signal has no hidden states.

        `module` is the student's `DistillObjective` in evaluation mode; `batch` has the same windows on all processes.
        """
        signal = self.source(batch)
        if not isinstance(signal, DenseSignal):
            return None
        with torch.no_grad():
            found, _ = module(
                batch["tokens"], batch["targets"], 1.0, batch.get("documents"), signal=signal, compare=True
            )
        return float(found)

    def state_dict(self) -> dict[str, Any]:
        """Temperature, feature switch and flags of reported events, for a checkpoint."""
        return {"temperature": self.temperature.state_dict(), **self.observed_state()}

    def observed_state(self) -> dict[str, Any]:
        """The part of the state that follows from reported metrics: feature switch, correlation, flags of reported events."""
        return {
            "switch": self.switch.state_dict(),
            "correlation": self._correlation,
            "far": self._far,
            "stuck": self._stuck,
        }

    def load_state_dict(self, state: Mapping[str, Any], validated: int | None = None) -> None:
        """Restore the state that `state_dict` returned.

        For a rollback, `validated` is the number of steps up to which validations are not repeated: the feature switch then
        keeps their effect instead of the state's. None: restore everything.
        """
        self.temperature.load_state_dict(state["temperature"])
        self._correlation = state["correlation"]
        if validated is None:
            self.switch.load_state_dict(state["switch"])
            self._far, self._stuck = state["far"], state["stuck"]
        else:
            self.switch.forget_after(validated)

    def close(self) -> None:
        """Close the files of the teacher's cache; a live teacher has none."""
        self.source.close()


def step_metrics(extra: Mapping[str, float], tokens: int) -> dict[str, float | None]:
    """Metrics of a step of `tokens` targets from its `EXTRA_FIELDS`; None for a metric that is not finite or not available."""
    sums = torch.tensor([extra[name] for name in REPORTED_SUMS[1:-1]], dtype=torch.float64)
    metrics = {name: float(value) for name, value in metrics_of(sums).items()}
    metrics["feature_loss"] = extra["feature_loss"] / max(1, tokens)
    metrics |= {name: extra[name] for name in Temperature.FIELDS[:3]}
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
