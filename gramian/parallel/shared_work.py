"""Work that processes divide among themselves: they succeed or fail together, and all of them have the whole result.

Parts of the work run without collectives, however long they take; before processes exchange anything they announce that they
have finished their part, or why they cannot (`rendezvous`), so that none waits for one that is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.parallel.exchange import exchange_of
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.rendezvous import Rendezvous, next_number

Items = TypeVar("Items", bound=Sequence[Any])
LONGEST_PART = timedelta(days=1)
"""How long processes that have finished their part wait for the others; torchrun ends them sooner if one of these is gone."""


class SharedWork:
    """The processes of a grid with one piece of work; all call the same methods in the same order. One process: no exchange.

    ```python
    shared = SharedWork(grid)
    with shared.together():
        rows = compute(shared.part(samples))
    all_rows = shared.gather(rows)
    ```
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self._exchange = exchange_of(grid.group, grid.device) if grid.size > 1 else None
        self._before: Rendezvous | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager around a part of the work without collectives: an error on one process ends the work on all.

        That process raises its own error, the others a GramianError "process R: reason" (with the type of the error unless
        it is a GramianError). All wait for the slowest, not in a collective.
        """
        if self._exchange is None:
            yield
            return
        meeting = Rendezvous(self.grid.group, f"shared work {next_number(self.grid.group)}", LONGEST_PART)
        try:
            yield
        except BaseException as error:
            own = isinstance(error, GramianError)
            meeting.decline(str(error) if own else f"{type(error).__name__}: {error}")
            raise
        absent, self._before = meeting.wait_for_all(self._before), meeting
        if absent:
            raise GramianError(absent)

    def first(self, make: Callable[[], Any]) -> Any:
        """The JSON value that `make` returns on the first process, on all of them; if it raises there, all raise."""
        made = None
        with self.together():
            if self.grid.rank == 0:
                made = make()
        return self.all(made)[0]

    def all(self, message: Any) -> list[Any]:
        """The JSON values of all processes, in rank order."""
        return [message] if self._exchange is None else self._exchange.gather_messages(message)

    def part(self, items: Items) -> Items:
        """The items of this process: consecutive ones, numbers that differ by at most 1, none where there are too few."""
        if self._exchange is None:
            return items
        mine: Any = items[self._exchange.features(len(items))[self.grid.rank]]
        return mine  # type: ignore[no-any-return]

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of all processes along the first axis, in rank order; one without rows may give any empty tensor."""
        if self._exchange is None:
            return rows
        found = self._exchange.gather_messages([len(rows), list(rows.shape[1:]), str(rows.dtype)])
        rest, dtype = next(((rest, dtype) for count, rest, dtype in found if count), found[0][1:])
        if not len(rows):
            rows = torch.empty(0, *rest, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self.grid.device)
        return self._exchange.gather_rows(rows, [count for count, _, _ in found])
