"""How much of a step is spent waiting for data, and which knob would shorten it."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

STARVED = 0.05
"""Share of the time from which on waiting for data is worth a line."""


class StarvationMeter:
    """Times the waits for the next batch.

    Args:
        window: intervals that advice looks back on.
        cores: of the machine, for this process; None: those it may run on, shared among the processes that torchrun started.
    """

    def __init__(self, window: int = 50, cores: int | None = None) -> None:
        self.seconds = 0.0
        """Waited since the last `share`."""
        self._cores = _own_cores() if cores is None else cores
        self._intervals: deque[tuple[float, float]] = deque(maxlen=window)
        self._started = False

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around the wait for a batch; waits add up until `share`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def share(self, step_seconds: float) -> float:
        """Close an interval, a step or several, of `step_seconds` with its waits: the share of it that was waited, 0 … 1.

        The first interval, in which workers start, does not count for advice.
        """
        waited, self.seconds = self.seconds, 0.0
        if self._started:
            self._intervals.append((waited, step_seconds))
        self._started = True
        return min(1.0, waited / step_seconds) if step_seconds > 0 else 0.0

    def advice(self, workers: int, prefetch: int) -> str | None:
        """One line that names the knob to turn if more than 5 % of the recent time was waited, else None.

        No workers: have some. Waits in less than half of the intervals: batches come fast enough on average, so a longer queue
        bridges the gaps. Waits in most: more workers, unless every core has one; then reading itself is too slow.
        """
        total = sum(seconds for _, seconds in self._intervals)
        share = sum(waited for waited, _ in self._intervals) / total if total > 0 else 0.0
        if len(self._intervals) < 5 or share <= STARVED:
            return None
        told = f"{share:.0%} of the time waits for data"
        if workers == 0:
            return f"data.workers: {told}; try {max(1, min(4, self._cores))} in place of 0"
        waiting = sum(waited > STARVED * seconds for waited, seconds in self._intervals)
        if 2 * waiting < len(self._intervals):
            return f"data.prefetch: {told}, in bursts; try {2 * prefetch} in place of {prefetch}"
        if workers < self._cores:
            return f"data.workers: {told}; try {min(2 * workers, self._cores)} in place of {workers}"
        return f"data.files: {told} with a worker on each of {self._cores} cores; try a faster disk, or tokens in place of text"


def _own_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
