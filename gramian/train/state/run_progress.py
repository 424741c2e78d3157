"""How far a run has come: the integers that, with the config, determine the next batch and learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from gramian.core.errors import GramianError

TRAIL = 200
"""Number of recent attempts (tried optimizer steps) whose data positions are kept."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come: step, data position and what was skipped; a new value replaces it after every step.

    Example:
        >>> RunProgress().after(position=0, stepped=True).step
        1
    """

    step: int = 0
    """Number of optimizer steps taken."""
    position: int = 0
    """Data position of the next batch: its index in the run's sequence of batches."""
    attempt: int = 0
    """Number of steps tried, including those that the loss scaler skipped or that were rolled back."""
    tokens: int = 0
    """Number of tokens of all steps whose metrics have arrived."""
    skipped: frozenset[int] = frozenset()
    """Data positions (indices in the run's sequence of batches) whose batches are left out after rollbacks."""
    trail: tuple[tuple[int, int], ...] = ()
    """(step, data position) of the last `TRAIL` attempts (tried optimizer steps)."""
    repeats_until: int = 0
    """Steps before this one were logged before a rollback and are computed again."""
    best: Mapping[str, Any] | None = None
    """{"loss": lowest validation loss, "step": its step}; None before the first evaluation."""
    evaluated: int = 0
    """Step of the last evaluation."""
    unhealthy: bool = False
    """Whether the last evaluation found dead or saturated spiking units."""

    @property
    def repeating(self) -> bool:
        """Whether the next step repeats one that was logged before a rollback."""
        return self.step < self.repeats_until

    def after(self, position: int, stepped: bool) -> Self:
        """Progress after trying a step on the batch at `position`; `stepped` is False if the loss scaler skipped the step."""
        return replace(
            self,
            step=self.step + stepped,
            position=position + 1,
            attempt=self.attempt + (not self.repeating),
            trail=(*self.trail, (self.step, position))[-TRAIL:],
        )

    def step_facts(self) -> dict[str, Any]:
        """The part of the progress that is known when a step was taken, as JSON values."""
        return {
            "step": self.step,
            "position": self.position,
            "attempt": self.attempt,
            "skipped": sorted(self.skipped),
            "trail": [list(entry) for entry in self.trail],
            "repeats_until": self.repeats_until,
        }

    def judged_facts(self) -> dict[str, Any]:
        """The part of the progress that depends on metrics and evaluations (tokens, best loss), as JSON values."""
        return {name: getattr(self, name) for name in ("tokens", "best", "evaluated", "unhealthy")}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The progress that a checkpoint saved in its JSON values; raises `GramianError` naming one that is missing."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in facts]
        if missing:
            raise GramianError(f"facts: the checkpoint has no {missing[0]!r}; expected one that this version wrote")
        trail = tuple((step, position) for step, position in facts["trail"])
        saved = {name: facts[name] for name in names}
        return cls(**{**saved, "skipped": frozenset(facts["skipped"]), "trail": trail})

    def rolled_back(self, saved: Self, to_before: int, bad: frozenset[int], repeatable: bool) -> Self:
        """Progress after a rollback to `saved`; attempts, the best loss and a private run's draws are not taken back.

        `to_before` is the first suspicious step, `bad` the data positions that are left out from now on. `repeatable` is False
        in a private run, which repeats the steps on new draws of data.
        """
        repeats_until = to_before if repeatable else self.repeats_until
        return replace(
            self.restored(saved, repeatable),
            skipped=self.skipped | bad,
            repeats_until=repeats_until,
            evaluated=min(self.evaluated, max(saved.step, repeats_until)),
        )

    def restored(self, saved: Self, repeatable: bool) -> Self:
        """Progress at the step of `saved`, with the skipped positions, attempts and evaluations of this one.

        The data position is that of `saved` only if steps are `repeatable`.
        """
        position = saved.position if repeatable else self.position
        return replace(self, step=saved.step, tokens=saved.tokens, trail=saved.trail, position=position)
