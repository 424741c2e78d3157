"""`gramian demo [--out DIR]`: the whole pipeline on the source text of Python's standard library, in about two minutes.

A student is examined, a teacher trained and its hidden states cached; then the student is trained twice, from the cache and
with the cross entropy alone, and all three are compared. Interrupted, the same command goes on where it was; a folder that
holds a finished demo is shown again.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gramian.cli import RunFailed
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.cli.demo.demo_plan import DemoPlan
    from gramian.cli.demo.demo_result import Result
    from gramian.cli.demo.pipeline import Update

PARTS = 4
"""Lines of progress of a stage, where the output is not a terminal."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="a teacher, its cache, a distilled student and its twin without a teacher, compared",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=_seed, default=0, help="of weights, data order and texts (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run what is not done yet, and print what came of it."""
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as problem:  # ValueError: of a name that holds a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"argument --out: {out}: {why}; accepted: a folder that can be written") from None

    from gramian.cli.demo import demo_plan
    from gramian.cli.demo.demo_result import FILE, read_result
    from gramian.cli.terminal import console
    from gramian.parallel.world import started_by_torchrun

    if started_by_torchrun():
        raise GramianError("demo: is for one process; expected no torchrun")
    chosen, screen = replace(demo_plan.DEFAULT, seed=arguments.seed), console()
    result = read_result(out)
    if result is None:
        result = _run(chosen, out, screen)
    elif result.hashes != demo_plan.hashes_of(chosen):
        raise GramianError(
            f"argument --out: {out} holds a demo of other settings; accepted: another folder, or the same --seed"
        )
    else:
        screen.print(f"{out} holds a finished demo; remove it, or name another --out, for a new one.", soft_wrap=True)
    for part in _report(result, out):
        screen.print(part, markup=False, soft_wrap=isinstance(part, str))
    screen.print(f"numbers: {out / FILE}", markup=False, soft_wrap=True)
    return 0


def _run(chosen: DemoPlan, out: Path, screen: Console) -> Result:
    from gramian.cli.demo.demo_result import FILE, write_result
    from gramian.cli.demo.pipeline import Stopped, run_demo
    from gramian.parallel.world import world

    again = "the same command goes on from there"
    try:
        with world(False, False) as where:
            result = run_demo(chosen, out, where, _Screen(screen))
        write_result(result, out)
    except Stopped as problem:
        raise RunFailed(f"demo: {problem}" + (f"; {again}" if "interrupted" in str(problem) else "")) from None
    except KeyboardInterrupt:
        raise RunFailed(f"demo: interrupted; {again}") from None
    except OSError as problem:
        raise RunFailed(f"demo: {problem.filename or out / FILE}: {problem.strerror}") from None
    return result


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: an integer from 0 to 2**63 - 1")
    return seed


# ---- progress ------------------------------------------------------------------------------------------------------------


class _Screen:
    """Stages as bars on a terminal, as a few lines elsewhere; what they find stays."""

    def __init__(self, out: Console) -> None:
        self._out, self._started = out, time.perf_counter()

    @contextmanager
    def stage(self, number: int, what: str) -> Iterator[Update]:
        """A title, and a bar or lines below it."""
        from gramian.cli.demo.pipeline import STAGES

        elapsed = time.perf_counter() - self._started
        self._out.print(f"[{number}/{STAGES}] {what}  (after {elapsed:.0f} s)", markup=False)
        if not self._out.is_terminal:
            yield self._lines()
            return

        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(TextColumn("     "), *columns, console=self._out, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, told: bar.update(task, completed=done, total=total, description=told)

    def _lines(self) -> Update:
        reached = 0

        def update(done: int, total: int, told: str) -> None:
            nonlocal reached
            part = done * PARTS // max(1, total)
            if part > reached and done < total:
                self.say(f"{done:,} of {total:,}  {told}")
            reached = part

        return update

    def say(self, text: str) -> None:
        """A line below a stage's title."""
        self._out.print(f"      {text}", markup=False, soft_wrap=True)


# ---- the report ----------------------------------------------------------------------------------------------------------


def _report(result: Result, out: Path) -> Iterator[RenderableType]:
    from rich.panel import Panel
    from rich.text import Text

    from gramian.cli.demo.demo_result import verdict
    from gramian.cli.demo.pipeline import TOLD

    for sample in result.samples:
        yield Panel(Text(sample.text), title=f"{TOLD[sample.name]} writes", title_align="left")
    yield _table(result)
    yield Text(verdict(result))
    seconds = sum(result.seconds.values())
    yield f"runs: {', '.join(row.folder for row in result.rows)}; cache: {result.cache.folder}; {seconds:.0f} s in all"
    yield "try next:"
    for command in _next(out):
        yield f"  {command}"


def _table(result: Result) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    table.add_column("model", no_wrap=True)
    headings = ("parameters", "steps", "seconds", "loss", "non-\noverl.", "sliding", "agree", "corr.")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        score = row.score
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            str(row.steps),
            f"{row.seconds:.1f}",
            f"{score.loss:.4f}",
            f"{score.perplexity:.3f}",
            f"{score.sliding:.3f}",
            "-" if score.agreement is None else f"{score.agreement:.1%}",
            "-" if score.correlation is None else f"{score.correlation:.3f}",
        )
    table.caption = (
        f"On {result.teacher.score.tokens:,} bytes of files that nobody was trained on. loss: nats per byte.\n"
        "non-overl., sliding: perplexity by these protocols. seconds: of training.\n"
        "agree: share of bytes where model and teacher put the same one first.\n"
        "corr.: of the true bytes' log-probabilities with the teacher's."
    )
    table.caption_justify = "left"
    return table


def _next(out: Path) -> Iterator[str]:
    """Three commands that work from here."""
    config, prompt = shlex.quote(str(out / "distilled" / "config.toml")), shlex.quote("import ")
    yield f"gramian eval {shlex.quote(str(out / 'distilled'))} --prompt {prompt}"
    for name, override in (("warm", "teacher.temperature=4"), ("goose", "model.kind=goose")):
        yield f"gramian train {config} run.folder={shlex.quote(str(out / name))} {override}"
