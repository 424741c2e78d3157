"""Times of the parts of a private step: `GRAMIAN_PROFILE=1` records them without ever waiting for the device.

Times are pairs of CUDA events (wall clock on a CPU) in a ring buffer; `report` reads them after the step.
"""

import os
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

ENTRIES = 100_000
"""Number of entries of the ring buffer: some hundred steps of a large model."""
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Entry:
    """Time, FLOPs and bytes of one timed part of a step."""

    step: int
    phase: str
    """"backward", "norm", "factors", "clip", "communication", "noise" or "step"."""
    what: str
    """Name of the parameter or layer; empty if there is none."""
    way: str
    flops: float
    nbytes: float
    span: Any
    """(start, end) of the work: CUDA events or seconds."""

    @property
    def milliseconds(self) -> float:
        """Duration of the work in milliseconds; it must be over on the device."""
        start, end = self.span
        if isinstance(start, float):
            return float(end - start) * 1e3
        return float(start.elapsed_time(end))


class Stopwatch:
    """Records times while it is on; off, `time` returns one shared empty context, which costs nothing.

    ```python
    stopwatch = Stopwatch(on=True)
    with stopwatch.time("norm", "fc.weight", cuda=x.is_cuda):
        x @ w
    stopwatch.report()
    ```
    """

    def __init__(self, on: bool | None = None) -> None:
        """Switch on or off; None: on if the environment variable GRAMIAN_PROFILE is set and not 0."""
        variables = ("GRAMIAN_PROFILE", "OPACUS_PROFILE_FSDP")
        here, elsewhere = (os.environ.get(variable, "0") not in ("", "0") for variable in variables)
        if on is None and elsewhere and not here:
            warnings.warn("OPACUS_PROFILE_FSDP: has no effect here; expected GRAMIAN_PROFILE=1", stacklevel=3)
        self.on = here if on is None else on
        self.step = 0
        self.entries: deque[Entry] = deque(maxlen=ENTRIES)

    def time(
        self, phase: str, what: str = "", way: str = "", flops: float = 0.0, nbytes: float = 0.0, cuda: bool = False
    ) -> AbstractContextManager[Any]:
        """Context manager that records the time of the code inside it; nothing while the stopwatch is off.

        `phase` and `what` (parameter or layer), `way` (how the parameter is clipped), `flops` and `nbytes` are stored with the
        time; `cuda` measures by CUDA events instead of the wall clock.
        """
        return self._timed(phase, what, way, flops, nbytes, cuda) if self.on else _NOTHING

    def now(self, cuda: bool) -> Any:
        """The present time (a CUDA event if `cuda`), as a start for `add`; None while the stopwatch is off."""
        return _now(cuda) if self.on else None

    def add(self, phase: str, start: Any, cuda: bool) -> None:
        """Record an entry for work that began at `start`, a result of `now`, and ends at this call."""
        if self.on and start is not None:
            self.entries.append(Entry(self.step, phase, "", "", 0.0, 0.0, (start, _now(cuda))))

    @contextmanager
    def _timed(self, phase: str, what: str, way: str, flops: float, nbytes: float, cuda: bool) -> Iterator[None]:
        start = _now(cuda)
        yield
        self.entries.append(Entry(self.step, phase, what, way, flops, nbytes, (start, _now(cuda))))

    def report(self) -> list[dict[str, Any]]:
        """List of dicts: calls, mean milliseconds, TFLOP/s and bytes by (phase, parameter, way). Waits for the device."""
        if any(not isinstance(entry.span[0], float) for entry in self.entries):
            torch.cuda.synchronize()
        sums: dict[tuple[str, str, str], list[float]] = {}
        for entry in self.entries:
            total = sums.setdefault((entry.phase, entry.what, entry.way), [0, 0.0, 0.0, 0.0])
            for i, value in enumerate((1, entry.milliseconds, entry.flops, entry.nbytes)):
                total[i] += value
        return [
            {
                "phase": phase,
                "what": what,
                "way": way,
                "calls": int(calls),
                "milliseconds": milliseconds / calls,
                "teraflops": flops / milliseconds / 1e9 if milliseconds > 0 else 0.0,
                "bytes": nbytes / calls,
            }
            for (phase, what, way), (calls, milliseconds, flops, nbytes) in sums.items()
        ]


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
