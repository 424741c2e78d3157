"""`gramian demo [--out DIR]`: the full pipeline on the source text of Python's standard library, in about two minutes.

A student is examined, a teacher trained and its hidden states cached; then the student is trained three times: from the cache,
with the cross entropy alone, and privately. The teacher's curvature is measured, and all four models are compared. Interrupted,
the same command continues; a folder that holds a finished demo is shown again.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gramian.cli.command_errors import RunFailed, refuse_torchrun
from gramian.cli.config_arguments import seed_number
from gramian.cli.terminal import make_console, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.cli.demo.demo_plan import DemoPlan
    from gramian.cli.demo.demo_result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian demo` to a parser."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=seed_number, default=0, help="of weights, data order and texts (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Run the stages of the demo that are not done yet, print the result and write demo.json. Returns the exit code."""
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as problem:  # ValueError: of a name that holds a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"argument --out: {out}: {why}; expected a folder that can be written") from None

    from gramian.cli.demo import demo_plan
    from gramian.cli.demo.demo_result import FILE, read_result

    refuse_torchrun("demo")
    chosen, console = replace(demo_plan.DEFAULT, seed=arguments.seed), make_console()
    result = read_result(out)
    if result is None:
        result = _run(chosen, out, console)
    elif result.hashes != demo_plan.hashes_of(chosen):
        raise GramianError(
            f"argument --out: {out} holds a demo of other settings; expected another folder, or the same --seed"
        )
    else:
        show(console, f"{out} holds a finished demo; remove it, or name another --out, for a new one.")
    show(console, *_report(result, out), *_figures(result), f"numbers: {out / FILE}", _write_page(result, out))
    return 0


def _run(chosen: DemoPlan, out: Path, console: Console) -> Result:
    from gramian.cli.demo.demo_result import FILE, write_result
    from gramian.cli.demo.pipeline import Stopped, run_demo
    from gramian.parallel.world import world

    again = "the same command goes on from there"
    try:
        with world(False, False) as grid:
            result = run_demo(chosen, out, grid, console)
        write_result(result, out)
    except Stopped as problem:
        raise RunFailed(f"demo: {problem}" + (f"; {again}" if "interrupted" in str(problem) else "")) from None
    except KeyboardInterrupt:
        raise RunFailed(f"demo: interrupted; {again}") from None
    except OSError as problem:
        raise RunFailed(f"demo: {problem.filename or out / FILE}: {problem.strerror}") from None
    return result


def _write_page(result: Result, out: Path) -> str:
    """Write the report of the four runs together; returns the line to print: its path, or why there is none."""
    from gramian.report.report_file import FILE, write_report

    try:
        return f"page:    {write_report([row.folder for row in result.rows], out / FILE)} (open it in a browser)"
    except GramianError as problem:
        return f"no page: {problem}"


def _report(result: Result, out: Path) -> Iterator[RenderableType]:
    from rich.panel import Panel
    from rich.text import Text

    from gramian.cli.demo.demo_result import verdict
    from gramian.cli.demo.pipeline import STAGE_NAMES

    for sample in result.samples:
        yield Panel(Text(sample.text), title=f"{STAGE_NAMES[sample.name]} writes", title_align="left")
    yield _table(result)
    yield Text(verdict(result))
    seconds = sum(result.seconds.values())
    yield f"runs: {', '.join(row.folder for row in result.rows)}; cache: {result.cache.folder}; {seconds:.0f} s in all"
    yield "try next:"
    for command in _next(out):
        yield f"  {command}"


def _figures(result: Result) -> Iterator[RenderableType]:
    """The three figures that the demo ends with: of distillation, private training and curvature."""
    from rich.table import Table

    distilled, alone, private = (row.score.loss for row in (result.distilled, result.alone, result.private))
    privacy, curvature = result.privacy, result.curvature
    table = Table.grid(padding=(0, 2))
    table.add_row("distilled", f"loss {distilled:.3f} nats per byte, {alone:.3f} without the teacher")
    table.add_row("private", f"loss {private:.3f} at ε = {privacy.epsilon:.2f}, δ = {privacy.delta:g}")
    table.add_row(
        "curvature",
        f"of the teacher's {result.teacher.parameters:,} directions {curvature.effective_dimension:,.0f} are curved by more "
        f"than {curvature.damping:g}; the largest eigenvalue is {curvature.largest_eigenvalue:.3g}",
    )
    yield table


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
    """Command lines that the demo suggests to try next."""
    gramian = "gramian" if shutil.which("gramian") else shlex.join([sys.executable, "-m", "gramian"])
    config, prompt = shlex.quote(str(out / "distilled" / "config.toml")), shlex.quote("import ")
    yield f"{gramian} eval {shlex.quote(str(out / 'distilled'))} --prompt {prompt}"
    for name, override in (("warm", "teacher.temperature=4"), ("goose", "model.kind=goose")):
        yield f"{gramian} train {config} run.folder={shlex.quote(str(out / name))} {override}"
