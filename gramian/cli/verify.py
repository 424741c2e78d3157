"""`gramian verify`: hold the library against its oracles on this very machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from gramian.cli import RunFailed, refuse_unavailable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from gramian.verify.runs import Check, Outcome

TARGETS = ("kfac",)
LATER = ("clipping", "distill", "resume")
USAGE = "gramian verify kfac [--verbose]"
# Columns where the output is not a terminal.
PLAIN_WIDTH = 100
# Failed checks that the last line names.
NAMED = 3


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "verify",
        help="prove on this machine that the library computes what it says",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help=f"what to prove: {', '.join(TARGETS)}")
    parser.add_argument("--verbose", action="store_true", help="a row for every layer and case")
    parser.add_argument("config", nargs="?", help=argparse.SUPPRESS)
    for option in ("--fsdp", "--tp", "--profile"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print what came of them."""
    options = {
        "CONFIG": arguments.config,
        "--fsdp": arguments.fsdp,
        "--tp": arguments.tp,
        "--profile": arguments.profile,
    }
    refuse_unavailable(USAGE, arguments.target, TARGETS, LATER, options)

    from rich.console import Console

    from gramian.verify.runs import kfac_matrix, run_checks

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    checks = kfac_matrix.plan()
    with _progress(console, len(checks)) as on_progress:
        outcomes = run_checks(checks, on_progress)

    if arguments.verbose:
        for outcome in outcomes:
            console.print(_comparison_table(outcome))
    console.print(f"K-FAC on {_machine()} against the dense float64 oracle on the CPU", markup=False)
    console.print(_check_table(outcomes))
    console.print("Errors: norm of the difference over norm of the reference, per layer. s.e.: standard errors.")
    for line in _notes(outcomes):
        console.print(line, markup=False, soft_wrap=True)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        console.print(f"FAILED {outcome.check.title}: {outcome.problem}", markup=False, soft_wrap=True, style="red")
    console.print(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed", markup=False)
    if failed:
        names = "; ".join(outcome.check.title for outcome in failed[:NAMED])
        more = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        raise RunFailed(f"verify {arguments.target}: {len(failed)} of {len(outcomes)} checks failed: {names}{more}")
    return 0


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, Check], None]]:
    """Show a live bar on a terminal, and nothing elsewhere."""
    if not console.is_terminal:
        yield lambda done, check: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, check: bar.update(task, completed=done, description=check.title)


def _check_table(outcomes: Sequence[Outcome]) -> RenderableType:
    """A row per check, with the worst error that was seen."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("check")
    for heading in ("comparisons", "worst error", "tolerance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for model, group in groupby(outcomes, lambda outcome: outcome.check.model):
        for number, outcome in enumerate(group):
            table.add_row(
                "" if number else model,
                outcome.check.name,
                f"{len(outcome.comparisons):,}",
                "-" if outcome.worst is None else _error(outcome.worst.error, outcome.check.unit),
                _tolerance(outcome.check),
                _verdict(outcome.passed),
            )
        table.add_section()
    return table


def _comparison_table(outcome: Outcome) -> RenderableType:
    """A row per layer and case."""
    from rich import box
    from rich.table import Table

    title = f"{outcome.check.title} (tolerance {_tolerance(outcome.check)})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer")
    table.add_column("case")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for seen in outcome.comparisons:
        case = f"{seen.case} ({seen.declared})" if seen.declared else seen.case
        table.add_row(
            seen.layer, case, _error(seen.error, outcome.check.unit), _verdict(seen.error <= outcome.check.tolerance)
        )
    if outcome.crash:
        from rich.text import Text

        table.add_row("", Text(f"crashed: {outcome.crash}"), "-", _verdict(False))
    return table


def _error(error: float, unit: str) -> str:
    return f"{error:.2f} {unit}" if unit else f"{error:.1e}"


def _tolerance(check: Check) -> str:
    return f"{check.tolerance:g} {check.unit}" if check.unit else f"{check.tolerance:.0e}"


def _machine() -> str:
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    return f"{where}, torch {torch.__version__},"


def _verdict(passed: bool) -> Text:
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("FAILED", style="bold red")


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Where the library was held to what its record declares instead of to the exact thing."""
    found: dict[str, set[str]] = {}
    for outcome in outcomes:
        for seen in outcome.comparisons:
            if seen.declared:
                found.setdefault(seen.declared, set()).add(f"{outcome.check.model} {seen.layer}")
    for declared, where in found.items():
        yield f"note: {declared}, as kfac.record() says and as was compared, in: {', '.join(sorted(where))}"
