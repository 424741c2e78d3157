"""`gramian verify`: hold the library against its oracles on this very machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed, refuse_unavailable
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from gramian.parallel.world import World
    from gramian.verify.checks import VerifyCheck, VerifyOutcome

TARGETS = ("kfac", "clipping", "distill", "resume")
LATER = ()
USAGE = {
    "kfac": "gramian verify kfac [--fsdp] [--tp] [--verbose]",
    "clipping": "gramian verify clipping [--fsdp] [--verbose] [--profile]",
    "distill": "gramian verify distill [--fsdp] [--verbose]",
    "resume": "gramian verify resume [CONFIG.toml] [--fsdp] [--verbose]",
}
KILLS = 4
"""Runs that `verify resume` kills."""
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
    parser.add_argument("--fsdp", action="store_true", help="with fully_shard (FSDP2) in place of DDP")
    parser.add_argument("--profile", action="store_true", help="clipping: where the time of the private steps went")
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="resume: of the run that is killed, shortened")
    parser.add_argument("--tp", action="store_true", help="kfac: with tensor-parallel linears; with --fsdp a 2-D mesh")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print what came of them; under torchrun the first process alone prints."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        options: dict[str, object] = {}
        if arguments.target != "kfac":
            options |= {"--tp": arguments.tp}
        if arguments.target != "resume":
            options |= {"CONFIG": arguments.config}
        if arguments.target != "clipping":
            options |= {"--profile": arguments.profile}
        refuse_unavailable(USAGE.get(arguments.target, ""), arguments.target, TARGETS, LATER, options)
        if arguments.target == "kfac":
            _verify_kfac(arguments, first)
        elif arguments.target == "clipping":
            _verify_clipping(arguments, first)
        elif arguments.target == "distill":
            _verify_distill(arguments, first)
        else:
            _verify_resume(arguments, first)
    except (GramianError, RunFailed) as problem:
        if first:
            raise
        return 2 if isinstance(problem, GramianError) else 1
    return 0


def _verify_kfac(arguments: argparse.Namespace, first: bool) -> None:
    """One process against the oracle; several, or FSDP2 and tensor parallelism on one, against one process."""
    from gramian.parallel.world import started_by_torchrun

    if started_by_torchrun() or arguments.fsdp or arguments.tp:
        return _verify_kfac_of_processes(arguments, first)

    from gramian.verify import kfac_matrix
    from gramian.verify.checks import run_checks

    console = _console()
    checks = kfac_matrix.plan()
    with _progress(console, len(checks)) as on_progress:
        outcomes = run_checks(checks, on_progress)
    _report(
        console,
        outcomes,
        f"K-FAC on {_machine()} against the dense float64 oracle on the CPU",
        "Errors: norm of the difference over norm of the reference, per layer. s.e.: standard errors.",
        arguments.verbose,
    )
    failed = {outcome.check.title: outcome.problem for outcome in outcomes if not outcome.passed}
    _conclude(console, arguments.target, failed, outcomes, len(checks))


def _verify_kfac_of_processes(arguments: argparse.Namespace, first: bool) -> None:
    from gramian.verify import kfac_processes
    from gramian.verify.model_layouts import ModelLayout

    def layout(where: World) -> ModelLayout:
        return ModelLayout(where, arguments.fsdp, arguments.tp)

    _verify_together(
        arguments,
        first,
        lambda where: kfac_processes.plan(layout(where)),
        lambda where: (
            f"K-FAC on {_machine()} {layout(where)}, against one process: the dense float64 oracle on the CPU"
        ),
        "Errors: norm of the difference over norm of the reference, per layer; of bound: over what the record says it may be.",
    )


def _verify_clipping(arguments: argparse.Namespace, first: bool) -> None:
    from gramian.privacy.clipping.step_timing import Stopwatch
    from gramian.verify import clipping_matrix

    stopwatch = Stopwatch(on=True) if arguments.profile else None
    _verify_together(
        arguments,
        first,
        lambda where: clipping_matrix.plan(where, stopwatch=stopwatch),
        lambda where: f"Clipping on {_machine()}{_spread(where)} against a float64 loop of single samples on the CPU",
        "Errors: norm of the difference over the norms of the clipped gradients that are added up, per parameter.",
        lambda: [] if stopwatch is None else [_time_table(stopwatch.report(), arguments.verbose)],
    )


def _verify_distill(arguments: argparse.Namespace, first: bool) -> None:
    from gramian.verify import distill_matrix

    _verify_together(
        arguments,
        first,
        lambda where: distill_matrix.plan(where),
        lambda where: f"Distillation on {_machine()}{_spread(where)} against eager float64 on the CPU",
        "Errors: norm of the difference over norm of the reference.",
    )


def _verify_together(
    arguments: argparse.Namespace,
    first: bool,
    plan: Callable[[World], Sequence[VerifyCheck]],
    title: Callable[[World], str],
    legend: str,
    more: Callable[[], Sequence[RenderableType]] = tuple,
) -> None:
    """Run collective checks on the processes that torchrun started, or on this one; all come to the same verdict.

    Args:
        arguments: of the command.
        first: whether this process prints.
        plan: makes the checks, the same on all processes.
        title: says what was compared.
        legend: says what errors are.
        more: what is printed below the tables.
    """
    from gramian.parallel.world import world
    from gramian.verify.agreement import agree
    from gramian.verify.checks import run_checks

    console = _console(quiet=not first)
    with world(cpu=False, fsdp=arguments.fsdp or arguments.tp) as where:
        checks = plan(where)
        with _progress(console, len(checks)) as on_progress:
            outcomes = run_checks(checks, on_progress, stop_at_crash=where.size > 1)
        crash = next((outcome.crash for outcome in outcomes if outcome.crash), "")
        cause = where.first_failure(f"crashed: {crash}") if crash else ""
    failed = agree(where, outcomes)
    if where.size > 1 and cause:  # what the others crashed of then is that this one was gone
        failed = {title: cause if "crashed: " in problem else problem for title, problem in failed.items()}
    _report(console, outcomes, title(where), legend, arguments.verbose)
    for part in more():
        console.print(part)
    _conclude(console, arguments.target, failed, outcomes, len(checks))


def _spread(where: World) -> str:
    return {"one": "", "ddp": f" DDP over {where.size},", "fsdp2": f" FSDP2 over {where.size},"}[where.kind]


def _verify_resume(arguments: argparse.Namespace, first: bool) -> None:
    """Kill runs and resume them, in processes of their own; under torchrun as many as there are here."""
    import tempfile
    from pathlib import Path

    from gramian.parallel.world import world
    from gramian.train.config.config import load_config, parse_config
    from gramian.verify import resume

    config = resume.shortened(load_config(arguments.config) if arguments.config else parse_config({}), arguments.fsdp)
    console = _console(quiet=not first)
    found: dict[str, list[str]] = {}
    with world(cpu=True, fsdp=False) as where:
        if first:
            kills = resume.random_kills(config.run.steps, KILLS, seed=0)
            with tempfile.TemporaryDirectory() as folder, _bar(console, KILLS + 1) as on_progress:
                found = resume.check_resume(config, Path(folder), kills, where.size, on_progress)
        failed = where.most(float(any(found.values()))) > 0
    for kill, told in found.items():
        console.print(
            f"{'FAILED' if told else 'ok'}  {kill}{': ' if told else ''}{'; '.join(told[:NAMED])}", markup=False
        )
        for line in told if arguments.verbose else []:
            console.print(f"    {line}", markup=False)
    console.print(
        f"{sum(not told for told in found.values())} of {len(found)} killed and resumed runs of {config.run.steps} steps on "
        f"{where.size} process{'es' if where.size > 1 else ''} ended bitwise where the run that was not killed ended",
        soft_wrap=True,
    )
    if failed:
        raise RunFailed(
            "resume: a resumed run is not the run it was; expected parameters, optimizer and metrics bitwise equal"
        )


def _console(quiet: bool = False) -> Console:
    from rich.console import Console

    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=PLAIN_WIDTH)


def _report(console: Console, outcomes: Sequence[VerifyOutcome], title: str, legend: str, verbose: bool) -> None:
    """The tables, and what was held to a declared approximation."""
    if verbose:
        for outcome in outcomes:
            console.print(_comparison_table(outcome))
    console.print(title, markup=False, soft_wrap=True)
    console.print(_check_table(outcomes))
    console.print(legend, soft_wrap=True)
    for line in _notes(outcomes):
        console.print(line, markup=False, soft_wrap=True)


def _conclude(
    console: Console, target: str, failed: Mapping[str, str], outcomes: Sequence[VerifyOutcome], total: int
) -> None:
    """Print what failed, and how many of the checks passed: those after a crash of a collective one did not run.

    Raises:
        RunFailed: if something failed.
    """
    for title, problem in failed.items():
        console.print(f"FAILED {title}: {problem}", markup=False, soft_wrap=True, style="red")
    passed = sum(outcome.check.title not in failed for outcome in outcomes)
    waiting = total - len(outcomes)
    console.print(f"{passed} of {total} checks passed{f', {waiting} did not run' if waiting else ''}", markup=False)
    if failed:
        names = "; ".join(list(failed)[:NAMED])
        more = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        raise RunFailed(f"verify {target}: {len(failed)} of {total} checks failed: {names}{more}")


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, VerifyCheck], None]]:
    """Show a live bar on a terminal, and nothing elsewhere."""
    with _bar(console, total) as show:
        yield lambda done, check: show(done, check.title)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar with a word about what is done."""
    if not console.is_terminal:
        yield lambda done, told: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, told: bar.update(task, completed=done, description=told)


