"""`gramian profile`: measure on this machine what a feature costs in time and memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed, profile_clipping, profile_train, refuse_unavailable
from gramian.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType

    from gramian.models import GPTConfig
    from gramian.verify.runs.kfac_profile import Profile

TARGETS = ("clipping", "kfac", "train")
USAGE = "gramian profile kfac [--seq-lengths T ...] [--batch-size B] [--layers L] [--width W] [--vocabulary V] [--cpu]"
SIZES = ("seq_lengths", "batch_size", "layers", "width", "vocabulary")
# Options and arguments that are not for a target.
FOREIGN = {
    "clipping": ("compile", "config", "overrides"),
    "kfac": ("fsdp", "mode", "algorithm", "iterations", "json", "out", "compile", "config", "overrides"),
    "train": (*SIZES, "fsdp", "mode", "algorithm", "out"),
}
USAGES = {"clipping": profile_clipping.USAGE, "kfac": USAGE, "train": profile_train.USAGE}
# Columns where the output is not a terminal.
PLAIN_WIDTH = 100
KFAC_DEFAULTS = {"seq_lengths": [128, 256], "batch_size": 8, "layers": 4, "width": 128, "vocabulary": 256}


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
    clipping = parser.add_argument_group(
        "clipping", "also under torchrun; GRAMIAN_PROFILE=1 times any private run of yours"
    )
    clipping.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    clipping.add_argument("--mode", metavar="M", help="auto (default), bookkeeping, keep or two_pass")
    clipping.add_argument("--algorithm", metavar="A", help="norms of linear layers: auto (default), gram or direct")
    clipping.add_argument(
        "--out", type=Path, metavar="DIR", help="clipping.json and clipping.svg (default: runs/profile)"
    )
    train = parser.add_argument_group("train", "also under torchrun; the config decides sizes and strategy")
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="default: the reference GPT")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="in place of the file's")
    train.add_argument("--compile", action="store_true", help="measure compile.mode on a CPU too")
    both = parser.add_argument_group("clipping and train")
    both.add_argument("--iterations", type=_count, metavar="N", help="timed steps of each kind (default and least: 10)")
    both.add_argument("--json", type=Path, metavar="FILE", help="the numbers, here (clipping: once more)")
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
    return _run_kfac(arguments)


def _shown(name: str) -> str:
    """An option or argument as the user writes it."""
    return {"config": "CONFIG", "overrides": "section.key=value"}.get(name, f"--{name.replace('_', '-')}")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _run_kfac(arguments: argparse.Namespace) -> int:
    """Measure every sequence length and print the tables."""
    for name, default in KFAC_DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)

    import torch

    from gramian.verify.runs import kfac_profile

    lengths: list[int] = arguments.seq_lengths
    try:
        config = kfac_profile.model_config(arguments.layers, arguments.width, arguments.vocabulary, max(lengths))
    except GramianError as problem:
        raise GramianError(f"argument --{problem}") from None
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    console = _console()

    profiles: list[Profile] = []
    failure = ""
    rounds = kfac_profile.WARM_UP + kfac_profile.ROUNDS
    with _progress(console, rounds * len(lengths)) as advance:
        for length in lengths:
            try:
                measured = kfac_profile.profile_kfac(
                    config, length, arguments.batch_size, device, on_progress=partial(advance, length)
                )
            except (RuntimeError, MemoryError) as problem:  # out of memory is a RuntimeError in torch
                failure = f"sequence length {length}: {_first_line(problem)}"
                break
            profiles.append(measured)
    if profiles:
        for part in _report(profiles, config, arguments.batch_size, device):
            console.print(part)
    if failure:
        raise RunFailed(f"profile {arguments.target}: {failure}")
    return 0


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: an integer of at least 1")
    return count


def _first_line(problem: BaseException) -> str:
    lines = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"


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


def _report(
    profiles: Sequence[Profile], config: GPTConfig, batch_size: int, device: torch.device
) -> Iterator[RenderableType]:
    import torch

    from gramian.verify.runs.kfac_profile import ROUNDS

    where, memory = f"CPU, {torch.get_num_threads()} threads", "resident in the process, peak since it began"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, bfloat16 autocast"
        memory = "allocated on the GPU, peak in the stage, reserved by its allocator"
    yield f"K-FAC on {where}"
    yield f"GPT: {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}; batch {batch_size}"
    yield _stage_table(profiles, cuda=device.type == "cuda")
    yield "plain step: forward and backward. capture: the same inside kfac.capture, factors made."
    yield "decompose: what the first natural gradient takes more than a second one. apply: the second."
    yield f"Medians of {ROUNDS} rounds after warm-up. MB {memory}."
    yield _factor_table(profiles)
    yield "Factors from kfac.record(), with its default options, a refresh on every step and no moving average."


def _stage_table(profiles: Sequence[Profile], cuda: bool) -> RenderableType:
    """A row per sequence length and stage."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("sequence", justify="right", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    headings = ["ms", "x plain step", "MB before", "after", "peak"] + ["reserved"] * cuda
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for profile in profiles:
        for number, stage in enumerate(profile.stages):
            memory = stage.memory
            cells = [memory.before, memory.after, memory.peak] + [memory.reserved] * cuda
            table.add_row(
                "" if number else f"{profile.length:,}",
                stage.name,
                f"{1e3 * stage.seconds:,.2f}",
                f"{stage.ratio:.2f}",
                *(_megabytes(cell) for cell in cells),
            )
        table.add_section()
    return table


def _factor_table(profiles: Sequence[Profile]) -> RenderableType:
    """A row per sequence length."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("sequence", "tokens", "MB of factors", "x parameters", "with decompositions"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sides")
    for profile in profiles:
        table.add_row(
            f"{profile.length:,}",
            f"{profile.tokens:,}",
            _megabytes(profile.factor_bytes),
            f"{profile.factor_bytes / profile.parameter_bytes:.2f}",
            _megabytes(profile.used_bytes),
            ", ".join(f"{count} {name}" for name, count in profile.representations.items()),
        )
    return table


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
