"""Copies between a GPU and pinned host memory on a stream of their own, in parallel with computation.

To the host: a copy begins when the work queued before it is done, and goes on beside what is queued after it. The GPU's
memory is reused when the copy is done (`record_stream`). The copy may be read on the CPU when a later `mark` has passed.

To the GPU: a block of rows is on its way while the one before it is multiplied, and no more than two are on the GPU.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Lane:
    """The copy stream of one GPU, beside the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Create the copy stream of a GPU."""
        self.device, self._stream = device, torch.cuda.Stream(device)

    def send(self, t: Tensor) -> Tensor:
        """Copy a GPU tensor to pinned host memory; it may be read when a `mark` made after this call has passed."""
        there = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(t, non_blocking=True)
        t.record_stream(self._stream)
        return there

    def fetch(self, pinned: Tensor) -> tuple[Tensor, Any]:
        """(copy of a pinned tensor on the GPU, event after which the copy is complete)."""
        with torch.cuda.stream(self._stream):
            return pinned.to(self.device, non_blocking=True), self._stream.record_event()

    def receive(self, t: Tensor, event: Any) -> Tensor:
        """Let the current stream wait for the event of a fetched tensor, and return the tensor."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        t.record_stream(current)
        return t

    def mark(self) -> Any:
        """An event that passes after the last copy on this stream."""
        return self._stream.record_event()

    def work_mark(self) -> Any:
        """An event that passes after the work queued on the current stream so far."""
        return torch.cuda.current_stream(self.device).record_event()


_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane:
    """The copy stream (`Lane`) of a GPU, created on first use."""
    if device not in _lanes:
        _lanes[device] = Lane(device)
    return _lanes[device]


def blocks_on(body: Tensor, blocks: Iterable[slice], device: torch.device | None) -> Iterator[tuple[slice, Tensor]]:
    """(slice, rows of `body` on `device`) for all blocks; pinned rows are fetched while the block before is in use."""
    if device is None or device.type != "cuda" or not body.is_pinned():
        for rows in blocks:
            yield rows, body[rows].to(device=device)
        return
    yield from _ahead(lane_of(device), body, blocks)


def _ahead(lane: Lane, body: Tensor, blocks: Iterable[slice]) -> Iterator[tuple[slice, Tensor]]:
    """(slice, rows on the GPU) as they arrive: the next block is fetched before this one is yielded, at most two at a time."""
    waiting: deque[tuple[slice, Tensor, Any]] = deque()
    worked: deque[Any] = deque()
    for rows in blocks:
        if len(worked) > 1:
            worked.popleft().synchronize()
        waiting.append((rows, *lane.fetch(body[rows])))
        if len(waiting) > 1:
            ready, part, event = waiting.popleft()
            yield ready, lane.receive(part, event)
            del part
            worked.append(lane.work_mark())
    for ready, part, event in waiting:
        yield ready, lane.receive(part, event)
