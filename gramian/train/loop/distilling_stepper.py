"""An optimizer step of a student: the plain step, with the teacher's signal and the learned temperature beside it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gramian.distill.teaching import EXTRA_FIELDS, Teaching, step_metrics
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.stepper import Event


class DistillingStepper(PlainStepper):
    """Distillation from a live or a cached teacher.

    Takes the arguments of `PlainStepper`, with a distillation objective as module, and the teacher with its temperature.
    """

    extra = EXTRA_FIELDS

    def __init__(self, *arguments: Any, teaching: Teaching, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teaching = teaching

    def teacher(self) -> str:
        """Hash of the teacher; collective where it is sharded."""
        return self.teaching.teacher

    def begin(self, step: int) -> None:
        """Announce the number of the next step to the temperature's schedule."""
        self.teaching.begin(step)

    def sections(self) -> dict[str, Any]:
        """State of K-FAC and of the temperature."""
        return {**super().sections(), "teaching": self.teaching.state_dict()}

    def judged_sections(self) -> dict[str, Any]:
        """What the teacher's metrics of past steps have shown."""
        return {"teaching": self.teaching.observed_state()}

    def load_sections(self, sections: Mapping[str, Any], validated: int | None = None) -> None:
        """Restore K-FAC and the temperature; see `Stepper.load_sections`."""
        super().load_sections(sections, validated)
        self.teaching.load_state_dict(sections["teaching"], validated)

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Distillation losses, agreement with the teacher and the temperature."""
        return step_metrics(outcome.extra, outcome.tokens)

    def observe(self, outcome: StepOutcome) -> list[Event]:
        """Take note of the agreement with the teacher; returns events for the log."""
        return self.teaching.observe_step(outcome.extra)

    def validated(self, step: int, loss: float) -> list[Event]:
        """Switch off feature losses where the validation loss says so; returns events for the log."""
        return self.teaching.validated(step, loss)

    def _arguments(self, micro: dict[str, Tensor]) -> dict[str, Any]:
        return self.teaching.arguments(micro)

    def _announce(self, micro: dict[str, Tensor]) -> None:
        self.teaching.source.upcoming(micro)

    def _learn(self, sums: Tensor, scale: float, stepped: bool) -> Tensor:
        return self.teaching.finish(scale, stepped)
