"""Shared by the three profiles: reading options, formatting numbers, naming the machine, printing and writing files."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed, is_first_process
from gramian.cli.terminal import make_console, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.profiles.measurements import TimingSpread


Output = tuple[str, str | Mapping[str, Any], Path | None]
"""One output file: its label ("numbers" or "picture"), its text or JSON object, and its path (None: it is not written)."""


def megabytes(count: int | None) -> str:
    """Format a number of bytes as MB; None becomes "-"."""
    return "-" if count is None else f"{count / 1e6:,.1f}"


def with_spread(spread: TimingSpread, digits: int = 1) -> str:
    """Format seconds as milliseconds ± half the distance between the quartiles, with `digits` decimals."""
    return f"{1e3 * spread.median:,.{digits}f}±{1e3 * spread.iqr / 2:,.{digits}f}"


def noise_warning(name: str, spread: TimingSpread) -> str:
    """A warning that the measured seconds of step `name` vary much, with the distance of their quartiles."""
    return (
        f"noisy: quartiles of the {name} lie {spread.iqr / spread.median:.0%} of its median apart; is the machine busy? More "
        "--iterations help"
    )


def read_choice(arguments: argparse.Namespace, name: str, choices: Sequence[str]) -> str:
    """Value of option `name`, which must be one of `choices`; the first is the default.

    Raises:
        GramianError: if the value is not one of the choices.
    """
    given: str = getattr(arguments, name) or choices[0]
    if given not in choices:
        raise GramianError(f"argument --{name}: got {given!r}; expected {', '.join(choices)}")
    return given


def read_iterations(arguments: argparse.Namespace) -> int:
    """Value of --iterations, the number of measured steps.

    Raises:
        GramianError: if it is below `LEAST_ITERATIONS`, too few for quartiles.
    """
    from gramian.verify.profiles.measurements import LEAST_ITERATIONS

    iterations: int = arguments.iterations or LEAST_ITERATIONS
    if iterations < LEAST_ITERATIONS:
        raise GramianError(
            f"argument --iterations: got '{iterations}'; expected an integer of at least {LEAST_ITERATIONS}"
        )
    return iterations


def place_name(grid: ProcessGrid, on_cuda: str = "") -> str:
    """Text for a title: the device and the layout of processes; `on_cuda` is appended to the name of a GPU."""
    import torch

    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' * (threads != 1)}"
    if grid.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(grid.device)}{on_cuda}"
    return ", ".join(part for part in (device, grid.label) if part)


def machine_facts(grid: ProcessGrid) -> dict[str, Any]:
    """Number of processes, device, threads and versions, as a JSON object."""
    import torch

    return {
        "processes": grid.size,
        "parallel": grid.kind,
        "device": torch.cuda.get_device_name(grid.device) if grid.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def open_console(*files: tuple[str, Path | None]) -> Console:
    """Make the console, on which only the first process prints, and create the folders of the output files.

    Each of `files` is (command-line option that names the file, path or None if it is not given).

    Raises:
        GramianError: on the first process, if a file cannot be written.
    """
    first = is_first_process()
    given = [(option, file) for option, file in files if first and file is not None]
    for option, file in given:
        _check_writable(option, file)
    for _, file in given:
        file.parent.mkdir(parents=True, exist_ok=True)
    return make_console(quiet=not first)


def _check_writable(option: str, file: Path) -> None:
    try:
        folder = next((parent for parent in file.absolute().parents if parent.exists()), file)
        problem = "Is a directory" if file.is_dir() else "" if folder.is_dir() else "Not a directory"
        if not problem and not os.access(file if file.exists() else folder, os.W_OK):
            problem = "Permission denied"
    except OSError as refused:
        problem = refused.strerror or type(refused).__name__
    if problem:
        raise GramianError(f"argument {option}: {file}: {problem}; expected a file that can be written")


def publish(
    target: str,
    console: Console,
    report: Iterable[RenderableType],
    outputs: Sequence[Output],
    failure: str,
) -> int:
    """Print a report and write its files, on the first process, then raise if the measurement failed; returns exit code 0.

    Args:
        target: the profile's name, for error messages.
        console: where the report is printed.
        report: lines and tables; empty if nothing was measured.
        outputs: the files to write.
        failure: why the measurement ended early; "" if it did not.

    Raises:
        RunFailed: if the measurement ended early, or a file cannot be written.
    """
    if is_first_process():
        show(console, *report)
        for kind, content, file in outputs:
            if file is not None:
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
                try:
                    file.write_text(text, encoding="utf-8")
                except OSError as problem:
                    raise RunFailed(f"profile {target}: {file}: {problem.strerror}") from None
                show(console, f"{kind}: {file}")
    if failure:
        raise RunFailed(f"profile {target}: {failure}")
    return 0
