"""Takes the optimizer steps of a student: plain steps, with the teacher's signal in the loss and a learned temperature."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gramian.distill.teaching import EXTRA_FIELDS, Teaching, step_metrics
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.stepper import Event


class DistillingStepper(PlainStepper):
    """Takes the optimizer steps of a student that is distilled from a live or a cached teacher.

    Takes the arguments of `PlainStepper`, with a distillation objective as module, and the teacher with its temperature.
    """

    extra = EXTRA_FIELDS

    def __init__(self, *arguments: Any, teaching: Teaching, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teaching = teaching

    def teacher(self) -> str:
        """Hash of the teacher's weights; collective where the teacher is sharded."""
        return self.teaching.teacher

    def begin(self, step: int) -> None:
        """Set the temperature for step number `step`."""
        self.teaching.begin(step)

    def sections(self) -> dict[str, Any]:
        """State for a checkpoint by section: K-FAC, and distillation (temperature, feature switch, observed correlation)."""
        return {**super().sections(), "teaching": self.teaching.state_dict()}

    def judged_sections(self) -> dict[str, Any]:
        """The distillation state that follows from metrics of past steps: feature switch, correlation, and logged warnings."""
        return {"teaching": self.teaching.observed_state()}

    def load_sections(self, sections: Mapping[str, Any], validated: int | None = None) -> None:
        """Restore K-FAC, temperature and feature switch.

        In a rollback, validations up to step `validated` are not repeated, so their effect on the switch stays; else None.
        """
        super().load_sections(sections, validated)
        self.teaching.load_state_dict(sections["teaching"], validated)

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Metrics of a step for the log: distillation losses, agreement with the teacher and the temperature."""
        return step_metrics(outcome.extra, outcome.tokens)

    def observe(self, outcome: StepOutcome) -> list[Event]:
        """Remember the correlation with the teacher; returns an event for the log if the temperature stays at a bound."""
        return self.teaching.observe_step(outcome.extra)

    def validated(self, step: int, loss: float) -> list[Event]:
        """Switch off feature losses if the validation loss rises, and warn of a low correlation; returns events for the log."""
        return self.teaching.validated(step, loss)

    def _arguments(self, micro: dict[str, Tensor]) -> dict[str, Any]:
        return self.teaching.arguments(micro)

    def _announce(self, micro: dict[str, Tensor]) -> None:
        self.teaching.source.upcoming(micro)

    def _learn(self, sums: Tensor, scale: float, stepped: bool) -> Tensor:
        return self.teaching.finish(scale, stepped)
