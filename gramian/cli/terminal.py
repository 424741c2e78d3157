"""What every command prints with: a console, lines and tables, and a progress bar for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal."""


class Update(Protocol):
    """Shows progress: units done, units in total, and a few words on the state."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """Redraw."""


def make_console(quiet: bool = False) -> Console:
    """Make the console of standard output; quiet for all processes but the first."""
    from rich.console import Console

    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, quiet=quiet)


def show(console: Console, *parts: RenderableType) -> None:
    """Print lines, which are neither wrapped nor read as markup, and tables."""
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def make_table(*headings: str, title: str | None = None) -> Table:
    """Make a table without borders; columns whose heading begins with ">" are aligned right and do not wrap."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right)
    return table


def add_group(table: Table, name: str, rows: Iterable[Iterable[RenderableType]]) -> None:
    """Add rows under one name, which the first of them shows, and a line below them."""
    for number, row in enumerate(rows):
        table.add_row("" if number else name, *row)
    table.add_section()


def verdict_text(passed: bool) -> Text:
    """A green "ok" or a red "FAILED"."""
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("FAILED", style="bold red")


def in_parts(parts: int, line: Callable[[int, int, str], None]) -> Update:
    """Report progress by at most `parts` calls of `line(done, total, text)`, where the output is not a terminal."""
    reached = 0

    def update(done: int, total: int, text: str = "", /) -> None:
        nonlocal reached
        part = done * parts // max(1, total)
        if part > reached and done < total:
            line(done, total, text)
        reached = part

    return update


@contextmanager
def progress_bar(console: Console, title: str = "") -> Iterator[Update]:
    """Show a bar with the remaining time on a terminal, and nothing elsewhere."""
    if not console.is_terminal or console.quiet:
        yield lambda done, total, text="", /: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(TextColumn(title), *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text="", /: bar.update(task, completed=done, total=total, description=text)
