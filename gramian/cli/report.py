"""`gramian report RUN_DIR [RUN_DIR …] [--out FILE]`: one page of curves and tables from the folders of runs.

The page needs no network and at most 2 MB. Several runs are overlaid; a folder of `gramian curvature` adds its pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gramian.cli.command_errors import refuse_torchrun
from gramian.cli.terminal import make_console, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian report` to a parser."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run, or of gramian curvature"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html in RUN_DIR, here if there are several"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path. Returns the exit code.

    Raises:
        GramianError: if a folder holds no run, or the page cannot be written.
    """
    from gramian.core.byte_amounts import format_bytes
    from gramian.report.report_file import FILE, write_report

    refuse_torchrun("report")
    folders: list[Path] = arguments.folders
    path = write_report(folders, arguments.out or (folders[0] / FILE if len(folders) == 1 else Path(FILE)))
    show(make_console(), f"{path}: {format_bytes(path.stat().st_size)}")
    return 0
