"""Copies between a GPU and pinned host memory on a stream of their own, in parallel with computation.

To the host: a copy begins when the work queued before it is done, and runs in parallel with what is queued after it. The GPU's
memory is reused when the copy is done (`record_stream`). The CPU may read the copy once an event from a later `mark` completed.

To the GPU: a block of rows is copied while the previous one is multiplied, and no more than two are on the GPU.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Lane:
    """A CUDA stream of one GPU for copies to and from pinned host memory, parallel to the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Create the copy stream of a GPU."""
        self.device, self._stream = device, torch.cuda.Stream(device)

    def send(self, t: Tensor) -> Tensor:
        """Start to copy a GPU tensor to pinned host memory; it may be read once an event from a later `mark` has completed."""
        there = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(t, non_blocking=True)
        t.record_stream(self._stream)
        return there

    def fetch(self, pinned: Tensor) -> tuple[Tensor, Any]:
        """Start to copy a pinned tensor to the GPU; returns the GPU tensor, and an event that completes with the copy."""
        with torch.cuda.stream(self._stream):
            return pinned.to(self.device, non_blocking=True), self._stream.record_event()

    def receive(self, t: Tensor, event: Any) -> Tensor:
        """Make the current stream wait for the event of a tensor from `fetch`, and return the tensor."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        t.record_stream(current)
        return t

    def mark(self) -> Any:
        """An event that completes when all copies queued on this stream so far are done."""
        return self._stream.record_event()

    def work_mark(self) -> Any:
        """An event that completes when all work queued on the current stream so far is done."""
        return torch.cuda.current_stream(self.device).record_event()


_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane:
    """The copy stream (`Lane`) of a GPU, created on first use."""
    if device not in _lanes:
        _lanes[device] = Lane(device)
    return _lanes[device]


def blocks_on(body: Tensor, blocks: Iterable[slice], device: torch.device | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice, rows of `body` on `device`) for all blocks; pinned rows are copied while the previous block is in use.

    `device` None: the device of `body`.
    """
    if device is None or device.type != "cuda" or not body.is_pinned():
        for rows in blocks:
            yield rows, body[rows].to(device=device)
        return
    yield from _ahead(lane_of(device), body, blocks)


def _ahead(lane: Lane, body: Tensor, blocks: Iterable[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice, rows on the GPU) of pinned rows; the next block's copy starts before a block is yielded, two at a time."""
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
