"""`gramian doctor CONFIG.toml [section.key=value …]`: examine a run before it starts; nothing is written.

Checks data, loss, gradients, causality, schedule, memory and time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gramian.cli.command_errors import RunFailed, names_of_failed, refuse_torchrun
from gramian.cli.config_arguments import add_config_arguments
from gramian.cli.terminal import make_console, make_table, progress_bar, show, verdict_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.train.doctor.check import Check

add_arguments = add_config_arguments


def run(arguments: argparse.Namespace) -> int:
    """Run the checks of `gramian doctor` on a config and print their table. Returns the exit code.

    Raises:
        RunFailed: if a check failed.
    """
    from gramian.train.config.config import load_config
    from gramian.train.doctor.examine import examine

    config = load_config(arguments.config, arguments.overrides)
    refuse_torchrun("doctor")
    console, started = make_console(), time.perf_counter()
    with progress_bar(console, "examining") as update:
        checks = examine(config, on_progress=update)
    show(console, _table(checks), *(f"{check.name}: {line}" for check in checks for line in check.details))
    if config.privacy is not None:
        show(console, "What was measured on private data is not covered by ε.")
    failed = [check.name for check in checks if not check.ok]
    seconds = time.perf_counter() - started
    show(console, f"{len(checks) - len(failed)} of {len(checks)} checks passed in {seconds:.0f} s")
    if failed:
        raise RunFailed(f"doctor: {names_of_failed(failed, len(checks))}")
    return 0


def _table(checks: Sequence[Check]) -> RenderableType:
    """Table of the doctor's checks: a row per check, with measured value, threshold, verdict and hint."""
    from rich.text import Text

    table = make_table()
    table.add_column("check", min_width=26, max_width=26)
    for heading in ("measured", "threshold", "verdict", "hint"):
        table.add_column(heading, no_wrap=heading == "verdict")
    for check in checks:
        table.add_row(check.name, Text(check.measured), Text(check.threshold), verdict_text(check.ok), Text(check.hint))
    return table
