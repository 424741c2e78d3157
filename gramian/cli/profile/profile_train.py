"""`gramian profile train`: where the time of a training step goes here, and what compilation, recomputation and more change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.cli.under_torchrun import first_speaks
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.parallel.world import World
    from gramian.train.config.config import Config
    from gramian.verify.clipping_profile import TimingSpread
    from gramian.verify.train_profile import TrainProfile

USAGE = "gramian profile train [CONFIG.toml] [section.key=value ...] [--iterations N] [--compile] [--cpu] [--json FILE]"

Progress = Callable[["Console", int], AbstractContextManager[Callable[[Any], None]]]


def run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress) -> int:
    """Measure and print; the first process alone prints and writes.

    Args:
        arguments: of the command.
        console_of: makes the console.
        progress: makes the bar.
    """
    return first_speaks(lambda first: _run(arguments, console_of, progress, first))


def _run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress, first: bool) -> int:
    import torch

    from gramian.cli import train
    from gramian.parallel.world import world
    from gramian.verify import train_profile

    least = train_profile.LEAST_ITERATIONS
    iterations = least if arguments.iterations is None else arguments.iterations
    if iterations < least:
        raise GramianError(f"argument --iterations: got '{iterations}'; accepted: an integer of at least {least}")
    cuda = torch.cuda.is_available() and not arguments.cpu
    config = _config(arguments, "cuda" if cuda else "cpu")
    train.check_device(config)
    cuda = cuda and config.run.device != "cpu"
    if first and arguments.json is not None:
        refuse_unwritable(arguments.json)

    console, compiled = console_of(), cuda or arguments.compile
    failure, found = "", None
    with world(not cuda, train.sharded(config)) as where:
        total = train_profile.turns(iterations, compiled) if first else 0
        with progress(console, total) as advance:
            try:
                found = train_profile.profile_train(
                    config, where, iterations=iterations, compiled=compiled, on_progress=advance
                )
                where.wait()
            except GramianError:
                raise
            except (RuntimeError, MemoryError) as problem:  # out of memory is a RuntimeError in torch
                lines = str(problem).splitlines() or [""]
                failure = where.first_failure(f"{type(problem).__name__}: {lines[0]}")
    if found is None:
        raise RunFailed(f"profile train: {failure}")
    if first:
        for part in _report(found, config, where, iterations, compiled):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
        if arguments.json is not None:
            _write(arguments.json, found, config, where, iterations)
            console.print(f"numbers: {arguments.json}", markup=False, soft_wrap=True)
    if failure or found.failure:
        raise RunFailed(f"profile train: {failure or found.failure}")
    return 0


# ---- input -----------------------------------------------------------------------------------------------------------


def _config(arguments: argparse.Namespace, device: str) -> Config:
    """The config that is named, or a default one, with the overrides."""
    from gramian.train.config.config import load_config
    from gramian.verify.train_profile import default_config

    named, overrides = arguments.config, list(arguments.overrides)
    if named is not None and "=" in named and not Path(named).exists():
        named, overrides = None, [named, *overrides]
    if arguments.cpu:
        overrides.append("run.device=cpu")
    if named is not None:
        return load_config(named, overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "default.toml")
        path.write_text(default_config(device).toml(), encoding="utf-8")
        return load_config(path, overrides)


def refuse_unwritable(file: Path) -> None:
    """Make the folder, before anything is measured.

    Raises:
        GramianError: if the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        problem = "Is a directory" if file.is_dir() else ""
        if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
            problem = "Permission denied"
    except OSError as refused:
        problem = refused.strerror or type(refused).__name__
    if problem:
        raise GramianError(f"argument --json: {file}: {problem}; accepted: a file that can be written")


# ---- output ----------------------------------------------------------------------------------------------------------


