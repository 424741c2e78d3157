"""What one process refuses is raised by all that train the same model, where they next meet.

If one process of a group raises an error, the remaining ones hang in their next collective. So all wait for each other before a
collective (`Rendezvous`), and a process that refused something has stored its error message there. A process of a model with
sharded weights cannot leave a backward halfway, because its weights are gathered: it finishes the backward and raises then.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ONE_PROCESS, ProcessGrid
from gramian.parallel.rendezvous import TWICE, Rendezvous, next_number


class RefusedElsewhere(GramianError):
    """What another process of the same model refused: "process R: reason"."""


class SharedRefusals:
    """The refusals of the processes of one model; with one process every error is raised at once and nothing is exchanged."""

    def __init__(self, grid: ProcessGrid = ONE_PROCESS) -> None:
        """Begin without a refusal; all processes of `grid` make this object together."""
        self._grid, self._meetings = grid, 0
        self._number = next_number(grid.group) if grid.size > 1 else 0
        self._held: GramianError | None = None
        self._told: Callable[[], GramianError | None] = lambda: None
        """A weak reference to the last error whose message was sent to, or came from, the remaining processes."""
        self._before: Rendezvous | None = None

    @property
    def in_backward(self) -> bool:
        """True if processes need each other inside a forward and backward, because they share weights or features."""
        return self._grid.shards and self._grid.size > 1

    @contextmanager
    def told(self) -> Iterator[None]:
        """Context manager: an error raised inside is stored for the other processes, which raise it too where they next meet.

        It is raised here at once; nothing waits.
        """
        try:
            yield
        except GramianError as error:
            self._tell(error)
            raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: an error raised inside is stored for the other processes, and raised here at once, as by `told`.

        Sharded weights are gathered by all processes until a backward ends: there the error waits for `meet`.
        """
        try:
            yield
        except GramianError as error:
            if not self.hold(error):
                raise

    def hold(self, error: GramianError) -> bool:
        """True if `meet` will raise this error; False if it is to be raised at once, and the others read of it."""
        if self.in_backward:
            self._held = self._held or error
        else:
            self._tell(error)
        return self.in_backward

    def meet(self, place: str) -> bool:
        """Wait until all processes are at this place, or one has refused something. One rendezvous; nothing with one process.

        Returns:
            True if any of them is at `TWICE`, because what it saves in one backward would not fit.

        Raises:
            GramianError: on all of them if one refused something (its own error there, and "process R: reason" elsewhere), or
                if processes are at different places.
        """
        held, self._held = self._held, None
        if held is not None:
            self._tell(held)
            raise held
        if self._grid.size > 1:
            meeting, before = self._next(), self._before
            self._before = meeting
            reason = meeting.wait_for_all(before, place)
            if reason and reason != TWICE:
                error = RefusedElsewhere(reason)
                self._told = weakref.ref(error)
                raise error
            place = reason or place
        return place == TWICE

    def most(self, value: float) -> float:
        """The largest of all processes' values, which they bring to an optimizer step. One rendezvous and one all-reduce."""
        self.meet("an optimizer step")
        return self._grid.most(value)

    def _tell(self, error: GramianError) -> None:
        if self._grid.size > 1 and error is not self._told():
            self._told, meeting = weakref.ref(error), self._next()
            if not isinstance(error, RefusedElsewhere):  # else that process has told it
                meeting.decline(str(error))

    def _next(self) -> Rendezvous:
        self._meetings += 1
        return Rendezvous(self._grid.group, f"meeting {self._meetings} of private model {self._number}")
