"""Offloading: factors of a GPU are copied to pinned host memory one after the other, in parallel with computation."""

from typing import Any, TypeVar

from gramian.linalg import pinned
from gramian.linalg.factors.factor import Factor

AnyFactor = TypeVar("AnyFactor", bound=Factor)


class Offload:
    """Copies factors from a GPU to the host one at a time; the next waits, so at most one finished factor is on the GPU."""

    def __init__(self) -> None:
        """Start without a copy in flight."""
        self._last: Any = None

    def __call__(self, factor: AnyFactor) -> AnyFactor:
        """Return the factor in pinned host memory, readable after `settle`; its trace is computed before the copy."""
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
