"""Switch the loss on features (residual streams of some layers) on at a step, and off for good if the validation loss rises."""

import math
from collections.abc import Mapping
from typing import Any


class FeatureSwitch:
    """The weight of the loss on features: 0 before `begin`, then `weight`, then 0 again if validation gets worse.

    The baseline is the last validation loss up to step `begin`, or the first one after it if there is none. If a later loss is
    more than log(1 + tolerance) nats above it (the perplexity rises by more than the tolerance), the weight is 0 from then on.
    Steps that are repeated after a rollback have the same weight as before.
    """

    def __init__(self, weight: float, begin: int, tolerance: float) -> None:
        """Set the weight while on, the first step (from 0) with features, and the tolerated relative rise of the perplexity."""
        self.full, self.begin, self.tolerance = weight, begin, tolerance
        self._measures: list[list[Any]] = []
        """[steps done, validation loss] of every baseline so far; the last one is in use."""
        self.killed_at: int | None = None
        """Number of steps done when a validation switched the loss on features off; None: it has not been switched off."""

    def weight(self, step: int) -> float:
        """The weight of the loss on features at step number `step`, counted from 0."""
        killed = self.killed_at is not None and step >= self.killed_at
        return self.full if step >= self.begin and not killed else 0.0

    def validated(self, done: int, loss: float) -> str | None:
        """Record the validation loss after `done` steps; returns a message if it rose so far that the loss on features ends."""
        if self.killed_at is not None or not self.full:
            return None
        if done <= self.begin or not self._measures:
            self._measures.append([done, loss])
            return None
        limit = float(self._measures[-1][1]) + math.log1p(self.tolerance)
        if loss <= limit:
            return None
        self.killed_at = done
        return (
            f"validation loss {loss:.4f} is above {limit:.4f}, {100 * self.tolerance:g} % more perplexity than before the "
            "feature loss began: it is off from here on"
        )

    def forget_after(self, done: int) -> None:
        """Undo the effect of validations after more than `done` steps, for a rollback that repeats those steps."""
        self._measures = [measure for measure in self._measures if measure[0] <= done]
        if self.killed_at is not None and self.killed_at > done:
            self.killed_at = None

    def state_dict(self) -> dict[str, Any]:
        """The baselines and the step of switching off, for a checkpoint."""
        return {"measures": [list(measure) for measure in self._measures], "killed_at": self.killed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._measures, self.killed_at = [list(measure) for measure in state["measures"]], state["killed_at"]