def _title(config: Config, where: World) -> str:
    import torch

    from gramian.train.loop.precision import numbers_for

    threads = torch.get_num_threads()
    on = f"CPU, {threads} thread{'s' * (threads != 1)}"
    if where.device.type == "cuda":
        on = torch.cuda.get_device_name(where.device)
    spread = {"one": "", "ddp": f", DDP over {where.size}", "fsdp2": f", FSDP2 over {where.size}"}[where.kind]
    model, data = config.model, config.data
    what = f"GPT: {model.layers} × width {model.width}" if model.kind == "gpt" else str(model.path)
    return (
        f"Training step on {on}{spread}. {what}; {data.batch} windows of {data.length} tokens; "
        f"{numbers_for(config.precision, where.device).kind}, {config.optimizer.kind}, compile {config.compile.mode}"
    )


def _report(
    profile: TrainProfile, config: Config, where: World, iterations: int, compiled: bool
) -> Iterator[RenderableType]:
    yield _title(config, where)
    yield _phase_table(profile, where)
    yield (
        f"Milliseconds, medians of {iterations} steps after warm-up; ± half the distance between the quartiles. "
        f"{profile.tokens_per_second:,.0f} tokens a second."
    )
    yield _memory_line(profile, where)
    if where.size > 1:
        yield (
            "communication: what forward and backward of the first process take more than without any; what runs behind them "
            "does not show."
        )
    yield _knob_table(profile)
    yield (
        "x: median over turns of the ratio to the first of its kind, on one model and one batch. + step: the most above what "
        "is allocated when it begins."
    )
    if not compiled:
        yield "compile.mode was not measured: --compile does, and takes a while on a CPU."
    for knob in profile.knobs:
        if knob.failure:
            yield f"not measured: {knob.name}: {knob.failure}"
    if profile.total.noisy:
        yield (
            f"noisy: quartiles of the step lie {profile.total.iqr / profile.total.median:.0%} of its median apart; is the "
            "machine busy? More --iterations help"
        )


def _phase_table(profile: TrainProfile, where: World) -> RenderableType:
    table = _table(["phase"], ["ms", "share"])
    for name, spread in profile.phases.items():
        if name != "communication" or where.size > 1:
            table.add_row(name, _milliseconds(spread), f"{spread.median / profile.total.median:.0%}")
    table.add_section()
    table.add_row("step", _milliseconds(profile.total), "")
    return table  # type: ignore[no-any-return]


def _memory_line(profile: TrainProfile, where: World) -> str:
    memory = profile.memory
    if where.device.type != "cuda":
        return f"Memory: a step allocates at most {_megabytes(memory.above)} MB above what was there."
    return (
        f"Memory of the first GPU, MB: {_megabytes(memory.allocated)} allocated when a step begins, at most "
        f"{_megabytes(memory.above)} more in it, {_megabytes(memory.reserved)} reserved by the allocator."
    )


def _knob_table(profile: TrainProfile) -> RenderableType:
    table = _table(["knob", "timed", "variant"], ["ms", "x", "MB\n+ step"])
    for knob in profile.knobs:
        for number, variant in enumerate(knob.variants):
            table.add_row(
                "" if number else knob.key or knob.name,
                "" if number else knob.what,
                variant.name,
                _milliseconds(variant.seconds),
                f"{variant.ratio:.2f}",
                _megabytes(variant.memory),
            )
        table.add_section()
    return table  # type: ignore[no-any-return]


def _table(left: list[str], right: list[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _write(file: Path, profile: TrainProfile, config: Config, where: World, iterations: int) -> None:
    import torch

    cuda = where.device.type == "cuda"
    numbers = {
        "title": _title(config, where),
        "config": dataclasses.asdict(config),
        "iterations": iterations,
        "processes": where.size,
        "parallel": where.kind,
        "device": torch.cuda.get_device_name(where.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "tokens_per_second": profile.tokens_per_second,
        **dataclasses.asdict(profile),
    }
    try:
        file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise RunFailed(f"profile train: {file}: {problem.strerror}") from None


def _milliseconds(spread: TimingSpread) -> str:
    return f"{1e3 * spread.median:,.2f}±{1e3 * spread.iqr / 2:,.2f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
