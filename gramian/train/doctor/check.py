"""The result of one check of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 3
"""Maximum number of names in a hint; the details list all of them."""


@dataclass(frozen=True)
class Check:
    """Result of one check: a measurement, its bound, and advice."""

    name: str
    measured: str
    threshold: str
    """Bound on the measurement; "-": no bound, the measurement is information."""
    ok: bool
    hint: str = ""
    """Advice if the check failed, or a remark if it passed."""
    value: float = math.nan
    """The measured number, if there is one."""
    details: tuple[str, ...] = ()
    """One line per parameter, graph break, …"""


def named(names: Sequence[str]) -> str:
    """Join the first few names, and count the rest."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
