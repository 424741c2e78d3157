"""Offload factors from a GPU to pinned host memory, one after the other, in parallel with computation."""

from typing import Any, TypeVar

from gramian.linalg import pinned
from gramian.linalg.factors.factor import Factor

AnyFactor = TypeVar("AnyFactor", bound=Factor)


class Offload:
    """Copies factors from a GPU to the host one at a time; each call waits for the previous copy, which bounds GPU memory."""

    def __init__(self) -> None:
        """Start without a copy in flight."""
        self._last: Any = None

    def __call__(self, factor: AnyFactor) -> AnyFactor:
        """Wait for the previous copy and start that of `factor`; returns the factor in host memory, valid after `settle`.

        The trace is computed on the GPU before the copy, and products of the result are computed on that GPU.
        """
        home = factor.device
        trace, lane = factor.trace(), pinned.lane_of(home)
        self.settle()
        moved = factor.moved(lambda t: lane.send(t) if t.device == home else t.to("cpu"), home)
        moved._pending_trace = trace
        self._last = lane.mark()
        return moved

    def settle(self) -> None:
        """Wait until the last copy to the host is complete."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
