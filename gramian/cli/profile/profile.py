"""`gramian profile`: measure on this machine what a feature costs in time and memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli import refuse_unavailable
from gramian.cli.profile import profile_clipping, profile_kfac, profile_train

if TYPE_CHECKING:
    from rich.console import Console

TARGETS = ("clipping", "kfac", "train")
SIZES = ("seq_lengths", "batch_size", "layers", "width", "vocabulary")
# Options and arguments that are not for a target.
FOREIGN = {
    "clipping": ("compile", "config", "overrides", "reduce", "offload"),
    "kfac": ("mode", "algorithm", "iterations", "out", "compile", "config", "overrides"),
    "train": (*SIZES, "fsdp", "mode", "algorithm", "out", "reduce", "offload"),
}
USAGES = {"clipping": profile_clipping.USAGE, "kfac": profile_kfac.USAGE, "train": profile_train.USAGE}
# Columns where the output is not a terminal.
PLAIN_WIDTH = 100


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "profile",
        help="measure what a feature costs in time and memory",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help=f"what to measure: {', '.join(TARGETS)}")
    parser.add_argument("--seq-lengths", type=_count, nargs="+", metavar="T", help="tokens per sequence")
    parser.add_argument("--batch-size", type=_count, metavar="B", help="sequences per step, and process")
    parser.add_argument("--layers", type=_count, metavar="L", help="blocks of the GPT")
    parser.add_argument("--width", type=_count, metavar="W", help="of its residual stream")
    parser.add_argument("--vocabulary", type=_count, metavar="V", help="token ids")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU where a GPU is there")
    parser.add_argument("--fsdp", action="store_true", help="clipping and kfac under torchrun: FSDP2 in place of DDP")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, here (clipping: once more)")
    clipping = parser.add_argument_group(
        "clipping", "also under torchrun; GRAMIAN_PROFILE=1 times any private run of yours"
    )
    clipping.add_argument("--mode", metavar="M", help="auto (default), bookkeeping, keep or two_pass")
    clipping.add_argument("--algorithm", metavar="A", help="norms of linear layers: auto (default), gram or direct")
    clipping.add_argument(
        "--out", type=Path, metavar="DIR", help="clipping.json and clipping.svg (default: runs/profile)"
    )
    kfac = parser.add_argument_group("kfac", "also under torchrun, where it shows what processes send each other")
    kfac.add_argument("--reduce", metavar="R", help="how they join: gram (default), gather, dense or none")
    kfac.add_argument("--offload", action="store_true", help="also with factors that are kept on the CPU")
    train = parser.add_argument_group("train", "also under torchrun; the config decides sizes and strategy")
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="default: the reference GPT")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="in place of the file's")
    train.add_argument("--compile", action="store_true", help="measure compile.mode on a CPU too")
    both = parser.add_argument_group("clipping and train")
    both.add_argument("--iterations", type=_count, metavar="N", help="timed steps of each kind (default and least: 10)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure what was asked for."""
    refuse_unavailable("", arguments.target, TARGETS, (), {})
    options = {_shown(name): getattr(arguments, name) or None for name in FOREIGN[arguments.target]}
    refuse_unavailable(USAGES[arguments.target], arguments.target, TARGETS, (), options)
    if arguments.target == "clipping":
        return profile_clipping.run(arguments, _console, _progress)
    if arguments.target == "train":
        return profile_train.run(arguments, _console, partial(_progress, what=""))
    return profile_kfac.run(arguments, _console, _progress)


def _shown(name: str) -> str:
    """An option or argument as the user writes it."""
    return {"config": "CONFIG", "overrides": "section.key=value"}.get(name, f"--{name.replace('_', '-')}")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: an integer of at least 1")
    return count


@contextmanager
def _progress(console: Console, total: int, what: str = "sequence length ") -> Iterator[Callable[[Any], None]]:
    """Show a live bar on a terminal, and nothing elsewhere or for nothing to do; `what` is said before what is told."""
    if not console.is_terminal or not total:
        yield lambda told: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda told: bar.update(task, advance=1, description=f"{what}{told}")
