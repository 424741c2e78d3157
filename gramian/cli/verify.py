"""`gramian verify kfac | clipping | distill | resume`: prove on this machine that the library computes what it promises.

Compares the library with independent reference computations, or resumed runs with uninterrupted ones. Also under torchrun.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gramian.cli.command_errors import RunFailed, is_first_process, only_first_complains
from gramian.cli.config_arguments import check_target
from gramian.cli.terminal import make_console, progress_bar, show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.checks import VerifyCheck

USAGES = {
    "kfac": "gramian verify kfac [--fsdp] [--tp] [--verbose] [--profile]",
    "clipping": "gramian verify clipping [--fsdp] [--tp] [--verbose] [--profile]",
    "distill": "gramian verify distill [--fsdp] [--verbose]",
    "resume": "gramian verify resume [CONFIG.toml] [--fsdp] [--verbose]",
}
FOREIGN = {
    "kfac": ("config",),
    "clipping": ("config",),
    "distill": ("config", "tp", "profile"),
    "resume": ("tp", "profile"),
}
"""{target: names of the arguments of `gramian verify` that belong to other targets only}."""
ERRORS = "Errors: norm of the difference over norm of the reference"
KILLS = 4
"""Number of runs that `gramian verify resume` kills and resumes."""
NAMED = 3
"""Maximum number of differences of a resumed run that its line of the output names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian verify` to a parser."""
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help=f"what to prove: {', '.join(USAGES)}")
    add("config", nargs="?", metavar="CONFIG.toml", help="resume: config of the run that is killed, shortened")
    add("--verbose", action="store_true", help="a row for every layer and case")
    add("--fsdp", action="store_true", help="with fully_shard (FSDP2) in place of DDP")
    add("--tp", action="store_true", help="kfac and clipping: with tensor-parallel linears; with --fsdp a 2-D mesh")
    add("--profile", action="store_true", help="kfac: then measure time and memory of a small GPT; clipping: time the "
        "private steps of the checks")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the checks that TARGET names and print their outcome; under torchrun only the first process prints.

    Returns the exit code.

    Raises:
        RunFailed: if a check failed.
    """
    check_target("verify", arguments, USAGES, FOREIGN)
    if arguments.target == "resume":
        return only_first_complains(lambda: _verify_resume(arguments))
    suite = {"kfac": _kfac, "clipping": _clipping, "distill": _distill}[arguments.target]
    return only_first_complains(lambda: _verify(arguments, suite(arguments)))


def _no_profile(grid: ProcessGrid, console: Console) -> tuple[Iterable[RenderableType], str]:
    return (), ""


@dataclass(frozen=True)
class _Suite:
    """The checks of one target of `gramian verify`, and the texts that describe them."""

    plan: Callable[[ProcessGrid], Sequence[VerifyCheck]]
    """Makes the checks, equal on all processes."""
    title: Callable[[ProcessGrid], str]
    """Makes the title, which names both sides of the comparison."""
    legend: str
    """Line below the table that defines the printed errors."""
    profile: Callable[[ProcessGrid, Console], tuple[Iterable[RenderableType], str]] = _no_profile
    """Measures times after the checks, on all processes; returns what to print, and why the measurement failed ("" if not)."""


def _kfac(arguments: argparse.Namespace) -> _Suite:
    """Checks of K-FAC: one process against a reference; several processes, FSDP2 or tensor parallelism against one process."""
    from gramian.parallel.world import started_by_torchrun
    from gramian.verify import kfac_matrix, kfac_processes
    from gramian.verify.model_layouts import ModelLayout

    def profile(grid: ProcessGrid, console: Console) -> tuple[Iterable[RenderableType], str]:
        from gramian.cli.profile import profile_kfac

        sizes = profile_kfac.default_sizes()
        profiles, failure = profile_kfac.measure(sizes, grid, console)
        return (profile_kfac.report(profiles, sizes, grid) if profiles else ()), failure

    def layout(grid: ProcessGrid) -> ModelLayout:
        return ModelLayout(grid, arguments.fsdp, arguments.tp)

    measured = profile if arguments.profile else _no_profile
    errors, oracle = f"{ERRORS}, per layer", "the dense float64 oracle on the CPU"
    if started_by_torchrun() or arguments.fsdp or arguments.tp:
        return _Suite(
            lambda grid: kfac_processes.plan(layout(grid)),
            lambda grid: f"K-FAC on {_machine()} {layout(grid)}, against one process: {oracle}",
            f"{errors}; of bound: over the error that the record declares.",
            measured,
        )
    title = f"K-FAC on {_machine()} against {oracle}"
    return _Suite(lambda grid: kfac_matrix.plan(), lambda grid: title, f"{errors}. s.e.: standard errors.", measured)


def _clipping(arguments: argparse.Namespace) -> _Suite:
    from gramian.cli.verify_report import time_table
    from gramian.privacy.clipping.step_timing import Stopwatch
    from gramian.verify import clipping_matrix
    from gramian.verify.model_layouts import with_tensor_parallel

    stopwatch = Stopwatch(on=True) if arguments.profile else None

    def placed(grid: ProcessGrid) -> ProcessGrid:
        return with_tensor_parallel(grid, arguments.fsdp) if arguments.tp else grid

    return _Suite(
        lambda grid: clipping_matrix.plan(placed(grid), stopwatch=stopwatch),
        lambda grid: f"Clipping on {_machine(placed(grid))} against a float64 loop of single samples on the CPU",
        "Errors: norm of the difference over the norms of the clipped gradients that are added up, per parameter.",
        lambda grid, console: (
            []
            if stopwatch is None
            else [time_table(stopwatch.report(), arguments.verbose, "time of the private steps")],
            "",
        ),
    )


def _distill(arguments: argparse.Namespace) -> _Suite:
    from gramian.verify import distill_matrix

    return _Suite(
        distill_matrix.plan,
        lambda grid: f"Distillation on {_machine(grid)} against eager float64 on the CPU",
        f"{ERRORS}.",
    )


def _verify(arguments: argparse.Namespace, suite: _Suite) -> int:
    """Run the checks on all processes that torchrun started, or on this one; all processes reach the same verdict.

    Returns the exit code; raises RunFailed if a check or the profile failed.
    """
    from gramian.cli.verify_report import conclude, report_checks
    from gramian.parallel.world import world
    from gramian.verify.agreement import agree
    from gramian.verify.checks import run_checks

    console = make_console(quiet=not is_first_process())
    with world(cpu=False, fsdp=arguments.fsdp or arguments.tp) as grid:
        checks = suite.plan(grid)
        with progress_bar(console) as update:
            outcomes = run_checks(
                checks, lambda done, check: update(done, len(checks), check.title), stop_at_crash=grid.size > 1
            )
        crash = next((outcome.crash for outcome in outcomes if outcome.crash), "")
        cause = grid.first_failure(f"crashed: {crash}") if crash else ""
        measured, failure = suite.profile(grid, console) if grid.size == 1 or not crash else ((), "")
    failed = agree(grid, outcomes)
    if grid.size > 1 and cause:  # other processes crashed because this one was gone
        failed = {title: cause if "crashed: " in problem else problem for title, problem in failed.items()}
    show(console, *report_checks(outcomes, suite.title(grid), suite.legend, arguments.verbose), *measured)
    conclude(console, arguments.target, failed, outcomes, len(checks))
    if failure:
        raise RunFailed(f"verify {arguments.target} --profile: {failure}")
    return 0


def _machine(grid: ProcessGrid | None = None) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    layout = grid.label if grid else ""
    return f"{device}, torch {torch.__version__},{f' {layout},' if layout else ''}"


def _verify_resume(arguments: argparse.Namespace) -> int:
    """Kill training runs and resume them, in subprocesses; returns the exit code, raises RunFailed if a resumed run differs.

    Under torchrun each run has as many processes as torchrun started.
    """
    import tempfile
    from pathlib import Path

    from gramian.parallel.world import world
    from gramian.train.config.config import load_config, parse_config
    from gramian.verify import resume

    config = resume.shortened(load_config(arguments.config) if arguments.config else parse_config({}), arguments.fsdp)
    console = make_console(quiet=not is_first_process())
    found: dict[str, list[str]] = {}
    with world(cpu=True, fsdp=False) as grid:
        if is_first_process():
            kills = resume.random_kills(config.run.steps, KILLS, seed=0)
            with tempfile.TemporaryDirectory() as folder, progress_bar(console) as update:
                found = resume.check_resume(
                    config, Path(folder), kills, grid.size, lambda done, name: update(done, KILLS + 1, name)
                )
        failed = grid.most(float(any(found.values()))) > 0
    for kill, differences in found.items():
        line = f"FAILED  {kill}: {'; '.join(differences[:NAMED])}" if differences else f"ok  {kill}"
        show(console, line, *(f"    {difference}" for difference in differences if arguments.verbose))
    show(
        console,
        f"{sum(not differences for differences in found.values())} of {len(found)} killed and resumed runs of "
        f"{config.run.steps} steps on {grid.size} process{'es' * (grid.size > 1)} ended bitwise where the run that was not "
        "killed ended",
    )
    if failed:
        raise RunFailed(
            "resume: a resumed run differs from the uninterrupted one; expected parameters, optimizer and metrics bitwise equal"
        )
    return 0
