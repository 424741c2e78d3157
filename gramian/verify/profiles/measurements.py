"""Median and quartiles of step times, and memory of a measured step, on a GPU and on a CPU."""

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LEAST_ITERATIONS = 10
"""Fewest timed steps of each kind that a profile accepts."""


@dataclass(frozen=True)
class TimingSpread:
    """Median and quartiles of measured seconds, as in `TimingSpread.of([0.9, 1.0, 1.2]).median`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "TimingSpread":
        """Median and quartiles of one or more measured seconds."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles, in seconds."""
        return self.high - self.low

    @property
    def noisy(self) -> bool:
        """True if the quartiles lie further apart than a quarter of the median."""
        return self.iqr > 0.25 * self.median


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step: of the CUDA allocator; on a CPU, of the process and of torch's CPU allocator. None: unknown."""

    allocated: int | None
    """Bytes allocated when a step begins; on a CPU bytes of the process in memory."""
    above: int | None
    """Maximum bytes that a step needs in addition to `allocated`."""
    reserved: int | None
    """Bytes reserved by the CUDA allocator."""

    @property
    def peak(self) -> int | None:
        """Maximum bytes at any time in a step, `allocated` + `above`; None if either is unknown."""
        return None if self.allocated is None or self.above is None else self.allocated + self.above


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context manager: bfloat16 autocast on a GPU; nothing on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def first_line(problem: BaseException) -> str:
    """Describe an exception by its type and the first line of its message."""
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"


def start_memory(device: torch.device, step: Callable[[], Any]) -> Callable[[], StepMemory]:
    """Start to measure the memory of steps on a device; call the returned function after the steps to get the result.

    On a CPU one more step is taken here, and measured.
    """
    if device.type != "cuda":
        found = StepMemory(resident_bytes(), highest_on_cpu(step), None)
        return lambda: found
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)

    def after() -> StepMemory:
        synchronize(device)
        above = torch.cuda.max_memory_allocated(device) - allocated
        return StepMemory(allocated, above, torch.cuda.memory_reserved(device))

    return after


def resident_bytes() -> int | None:
    """Bytes of this process that are in physical memory; None if the system does not report them."""
    try:
        import resource

        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (ImportError, OSError):
        return None


def peak_resident_bytes() -> int | None:
    """Maximum bytes of this process in physical memory since it began; None if the system does not report them."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def highest_on_cpu(step: Callable[[], Any]) -> int | None:
    """Run a step; returns the maximum bytes that torch's CPU allocator had in addition to those before it.

    Measured by torch's memory profiler; None if it recorded nothing.
    """
    with _no_stderr(), torch.autograd.profiler.profile(profile_memory=True) as recorded:
        step()
    found = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest or None


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Context manager: discard standard error, to which torch's memory profiler writes lines that no setting turns off."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
