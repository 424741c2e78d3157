"""`gramian doctor CONFIG.toml [section.key=value …]`: examine a run before it starts; nothing is written."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gramian.cli import RunFailed
from gramian.cli.train import add_config
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.train.doctor.check import Check

# Columns where the output is not a terminal.
PLAIN_WIDTH = 120
# Failed checks that the last line names.
NAMED = 3


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="examine a run before it starts",
        description="Check data, loss, gradients, causality, schedule, memory and time of a run before it starts.",
        allow_abbrev=False,
    )
    add_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine and print the table.

    Raises:
        RunFailed: if a check failed.
    """
    from gramian.parallel.world import started_by_torchrun
    from gramian.train.config.config import load_config
    from gramian.train.doctor.examine import examine

    config = load_config(arguments.config, arguments.overrides)
    if started_by_torchrun():
        raise GramianError("doctor: examines one process; expected no torchrun")
    console, started = _console(), time.perf_counter()
    with _progress(console) as on_progress:
        checks = examine(config, on_progress=on_progress)
    console.print(_table(checks))
    for check in checks:
        for line in check.details:
            console.print(f"{check.name}: {line}", markup=False, soft_wrap=True)
    if config.privacy is not None:
        console.print("What was measured on private data is not covered by ε.", markup=False)
    failed = [check.name for check in checks if not check.ok]
    seconds = time.perf_counter() - started
    console.print(f"{len(checks) - len(failed)} of {len(checks)} checks passed in {seconds:.0f} s", markup=False)
    if failed:
        more = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        names = "; ".join(failed[:NAMED])
        raise RunFailed(f"doctor: {len(failed)} of {len(checks)} checks failed: {names}{more}")
    return 0


def _table(checks: Sequence[Check]) -> RenderableType:
    """A row per check."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("check", min_width=26, max_width=26)
    table.add_column("measured")
    table.add_column("threshold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("hint")
    for check in checks:
        verdict = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(check.name, Text(check.measured), Text(check.threshold), verdict, Text(check.hint))
    return table


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not console.is_terminal:
        yield lambda done, total, told: None
        return

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("examining"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, told: bar.update(task, completed=done, total=total, description=told)
