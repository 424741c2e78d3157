"""`gramian profile train`: time of every phase of a training step, and the effect of compilation and other settings."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gramian.cli.config_arguments import check_device, is_sharded
from gramian.cli.profile.profile_output import (
    machine_facts,
    megabytes,
    noise_warning,
    open_console,
    place_name,
    publish,
    read_iterations,
    with_spread,
)
from gramian.cli.terminal import add_group, make_table, progress_bar
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.parallel.process_grid import ProcessGrid
    from gramian.train.config.config import Config
    from gramian.verify.profiles.train_profile import TrainProfile


def run(arguments: argparse.Namespace) -> int:
    """Measure the training step of a config, print the tables and write the numbers. Returns the exit code."""
    import torch

    from gramian.parallel.world import world
    from gramian.verify.profiles import train_profile
    from gramian.verify.profiles.measurements import first_line

    iterations = read_iterations(arguments)
    cuda = torch.cuda.is_available() and not arguments.cpu
    config = _config(arguments, "cuda" if cuda else "cpu")
    check_device(config)
    cuda = cuda and config.run.device != "cpu"
    console, compiled = open_console(("--json", arguments.json)), cuda or arguments.compile
    total, done = train_profile.turns(iterations, compiled), 0

    def advance(name: str) -> None:
        nonlocal done
        done += 1
        update(done, total, name)

    failure, found = "", None
    with world(not cuda, is_sharded(config)) as grid, progress_bar(console) as update:
        try:
            found = train_profile.profile_train(
                config, grid, iterations=iterations, compiled=compiled, on_progress=advance
            )
            grid.wait()
        except GramianError:
            raise
        except (RuntimeError, MemoryError) as problem:  # out of memory is a RuntimeError in torch
            failure = grid.first_failure(first_line(problem))
    if found is None:
        return publish("train", console, (), (), failure)
    title = _title(config, grid)
    numbers = {
        "title": title,
        "config": dataclasses.asdict(config),
        "iterations": iterations,
        **machine_facts(grid),
        "tokens_per_second": found.tokens_per_second,
        **dataclasses.asdict(found),
    }
    report = (title, *_report(found, grid, iterations, compiled))
    return publish("train", console, report, [("numbers", numbers, arguments.json)], failure or found.failure)


def _config(arguments: argparse.Namespace, device: str) -> Config:
    """The config named on the command line, or a default one, with the overrides applied."""
    from gramian.train.config.config import load_config
    from gramian.verify.profiles.train_profile import default_config

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


def _title(config: Config, grid: ProcessGrid) -> str:
    from gramian.train.loop.precision import resolve_precision

    model, data = config.model, config.data
    name = f"{'GPT' if model.kind == 'gpt' else 'Goose'}: {model.layers} × width {model.width}"
    name = str(model.path) if model.kind == "huggingface" else name
    return (
        f"Training step on {place_name(grid)}. {name}; {data.batch} windows of {data.length} tokens; "
        f"{resolve_precision(config.precision, grid.device).kind}, {config.optimizer.kind}, compile {config.compile.mode}"
    )


def _report(profile: TrainProfile, grid: ProcessGrid, iterations: int, compiled: bool) -> Iterator[RenderableType]:
    yield _phase_table(profile, grid)
    yield (
        f"Milliseconds, medians of {iterations} steps after warm-up; ± half the distance between the quartiles. "
        f"{profile.tokens_per_second:,.0f} tokens a second."
    )
    yield _memory_line(profile, grid)
    if grid.size > 1:
        yield (
            "communication: what forward and backward of the first process take more than without any; communication that "
            "overlaps with them does not show."
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
        yield noise_warning("step", profile.total)


def _phase_table(profile: TrainProfile, grid: ProcessGrid) -> RenderableType:
    table = make_table("phase", ">ms", ">share")
    for name, spread in profile.phases.items():
        if name != "communication" or grid.size > 1:
            table.add_row(name, with_spread(spread, 2), f"{spread.median / profile.total.median:.0%}")
    table.add_section()
    table.add_row("step", with_spread(profile.total, 2), "")
    return table


def _memory_line(profile: TrainProfile, grid: ProcessGrid) -> str:
    memory = profile.memory
    if grid.device.type != "cuda":
        return f"Memory: a step allocates at most {megabytes(memory.above)} MB above what was there."
    return (
        f"Memory of the first GPU, MB: {megabytes(memory.allocated)} allocated when a step begins, at most "
        f"{megabytes(memory.above)} more in it, {megabytes(memory.reserved)} reserved by the allocator."
    )


def _knob_table(profile: TrainProfile) -> RenderableType:
    table = make_table("knob", "timed", "variant", ">ms", ">x", ">MB\n+ step")
    for knob in profile.knobs:
        rows = [
            (
                "" if number else knob.what,
                variant.name,
                with_spread(variant.seconds, 2),
                f"{variant.ratio:.2f}",
                megabytes(variant.memory),
            )
            for number, variant in enumerate(knob.variants)
        ]
        add_group(table, knob.key or knob.name, rows)
    return table
