"""What distillation adds to a step: the teacher's signal, a temperature, the weight of features, and what they tell."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramian.distill.cache.reader import Cache
from gramian.distill.distill_objective import TOLD
from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.loss_metrics import metrics_of
from gramian.distill.loss.temperature import STUCK_STEPS, Temperature
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, Signal
from gramian.parallel.world import World

EXTRA = (*TOLD[1:], *Temperature.FIELDS)
"""Beside a step's own values, in this order."""


class Teaching:
    """A teacher and the state of being taught; one step after another."""

    def __init__(
        self,
        source: LiveTeacher | Cache,
        temperature: Temperature,
        switch: FeatureSwitch,
        world: World,
        *,
        correlation: float = 0.9,
    ) -> None:
        """Hold them.

        Args:
            source: gives the signal of a micro-batch.
            temperature: T.
            switch: of the loss on features.
            world: this process among the others.
            correlation: of gold log-probabilities with the teacher's, below which an event is told at the end of an evaluation.
        """
        self.source, self.temperature, self.switch, self.world = source, temperature, switch, world
        self._least = correlation
        self._correlation: float | None = None
        self._far = self._stuck = False
        self._step, self._now = 0, torch.ones(())

    @property
    def teacher(self) -> str:
        """Hash of the model that teaches; of a sharded one asked for by all processes."""
        return self.source.hash if isinstance(self.source, LiveTeacher) else self.source.manifest.identity.teacher

    def begin(self, step: int) -> None:
        """A step of this number is about to be taken."""
        self._step, self._now = step, self.temperature.begin(step)

    def arguments(self, micro: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the objective is called with for a micro-batch, beside tokens and targets."""
        signal: Signal = self.source(micro)
        return {"signal": signal, "temperature": self._now, "feature_weight": self.switch.weight(self._step)}

    def finish(self, scale: float, stepped: bool = True) -> Tensor:
        """After the backwards: T moves, if the student did.

        Args:
            scale: that the loss was multiplied by, beside the number of processes.
            stepped: False if the loss scaler skipped the step.

        Returns:
            `Temperature.FIELDS`, of the T that the step used.
        """
        told = self.temperature.values(self._step)
        gradient = self.temperature.gradient()
        if gradient is not None:
            gradient = self.world.sum_(gradient.to(torch.float64)) / (scale * self.world.size)
        self.temperature.finish(self._step, gradient if stepped else None)
        return told

    def heard(self, extra: Mapping[str, float]) -> list[dict[str, Any]]:
        """The extra values of a step have arrived: events that they give rise to."""
        self._correlation = told(extra, 1)["correlation"]
        before, self._stuck = self._stuck, extra["temperature_stuck"] >= STUCK_STEPS
        if before or not self._stuck:  # a step that the scaler skips comes twice
            return []
        low, high = self.temperature.options.low, self.temperature.options.high
        text = (
            f"temperature {extra['temperature']:.3f} has been at a bound ({low:g} to {high:g}) for {STUCK_STEPS} steps: "
            "what it learned is to run away; expected an adversary, a fixed temperature, or a smaller rate"
        )
        return [{"event": "temperature_stuck", "temperature": extra["temperature"], "text": text}]

    def validated(self, done: int, loss: float) -> list[dict[str, Any]]:
        """A validation loss after so many steps: events that it, and how far the student is from its teacher, give rise to."""
        found: list[dict[str, Any]] = []
        if (text := self.switch.validated(done, loss)) is not None:
            found.append({"event": "features_off", "text": text})
        correlation = self._correlation
        if correlation is not None and correlation < self._least and not self._far:
            self._far = True
            text = (
                f"correlation of the targets' log-probabilities with the teacher's is {correlation:.3f}, below "
                f"{self._least:g}; expected it to rise: by a longer run, a larger student, or a smaller temperature"
            )
            found.append({"event": "teacher_far", "correlation": correlation, "text": text})
        elif correlation is not None and correlation >= self._least:
            self._far = False  # told again if it falls again
        return found

    def similarity(self, module: nn.Module, batch: Mapping[str, Tensor]) -> float | None:
        """Debiased CKA of final hidden states with the teacher's; None where the teacher has none to show.

        Args:
            module: the student's objective, in evaluation mode.
            batch: a few windows; all processes ask for the same.
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
        """What a resumed run goes on from."""
        return {"temperature": self.temperature.state_dict(), **self.heard_state()}

    def heard_state(self) -> dict[str, Any]:
        """The part of it that follows from numbers that were heard, not from steps that were taken."""
        return {
            "switch": self.switch.state_dict(),
            "correlation": self._correlation,
            "far": self._far,
            "stuck": self._stuck,
        }

    def load_state_dict(self, state: Mapping[str, Any], validated: int | None = None) -> None:
        """Take it over.

        Args:
            state: as of `state_dict`.
            validated: of a rollback: validations after at most so many steps are not made again, so what they said stays.
        """
        self.temperature.load_state_dict(state["temperature"])
        self._correlation = state["correlation"]
        if validated is None:
            self.switch.load_state_dict(state["switch"])
            self._far, self._stuck = state["far"], state["stuck"]
        else:
            self.switch.forget_after(validated)

    def close(self) -> None:
        """Let go of a cache's files."""
        if isinstance(self.source, Cache):
            self.source.close()


def told(extra: Mapping[str, float], tokens: int) -> dict[str, float | None]:
    """Metrics of a step from its extra values; None: unknown for this kind of teacher, or without tokens."""
    sums = torch.tensor([extra[name] for name in TOLD[1:-1]], dtype=torch.float64)
    found = {name: float(value) for name, value in metrics_of(sums).items()}
    found["feature_loss"] = extra["feature_loss"] / max(1, tokens)
    found |= {name: extra[name] for name in Temperature.FIELDS[:3]}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
