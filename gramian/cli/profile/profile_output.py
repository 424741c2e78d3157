"""What the three profiles print and write alike: numbers in cells, the machine, and files."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.profiles.measurements import TimingSpread


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


def check_writable(option: str, file: Path | None) -> None:
    """Make the folder of an output file before anything is measured.

    Raises:
        GramianError: if the file cannot be written.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        problem = "Is a directory" if file.is_dir() else ""
        if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
            problem = "Permission denied"
    except OSError as refused:
        problem = refused.strerror or type(refused).__name__
    if problem:
        raise GramianError(f"argument {option}: {file}: {problem}; expected a file that can be written")


def write_output(target: str, content: str | Mapping[str, Any], file: Path) -> None:
    """Write text, or numbers as JSON.

    Raises:
        RunFailed: if the file cannot be written.
    """
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise RunFailed(f"profile {target}: {file}: {problem.strerror}") from None
