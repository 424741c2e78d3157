"""`gramian export RUN_DIR FOLDER`: write the best model of a run as a folder that other programs load.

A Hugging Face model with its config, tokenizer and card; models of gramian as safetensors with the numbers of their shape.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gramian.cli.terminal import make_console, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian export` to a parser."""
    parser.add_argument("run_folder", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("folder", metavar="FOLDER", help="folder to write, which does not exist yet")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (default: fp32, as trained)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the model, and print what was written. Returns the exit code."""
    from gramian.train.state.export_model import export_model

    folder = Path(arguments.folder)
    saved = export_model(Path(arguments.run_folder), folder, arguments.dtype)
    size = sum(file.stat().st_size for file in folder.iterdir())
    files = ", ".join(sorted(file.name for file in folder.iterdir()))
    best = ", the best" if saved.best else ""
    show(
        make_console(),
        f"{folder}: {type(saved.model).__name__} of step {saved.step}{best}, {size / 1e6:,.1f} MB: {files}",
    )
    return 0
