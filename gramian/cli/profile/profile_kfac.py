"""`gramian profile kfac`: what curvature costs here in time and memory, what processes send for it, and what the CPU keeps."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.cli.profile.profile_train import refuse_unwritable
from gramian.cli.under_torchrun import first_speaks
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.models import GPTConfig
    from gramian.parallel.world import World
    from gramian.verify.kfac_profile import KFACProfile

USAGE = (
    "gramian profile kfac [--seq-lengths T ...] [--batch-size B] [--layers L] [--width W] [--vocabulary V] [--cpu] [--fsdp] "
    "[--reduce gram|gather|dense|none] [--offload] [--json FILE]"
)
DEFAULTS = {"seq_lengths": [128, 256], "batch_size": 8, "layers": 4, "width": 128, "vocabulary": 256}
REDUCTIONS = ("gram", "gather", "dense", "none")

Progress = Callable[["Console", int], AbstractContextManager[Callable[[int], None]]]


def run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress) -> int:
    """Measure every sequence length and print the tables; the first process alone prints and writes.

    Args:
        arguments: of the command.
        console_of: makes the console.
        progress: makes the bar.
    """
    return first_speaks(lambda first: _run(arguments, console_of, progress, first))


def _run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress, first: bool) -> int:
    reduce = arguments.reduce or "gram"
    if reduce not in REDUCTIONS:
        raise GramianError(f"argument --reduce: got {reduce!r}; accepted: {', '.join(REDUCTIONS)}")
    for name, default in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)

    from gramian.parallel.world import world
    from gramian.verify import kfac_profile

    lengths: list[int] = arguments.seq_lengths
    try:
        config = kfac_profile.model_config(arguments.layers, arguments.width, arguments.vocabulary, max(lengths))
    except GramianError as problem:
        raise GramianError(f"argument --{problem}") from None
    if first and arguments.json is not None:
        refuse_unwritable(arguments.json)

    console = console_of()
    profiles: list[KFACProfile] = []
    failure = ""
    rounds = kfac_profile.WARM_UP + kfac_profile.ROUNDS
    steps = rounds * len(lengths) if first else 0
    with world(arguments.cpu, arguments.fsdp) as where, progress(console, steps) as advance:
        if arguments.offload and where.device.type == "cpu":
            raise GramianError("argument --offload: factors of a model on the CPU lie there anyway; accepted: on a GPU")
        for length in lengths:
            try:
                measured = kfac_profile.profile_kfac(
                    config,
                    length,
                    arguments.batch_size,
                    where,
                    reduce=reduce,
                    offload=arguments.offload,
                    on_progress=partial(advance, length),
                )
                where.wait()
            except (RuntimeError, MemoryError, GramianError) as problem:  # out of memory is a RuntimeError in torch
                failure = where.first_failure(f"sequence length {length}: {_first_line(problem)}")
                break
            profiles.append(measured)
    if first and profiles:
        for part in _report(profiles, config, arguments.batch_size, where, reduce):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
        if arguments.json is not None:
            numbers = _numbers(profiles, config, arguments.batch_size, where, reduce)
            arguments.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
            console.print(f"numbers: {arguments.json}", markup=False, soft_wrap=True)
    if failure:
        raise RunFailed(f"profile {arguments.target}: {failure}")
    return 0


def _first_line(problem: BaseException) -> str:
    lines = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"


def _numbers(
    profiles: Sequence[KFACProfile], config: GPTConfig, batch_size: int, where: World, reduce: str
) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "processes": where.size,
        "parallel": where.kind,
        "reduce": reduce,
        "model": dataclasses.asdict(config),
        "batch_size": batch_size,
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
    }


def _report(
    profiles: Sequence[KFACProfile], config: GPTConfig, batch_size: int, where: World, reduce: str
) -> Iterator[RenderableType]:
    import torch

    from gramian.verify.kfac_profile import ROUNDS

    cuda, several = where.device.type == "cuda", where.size > 1
    on, memory = (
        f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}",
        "resident in the process, peak since it began",
    )
    if cuda:
        on = f"{torch.cuda.get_device_name(where.device)}, bfloat16 autocast"
        memory = "allocated on the GPU, peak in the stage, reserved by its allocator"
    spread = {"one": "", "ddp": f", DDP over {where.size}", "fsdp2": f", FSDP2 over {where.size}"}[where.kind]
    joined = f", joined by {reduce}" if several else ""
    yield f"K-FAC on {on}{spread}{joined}"
    each = " on each process" if several else ""
    yield f"GPT: {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}; batch {batch_size}{each}"
    yield _stage_table(profiles, cuda)
    yield "plain step: forward and backward. capture: the same inside kfac.capture, factors made."
    if several:
        yield "reduce: that part of it spent in collectives of K-FAC."
    yield "decompose: what the first natural gradient takes more than a second one. apply: the second."
    if profiles[0].offloaded_bytes is not None:
        yield "offload: what a capture takes more that keeps its factors on the CPU. fetch: what a natural gradient does."
    yield f"Medians of {ROUNDS} rounds after warm-up. MB {memory}."
    if several:
        yield _traffic_table(profiles)
        yield "What leaves the first process for K-FAC alone, counted, and how long it waits for it; not DDP's or FSDP2's own."
    yield _factor_table(profiles)
    yield "Factors from kfac.record(), with its default options, a refresh on every step and no moving average."


def _traffic_table(profiles: Sequence[KFACProfile]) -> RenderableType:
    """A row per sequence length, stage and kind of collective."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("sequence", justify="right", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("collective", no_wrap=True)
    for heading in ("MB sent", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for profile in profiles:
        for number, seen in enumerate(profile.collectives):
            table.add_row(
                "" if number else f"{profile.length:,}",
                seen.stage,
                seen.kind.replace("_", "-"),
                f"{seen.sent / 1e6:,.3f}",
                f"{1e3 * seen.seconds:,.2f}",
            )
        table.add_section()
    return table


def _stage_table(profiles: Sequence[KFACProfile], cuda: bool) -> RenderableType:
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


def _factor_table(profiles: Sequence[KFACProfile]) -> RenderableType:
    """A row per sequence length."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("sequence", "tokens", "MB of factors", "x parameters", "with decompositions"):
        table.add_column(heading, justify="right", no_wrap=True)
    offloaded = profiles[0].offloaded_bytes is not None
    if offloaded:
        table.add_column("offloaded", justify="right", no_wrap=True)
    table.add_column("sides")
    for profile in profiles:
        table.add_row(
            f"{profile.length:,}",
            f"{profile.tokens:,}",
            _megabytes(profile.factor_bytes),
            f"{profile.factor_bytes / profile.parameter_bytes:.2f}",
            _megabytes(profile.used_bytes),
            *[_megabytes(profile.offloaded_bytes)] * offloaded,
            ", ".join(f"{count} {name}" for name, count in profile.representations.items()),
        )
    return table


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
