"""One thing that was looked at, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 3
"""Things that a hint names; all are in the details."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    measured: str
    threshold: str
    """The bound it is held to; "-": none, the number is there to be read."""
    ok: bool
    hint: str = ""
    """What to do if it is not kept; or, if it is, what is worth knowing."""
    value: float = math.nan
    """The measured number, where one was measured."""
    details: tuple[str, ...] = ()
    """A line each: parameters, graph breaks, …"""


def named(names: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
