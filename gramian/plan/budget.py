"""Memory limits in bytes, and the search for the largest or smallest number that fits into one."""

from collections.abc import Callable
from dataclasses import dataclass

from gramian.core.byte_amounts import format_bytes

USABLE = 0.9
"""Fraction of a memory that plans use; the rest is left to contexts, workspaces and fragmentation."""


@dataclass(frozen=True)
class Budget:
    """Number of bytes that a plan may use; None: no limit, or an unknown one."""

    limit: int | None = None

    @classmethod
    def of_memory(cls, memory: int | None) -> "Budget":
        """The budget of a memory of `memory` bytes: 90 % of it (`USABLE`); no limit for None."""
        return cls(None if memory is None else int(USABLE * memory))

    def fits(self, size: int) -> bool:
        """True if `size` bytes are within the limit, or if there is no limit."""
        return self.limit is None or size <= self.limit

    def __str__(self) -> str:
        """The limit with its unit, such as "72.00 GB", or "none"."""
        return "none" if self.limit is None else format_bytes(self.limit)


def smallest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest number in [low, high] for which `fits` is true, by bisection; None: not even `high` fits.

    All numbers above one that fits must fit.
    """
    if low > high or not fits(high):
        return None
    below = low - 1
    while high - below > 1:
        middle = (below + high) // 2
        below, high = (below, middle) if fits(middle) else (middle, high)
    return high


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] for which `fits` is true, by bisection; None: not even `low` fits.

    All numbers below one that fits must fit.
    """
    found = smallest_fitting(-high, -low, lambda negative: fits(-negative))
    return None if found is None else -found