def _check_table(outcomes: Sequence[VerifyOutcome]) -> RenderableType:
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


def _comparison_table(outcome: VerifyOutcome) -> RenderableType:
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


def _time_table(report: Sequence[Mapping[str, Any]], verbose: bool) -> RenderableType:
    """Mean times of the private steps, a row per phase and way; verbose: per parameter, too."""
    from rich import box
    from rich.table import Table

    table = Table(title="time of the private steps", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("phase", *["parameter"] * verbose, "way"):
        table.add_column(heading)
    for heading in ("calls", "total ms", "ms a call"):
        table.add_column(heading, justify="right", no_wrap=True)
    sums: dict[tuple[str, ...], tuple[int, float]] = {}
    for line in report:
        key = (line["phase"], *[line["what"]] * verbose, line["way"])
        calls, total = sums.get(key, (0, 0.0))
        sums[key] = calls + line["calls"], total + line["calls"] * line["milliseconds"]
    for key, (calls, total) in sorted(sums.items()):
        table.add_row(*key, f"{calls:,}", f"{total:,.1f}", f"{total / calls:.3f}")
    return table


def _error(error: float, unit: str) -> str:
    return f"{error:.2f} {unit}" if unit else f"{error:.1e}"


def _tolerance(check: VerifyCheck) -> str:
    return f"{check.tolerance:g} {check.unit}" if check.unit else f"{check.tolerance:.0e}"


def _machine() -> str:
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    return f"{where}, torch {torch.__version__},"


def _verdict(passed: bool) -> Text:
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("FAILED", style="bold red")


def _notes(outcomes: Sequence[VerifyOutcome]) -> Iterator[str]:
    """Where the library was held to what its record declares instead of to the exact thing."""
    found: dict[str, set[str]] = {}
    for outcome in outcomes:
        for seen in outcome.comparisons:
            if seen.declared:
                found.setdefault(seen.declared, set()).add(f"{outcome.check.model} {seen.layer}")
    for declared, where in found.items():
        yield f"note: {declared}, as kfac.record() says and as was compared, in: {', '.join(sorted(where))}"
