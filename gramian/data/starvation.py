"""Measure the fraction of a step that is spent waiting for data, and recommend the option that would reduce it."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

STARVED = 0.05
"""Fraction of the step time above which waiting for data is reported."""


class StarvationMeter:
    """Measures the time that training waits for its next batch, and recommends the data option to change.

    Args:
        window: number of recent intervals (times between calls of `share`) that the advice is based on.
        cores: CPU cores for this process; None: its affinity, divided by the number of processes that torchrun started.

    Example:
        >>> meter = StarvationMeter()
        >>> with meter.wait():
        ...     batch = next(batches)
        >>> meter.share(step_seconds=0.2)
    """

    def __init__(self, window: int = 50, cores: int | None = None) -> None:
        self.seconds = 0.0
        """Seconds waited since the last call of `share`."""
        self._cores = _own_cores() if cores is None else cores
        self._intervals: deque[tuple[float, float]] = deque(maxlen=window)
        self._started = False

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Context manager that times the wait for a batch; the times add up until the next call of `share`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def share(self, step_seconds: float) -> float:
        """End an interval of one or more steps that took `step_seconds`; returns the fraction spent waiting, 0 … 1.

        The first interval, in which workers start, is ignored by `advice`.
        """
        waited, self.seconds = self.seconds, 0.0
        if self._started:
            self._intervals.append((waited, step_seconds))
        self._started = True
        return min(1.0, waited / step_seconds) if step_seconds > 0 else 0.0

    def advice(self, workers: int, prefetch: int) -> str | None:
        """Return one line that names the option to change, given the options in use (`workers`, `prefetch`).

        None if at most 5 % of the recent time was spent waiting, or if fewer than 5 intervals were measured. Without workers,
        the line recommends some. If less than half of the intervals waited, batches come fast enough on average, and a longer
        queue (`prefetch`) is recommended; otherwise more workers or, if every core has one, faster reading.
        """
        total = sum(seconds for _, seconds in self._intervals)
        share = sum(waited for waited, _ in self._intervals) / total if total > 0 else 0.0
        if len(self._intervals) < 5 or share <= STARVED:
            return None
        found = f"{share:.0%} of the time waits for data"
        if workers == 0:
            return f"data.workers: {found}; try {max(1, min(4, self._cores))} in place of 0"
        waiting = sum(waited > STARVED * seconds for waited, seconds in self._intervals)
        if 2 * waiting < len(self._intervals):
            return f"data.prefetch: {found}, in bursts; try {2 * prefetch} in place of {prefetch}"
        if workers < self._cores:
            return f"data.workers: {found}; try {min(2 * workers, self._cores)} in place of {workers}"
        return f"data.files: {found} with a worker on each of {self._cores} cores; try a faster disk"


def _own_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
