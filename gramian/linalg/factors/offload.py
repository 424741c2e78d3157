"""Factors of a GPU that are kept in pinned host memory: sent there one after the other, beside the work that goes on."""

from typing import Any, TypeVar

from gramian.linalg import pinned
from gramian.linalg.factors.factor import Factor

AnyFactor = TypeVar("AnyFactor", bound=Factor)


class Offload:
    """Sends factors away, one at a time: the next waits for it, so one at most lies on the GPU beside the one being made."""

    def __init__(self) -> None:
        """Nothing is on its way."""
        self._last: Any = None

    def __call__(self, factor: AnyFactor) -> AnyFactor:
        """The factor in pinned host memory, there after `settle`; its trace, which nobody need wait for, is known."""
        home = factor.device
        trace, lane = factor.trace(), pinned.lane_of(home)
        self.settle()
        moved = factor.moved(lambda t: lane.send(t) if t.device == home else t.to("cpu"), home)
        moved._told_trace = trace
        self._last = lane.mark()
        return moved

    def settle(self) -> None:
        """Wait until everything has arrived."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
