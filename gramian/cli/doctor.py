"""`gramian doctor CONFIG.toml [section.key=value …] | --model FOLDER`: examine a run, or a model, before it starts.

A config: checks data, loss, gradients, causality, schedule, memory and time. A Hugging Face model folder: what of it is exact,
approximated or refused (`gramian.check` in Python). Nothing is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gramian.cli.command_errors import RunFailed, names_of_failed, refuse_torchrun
from gramian.cli.terminal import make_console, make_table, progress_bar, show, verdict_text
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.train.doctor.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian doctor` to a parser."""
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a training config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with a config")
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face model folder, in place of a config; nothing is "
                        "downloaded")  # fmt: skip
    parser.add_argument("--text", nargs="+", metavar="FILE", help="text files, or folders of them, as the inputs of --model "
                        "(default: numbers drawn for its config)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Examine a config or a model folder and print the findings as tables. Returns the exit code.

    Raises:
        RunFailed: if a check failed, or something of the model is refused.
        GramianError: if an argument does not fit.
    """
    if (arguments.config is None) == (arguments.model is None):
        raise GramianError("doctor: expected either CONFIG.toml or --model FOLDER")
    if arguments.model is None and arguments.text:
        raise GramianError("argument --text: is for --model; expected it without CONFIG.toml")
    return (
        _examine_config(arguments) if arguments.model is None else _check_model(arguments.model, arguments.text or [])
    )


def _check_model(path: str, texts: Sequence[str]) -> int:
    from gramian.verify.user_model.folder_model import load_model, make_batch
    from gramian.verify.user_model.model_check import check

    refuse_torchrun("doctor")
    model = load_model(path)
    report = check(model, make_batch(model, path, texts), show=False)
    show(make_console(), report)
    if not report.ok:
        raise RunFailed(f"doctor: not exact here: {'; '.join(report.bad)}")
    return 0


def _examine_config(arguments: argparse.Namespace) -> int:
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
