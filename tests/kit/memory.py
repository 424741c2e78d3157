"""Bytes that the CPU's allocator gives out while something runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

MARK = 987_654
"""Bytes that nothing else asks for: a request for them says where in the course of events something began."""


class Measured:
    """Bytes that the allocator gave out, at the peak and at the end; since the mark, more than there were then."""

    peak = left = since_mark = 0


def mark() -> None:
    torch.empty(MARK, dtype=torch.uint8)


@contextmanager
def measured() -> Iterator[Measured]:
    """Count every request to the CPU's allocator, those inside of operators included.

    Memory that is freed inside counts only if it was requested inside: what earlier tests left would hide as many bytes.
    """
    gc.collect()
    found = Measured()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        yield found
    live: dict[int, int] = {}
    there = None
    for _, count, address in sorted(_requests(told)):
        if abs(count) == MARK:
            there = found.left
            continue
        if count < 0 and address not in live:
            continue
        live[address] = count
        if count < 0:
            del live[address]
        found.left += count
        found.peak = max(found.peak, found.left)
        if there is not None:
            found.since_mark = max(found.since_mark, found.left - there)


def _requests(told: profile) -> Iterator[tuple[int, int, int]]:
    """(time, bytes, address) of every request, with fewer than 0 bytes where memory is freed."""
    waiting = list(told.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr
