"""Losses on features begin late, and end if the student gets worse by them."""

import math
from collections.abc import Mapping
from typing import Any


class FeatureSwitch:
    """A weight that is 0 before a step, then what it is told, then 0 again if validation says so.

    The measure is the newest validation loss before the features began, or the first after, if there was none. Whenever a later
    one is more than log(1 + tolerance) nats above it (the perplexity has risen by more than the tolerance), features end for
    good. Steps that are taken again have the weight that they had.
    """

    def __init__(self, weight: float, begin: int, tolerance: float) -> None:
        """Before the first step.

        Args:
            weight: while on.
            begin: first step with features.
            tolerance: by how much of itself the perplexity may rise.
        """
        self.full, self.begin, self.tolerance = weight, begin, tolerance
        self._measures: list[list[Any]] = []
        """[steps taken before it, validation loss] of all that were the measure; the last one is."""
        self.killed_at: int | None = None
        """Step of the validation that ended it."""

    def weight(self, step: int) -> float:
        """Of a step, counted from 0."""
        killed = self.killed_at is not None and step >= self.killed_at
        return self.full if step >= self.begin and not killed else 0.0

    def validated(self, done: int, loss: float) -> str | None:
        """Hear a validation loss.

        Args:
            done: steps taken before it.
            loss: in nats per token.

        Returns:
            What to tell, if it ended the features now.
        """
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
        """Validations after so many steps are made again: what they said is taken back."""
        self._measures = [measure for measure in self._measures if measure[0] <= done]
        if self.killed_at is not None and self.killed_at > done:
            self.killed_at = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"measures": [list(measure) for measure in self._measures], "killed_at": self.killed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self._measures, self.killed_at = [list(measure) for measure in state["measures"]], state["killed_at"]
