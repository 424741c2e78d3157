"""What the three profiles read, print and write alike: options, numbers in cells, the machine, and files."""

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
"""Kind, text or numbers, and file of an output."""


def megabytes(count: int | None) -> str:
    """Format bytes as MB; "-" if unknown."""
    return "-" if count is None else f"{count / 1e6:,.1f}"


def with_spread(spread: TimingSpread, digits: int = 1) -> str:
    """Format seconds as milliseconds ± half the distance between the quartiles."""
    return f"{1e3 * spread.median:,.{digits}f}±{1e3 * spread.iqr / 2:,.{digits}f}"


def noise_warning(name: str, spread: TimingSpread) -> str:
    """Say that the measured times of a step vary much."""
    return (
        f"noisy: quartiles of the {name} lie {spread.iqr / spread.median:.0%} of its median apart; is the machine busy? More "
        "--iterations help"
    )


def read_choice(arguments: argparse.Namespace, name: str, choices: Sequence[str]) -> str:
    """Read an option with a few values, of which the first is the default.

    Raises:
        GramianError: naming the option, for another value.
    """
    given: str = getattr(arguments, name) or choices[0]
    if given not in choices:
        raise GramianError(f"argument --{name}: got {given!r}; expected {', '.join(choices)}")
    return given


def read_iterations(arguments: argparse.Namespace) -> int:
    """Read --iterations.

    Raises:
        GramianError: if there are too few for quartiles.
    """
    from gramian.verify.profiles.measurements import LEAST_ITERATIONS

    iterations: int = arguments.iterations or LEAST_ITERATIONS
    if iterations < LEAST_ITERATIONS:
        raise GramianError(
            f"argument --iterations: got '{iterations}'; expected an integer of at least {LEAST_ITERATIONS}"
        )
    return iterations


def place_name(where: ProcessGrid, on_cuda: str = "") -> str:
    """Name the device and the layout of processes, for a title; `on_cuda` is added to a GPU's name."""
    import torch

    from gramian.verify.model_layouts import layout_name

    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' * (threads != 1)}"
    if where.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(where.device)}{on_cuda}"
    return ", ".join(part for part in (device, layout_name(where)) if part)


def machine_facts(where: ProcessGrid) -> dict[str, Any]:
    """Processes, device and versions, for a JSON file."""
    import torch

    return {
        "processes": where.size,
        "parallel": where.kind,
        "device": torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def open_console(*files: tuple[str, Path | None]) -> Console:
    """Make the console, which the first process alone prints on, and the folders of the output files {option: file}.

    Raises:
        GramianError: on the first process, if a file cannot be written.
    """
    first = is_first_process()
    for option, file in files:
        if first and file is not None:
            _make_writable(option, file)
    return make_console(quiet=not first)


def _make_writable(option: str, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        problem = "Is a directory" if file.is_dir() else ""
        if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
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
    """Print a report and write its files, on the first process, then fail if a measurement did.

    Args:
        target: of the command.
        console: of the command.
        report: empty if nothing was measured.
        outputs: of every file.
        failure: why the measurement ended early; empty: it did not.

    Raises:
        RunFailed: if it did, or if a file cannot be written.
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
