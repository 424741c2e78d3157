"""`gramian train CONFIG.toml [section.key=value …] [--methods]`: train; a folder with a run of the same config is resumed.

Also under torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gramian.cli.command_errors import FAILED_ON_ONE, RunFailed, is_first_process, is_out_of_memory, lost_another
from gramian.cli.config_arguments import add_config_arguments, check_device, is_sharded
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.train.config.config import Config
    from gramian.train.state.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian train` to a parser."""
    add_config_arguments(parser)
    parser.add_argument(
        "--methods", action="store_true", help="write methods.md, a Methods paragraph and the reproducibility checklist of "
        "the run, into its folder; of a run that is complete already, nothing else"
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Train the run of a config file, or resume it. Returns the exit code."""
    from gramian.train.config.config import load_config

    try:
        config = load_config(arguments.config, arguments.overrides)
    except GramianError:
        if is_first_process():
            raise
        return 2  # the first process prints the error for all
    return train(config, arguments.methods)


def train(config: Config, methods: bool = False) -> int:
    """Train the run of a config on this process, one of those that torchrun started; the first one prints.

    With `methods`, methods.md is written into the run folder at the end; of a run that is complete already, nothing else.

    Returns:
        The exit code: 0 if the run reached its end or was asked to stop.

    Raises:
        RunFailed: if the guard, which watches loss and gradient norm, stopped the run; or if data workers died, memory is full,
            or another process failed.
        GramianError: if the run folder cannot be used, or the config does not fit the data, the model or the machine.
    """
    from gramian.parallel.world import world
    from gramian.report.run_methods import is_complete
    from gramian.train.state.run_folder import RunFolder

    check_device(config)
    with world(config.run.device == "cpu", is_sharded(config)) as grid:
        folder, problem, complete = RunFolder(config), "", False
        if grid.rank == 0:
            try:
                folder.__enter__()
            except GramianError as found:
                problem = str(found)
        try:
            if grid.most(float(bool(problem))):
                raise GramianError(grid.first_failure(problem) if problem else "run.folder: cannot be taken")
            complete = methods and grid.most(float(grid.rank == 0 and is_complete(folder.path))) > 0
            return 0 if complete else _train(config, grid, folder)
        except GramianError as found:
            if grid.rank == 0 and not problem and not folder.begun:
                folder.discard()
                problem = str(found)
            raise
        finally:
            try:
                if grid.rank == 0 and not problem:
                    written = {"report": None if complete else end_with_report(folder)}
                    written["methods"] = end_with_methods(folder) if methods else None
                    for name, path in written.items():
                        if path is not None:
                            with suppress(BrokenPipeError):
                                print(f"{name}: {path}", flush=True)
            finally:
                folder.__exit__(None, None, None)


def end_with_report(folder: RunFolder) -> Path | None:
    """Write report.html into a run folder if its config asks for it; a failure is an event and a line, and fails nothing.

    Returns:
        The page; None if none was written.
    """
    if not folder.config.run.report:
        return None
    from gramian.report.report_file import FILE, write_run_report

    failure = write_run_report(folder.path, private=folder.config.privacy is not None)
    if failure is not None:
        print(f"gramian: {failure}", file=sys.stderr)
    page = folder.path / FILE
    return page if failure is None and page.exists() else None


def end_with_methods(folder: RunFolder) -> Path | None:
    """Write methods.md into the folder of a run, however it ended; a failure is a line, and fails nothing.

    Returns:
        The file; None if none was written.
    """
    from gramian.report.run_methods import write_run_methods

    try:
        return write_run_methods(folder.path) if folder.begun else None
    except Exception as problem:
        print(f"gramian: methods.md was not written: {type(problem).__name__}: {problem}", file=sys.stderr)
        return None


def _train(config: Config, grid: ProcessGrid, folder: RunFolder) -> int:
    from gramian.cli.terminal import later_progress_bar, make_console
    from gramian.cli.train_progress import Progress
    from gramian.train.build.run_parts import build
    from gramian.train.loop.trainer import Trainer

    console = make_console(quiet=not is_first_process(), outlives_reader=True)
    with _one_line_failures(grid):
        with later_progress_bar(console, "bytes tokenised") as update:
            parts = build(config, grid, update)
        with Progress(console, config) as progress:
            trainer = Trainer(parts, folder, progress.show_step, progress.show_event)
            ended = trainer.run()
    if ended.reason == "stopped":
        raise RunFailed(ended.report + progress.validity(trainer))
    progress.end(trainer, ended.reason)
    if parts.stepper.stopwatch.on:  # GRAMIAN_PROFILE=1
        from gramian.cli.verify_report import time_table

        console.print(time_table(parts.stepper.stopwatch.report(), False, "time of the parts of the last steps"))
    return 0


@contextmanager
def _one_line_failures(grid: ProcessGrid) -> Iterator[None]:
    """Context manager: turn failures that can occur with a correct config into one-line errors.

    Raises:
        RunFailed: for dead data workers, full memory, lost processes, and errors of another process.
    """
    from gramian.data import DataWorkerDied

    try:
        yield
    except DataWorkerDied as problem:
        raise RunFailed(str(problem)) from None
    except GramianError as problem:
        if FAILED_ON_ONE.match(str(problem)):  # the exit code is 1 on all processes, as on the one that failed
            raise RunFailed(str(problem)) from None
        raise
    except (RuntimeError, MemoryError) as problem:
        line = (str(problem).splitlines() or ["of the host"])[0][:200]
        if is_out_of_memory(problem):
            raise RunFailed(
                f"out of memory ({line}); expected a smaller data.micro_batch or model, or parallel.checkpoint_blocks"
            ) from None
        if grid.size == 1 or not lost_another(problem):
            raise
        raise RunFailed(
            f"process {grid.rank} lost another one ({line}); expected all of them to continue: torchrun --max-restarts resumes"
        ) from None
