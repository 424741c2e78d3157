"""What all commands print with: a console, lines, tables, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_WIDTH = 120
"""Width of the output in columns if it is not a terminal."""


class Update(Protocol):
    """A callback that shows progress."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """Show that `done` of `total` units are done, with `text` describing the current state."""


def make_console(quiet: bool = False, *, outlives_reader: bool = False) -> Console:
    """Make the console that prints to standard output; with `quiet`, for all processes but the first, it prints nothing.

    With `outlives_reader`, for work that is worth more than its output, a reader that goes away, such as `head`, ends only the
    printing; otherwise the process ends.
    """
    from rich.console import Console

    class LastingConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # nothing fails when Python flushes at its end

    kind = LastingConsole if outlives_reader else Console
    console = kind(highlight=False, quiet=quiet)
    return console if console.is_terminal else kind(highlight=False, width=PLAIN_WIDTH, quiet=quiet)


def show(console: Console, *parts: RenderableType) -> None:
    """Print lines and tables on a console; lines are neither wrapped nor read as markup."""
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def make_table(*headings: str, title: str | None = None) -> Table:
    """Make a table without borders; columns whose heading begins with ">" are aligned right and do not wrap. None: no title."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right)
    return table


def add_group(table: Table, name: str, rows: Iterable[Iterable[RenderableType]]) -> None:
    """Add rows to a table under one name, which only the first row shows, and a separating line below them."""
    for number, row in enumerate(rows):
        table.add_row("" if number else name, *row)
    table.add_section()


def verdict_text(passed: bool) -> Text:
    """The verdict of a check for a table: a green "ok" if `passed`, else a red "FAILED"."""
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("FAILED", style="bold red")


def in_parts(parts: int, line: Callable[[int, int, str], None]) -> Update:
    """Make a progress callback that calls `line(done, total, text)` at most `parts` times; for output without a terminal."""
    reached = 0

    def update(done: int, total: int, text: str = "", /) -> None:
        nonlocal reached
        part = done * parts // max(1, total)
        if part > reached and done < total:
            line(done, total, text)
        reached = part

    return update


def duration(seconds: float) -> str:
    """A rough duration as text: "3 s", "5 minutes" or "2 hours"."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1, seconds):.0f} s"


@contextmanager
def progress_bar(console: Console, title: str = "") -> Iterator[Update]:
    """Context manager whose value is a progress callback; on a terminal it draws a bar with the remaining time."""
    if not console.is_terminal or console.quiet:
        yield lambda done, total, text="", /: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(TextColumn(title), *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text="", /: bar.update(task, completed=done, total=total, description=text)


@contextmanager
def later_progress_bar(console: Console, title: str) -> Iterator[Update]:
    """Context manager like `progress_bar` for work that may have been done before: nothing is drawn until its first call."""
    with ExitStack() as stack:
        bar: Update | None = None

        def update(done: int, total: int, text: str = "", /) -> None:
            nonlocal bar
            bar = bar or stack.enter_context(progress_bar(console, title))
            bar(done, total, text)

        yield update
