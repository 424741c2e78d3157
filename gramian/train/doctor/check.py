"""The result of one check of a run by the doctor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 3
"""Maximum number of parameter or file names in a hint; the check's details list all of them."""


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
    """The measured number; NaN if there is none."""
    details: tuple[str, ...] = ()
    """One line for each finding, such as a parameter or a graph break."""


def named(names: Sequence[str]) -> str:
    """Join the first three names, and count the rest: "a, b, c and 4 more"."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
