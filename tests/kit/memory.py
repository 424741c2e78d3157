"""Bytes that the CPU's allocator gives out while something runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
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

    What earlier tests left to the garbage collector is collected first: freed meanwhile, it would hide as many bytes.
    """
    gc.collect()
    found = Measured()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        yield found
    events = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    there = None
    for _, count in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        if abs(count) == MARK:
            there = found.left
            continue
        found.left += count
        found.peak = max(found.peak, found.left)
        if there is not None:
            found.since_mark = max(found.since_mark, found.left - there)
