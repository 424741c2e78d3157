"""Limits in bytes, and the search for the largest or smallest size that fits into one."""

from collections.abc import Callable
from dataclasses import dataclass

from gramian.core.byte_amounts import format_bytes

USABLE = 0.9
"""Share of a memory that plans use; the rest is left to contexts, workspaces and fragmentation."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a plan may use; None: no limit, or an unknown one."""

    limit: int | None = None

    @classmethod
    def of_memory(cls, memory: int | None) -> "Budget":
        """The usable share of a memory of so many bytes."""
        return cls(None if memory is None else int(USABLE * memory))

    def fits(self, size: int) -> bool:
        """Whether so many bytes fit."""
        return self.limit is None or size <= self.limit

    def __str__(self) -> str:
        """The limit with its unit, or "none"."""
        return "none" if self.limit is None else format_bytes(self.limit)


def smallest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest number in [low, high] that fits, where all numbers above a fitting one fit; None: `high` does not."""
    if low > high or not fits(high):
        return None
    below = low - 1
    while high - below > 1:
        middle = (below + high) // 2
        below, high = (below, middle) if fits(middle) else (middle, high)
    return high


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] that fits, where all numbers below a fitting one fit; None: `low` does not."""
    found = smallest_fitting(-high, -low, lambda negative: fits(-negative))
    return None if found is None else -found
