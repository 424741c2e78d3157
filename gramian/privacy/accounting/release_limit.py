"""The number of releases (noised sums) that fit into a target ε: computed when it is first in doubt, not in every step."""

from collections.abc import Hashable

from gramian.core.errors import GramianError
from gramian.privacy.accounting.accountant import Accounting


class ReleaseLimit:
    """Refuses a release with which a run would spend more than (`epsilon`, `delta`).

    `planned` is a number of releases for which ε was found to suffice, so that a run as planned computes nothing. The first
    release beyond it, or after the account of the run was composed with another one's, costs some 5 to 15 evaluations of ε.
    """

    def __init__(self, epsilon: float, delta: float, planned: int = 0) -> None:
        """Limit a run to (epsilon, delta); `planned` releases are not looked at while nothing else is in the account."""
        self.epsilon, self.delta, self._planned = epsilon, delta, planned
        self._allowed: dict[Hashable, int] = {}
        """{what the account has beside steps of the present kind: number of steps that fit}."""

    def refuse(self, accounting: Accounting) -> None:
        """Raise a `GramianError` if one more step of the present kind does not fit."""
        steps = accounting.steps
        earlier = tuple(run for run in accounting.history[:-1])
        if steps < self._planned and not earlier and not accounting.others:
            return
        allowed = self._most(accounting, (accounting.kind, earlier, accounting.others))
        if steps >= allowed:
            raise GramianError(
                f"target_epsilon: {steps} releases are spent, and one more would exceed {self.epsilon:g} at delta "
                f"{self.delta:g}; expected at most {allowed}, or noise_multiplier without a target"
            )

    def _most(self, accounting: Accounting, key: Hashable) -> int:
        """Largest number of steps that fit, at least those made so far; ε grows with the number."""
        if key not in self._allowed:
            made = accounting.steps

            def fits(further: int) -> bool:
                return accounting.epsilon(self.delta, further=further) <= self.epsilon

            fitting, width = 0, max(1, (self._planned or made) // 64)
            while fits(fitting + width):
                fitting, width = fitting + width, 2 * width
            beyond = fitting + width
            while beyond - fitting > 1:
                middle = (fitting + beyond) // 2
                fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
            self._allowed[key] = made + fitting
        return self._allowed[key]
