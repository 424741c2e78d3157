"""What commands print to, and the bar that long work shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal."""


def console(quiet: bool = False) -> Console:
    """Standard output; quiet for all processes but the first."""
    from rich.console import Console

    found = Console(highlight=False, quiet=quiet)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, quiet=quiet)


@contextmanager
def bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left, told (done, total); nothing where the output is not a terminal."""
    if not console.is_terminal or console.quiet:
        yield lambda done, total: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
