"""`gramian profile kfac`: cost of curvature in time and memory, traffic between processes, and offloading to the CPU."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gramian.cli.profile.profile_output import megabytes, open_console, place_name, publish, read_choice
from gramian.cli.profile.profile_sizes import ProfileSizes, measure_lengths, profile_world, read_sizes
from gramian.cli.terminal import add_group, make_table, progress_bar
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.profiles.kfac_profile import KFACProfile

DEFAULTS = {"seq_lengths": [128, 256], "batch_size": 8, "layers": 4, "width": 128, "vocabulary": 256}
REDUCTIONS = ("gram", "gather", "dense", "none")


def run(arguments: argparse.Namespace) -> int:
    """Measure K-FAC at every sequence length, print the tables and write the numbers. Returns the exit code."""
    reduce, sizes = read_choice(arguments, "reduce", REDUCTIONS), read_sizes(arguments, DEFAULTS)
    console = open_console(("--json", arguments.json))
    with profile_world(sizes, arguments) as grid:
        if arguments.offload and grid.device.type == "cpu":
            raise GramianError("argument --offload: the model is on the CPU, and so are its factors; expected a GPU")
        profiles, failure = measure(sizes, grid, console, reduce, arguments.offload)
    if not profiles:
        return publish("kfac", console, (), (), failure)
    files = [("numbers", _numbers(profiles, sizes, grid, reduce), arguments.json)]
    return publish("kfac", console, report(profiles, sizes, grid, reduce), files, failure)


def default_sizes() -> ProfileSizes:
    """Sizes of the small reference GPT that is measured if the command line names no other model."""
    return read_sizes(argparse.Namespace(config=None, cpu=False, **dict.fromkeys(DEFAULTS)), DEFAULTS)


def measure(
    sizes: ProfileSizes, grid: ProcessGrid, console: Console, reduce: str = "gram", offload: bool = False
) -> tuple[list[KFACProfile], str]:
    """Profile K-FAC at every sequence length; returns the profiles, and why it ended early ("" if it did not). Collective."""
    from gramian.verify.profiles import kfac_profile

    return measure_lengths(
        sizes.seq_lengths,
        grid,
        progress_bar(console),
        kfac_profile.WARM_UP + kfac_profile.ROUNDS,
        lambda length, on_progress: kfac_profile.profile_kfac(
            sizes.model, length, sizes.batch_size, grid, reduce=reduce, offload=offload, on_progress=on_progress
        ),
    )


def _numbers(profiles: Sequence[KFACProfile], sizes: ProfileSizes, grid: ProcessGrid, reduce: str) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(grid.device) if grid.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "processes": grid.size,
        "parallel": grid.kind,
        "reduce": reduce,
        "model": sizes.model.facts,
        "batch_size": sizes.batch_size,
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
    }


def report(
    profiles: Sequence[KFACProfile], sizes: ProfileSizes, grid: ProcessGrid, reduce: str = "gram"
) -> Iterator[RenderableType]:
    """Lines and tables that describe one or more K-FAC profiles, for printing; `reduce` is how processes join their factors."""
    from gramian.verify.profiles.kfac_profile import ROUNDS

    cuda, several = grid.device.type == "cuda", grid.size > 1
    memory = "resident in the process, peak since it began"
    if cuda:
        memory = "allocated on the GPU, peak in the stage, reserved by its allocator"
    joined = f", joined by {reduce}" if several else ""
    yield f"K-FAC on {place_name(grid, ', bfloat16 autocast')}{joined}"
    each = " on each process" if several else ""
    yield f"{sizes.model.title}; batch {sizes.batch_size}{each}"
    yield _stage_table(profiles, cuda)
    yield "plain step: forward and backward. capture: the same inside kfac.capture, factors made."
    if several:
        yield "reduce: the part of the capture spent in collectives of K-FAC."
    yield "decompose: what the first natural gradient takes more than a second one. apply: the second."
    if profiles[0].offloaded_bytes is not None:
        yield "offload: what a capture takes more if its factors are stored on the CPU. fetch: what a natural gradient does."
    yield f"Medians of {ROUNDS} rounds after warm-up. MB {memory}."
    if several:
        yield _traffic_table(profiles)
        yield "Bytes that leave the first process for K-FAC alone, and its waiting time; DDP and FSDP2 are not counted."
    yield _factor_table(profiles)
    yield "Factors from kfac.record(), with its default options, a refresh on every step and no moving average."


def _traffic_table(profiles: Sequence[KFACProfile]) -> RenderableType:
    """Table of the communication between processes: a row per sequence length, stage and kind of collective."""
    table = make_table(">sequence", "stage", "collective", ">MB sent", ">ms")
    for profile in profiles:
        rows = [
            (seen.stage, seen.kind.replace("_", "-"), f"{seen.sent / 1e6:,.3f}", f"{1e3 * seen.seconds:,.2f}")
            for seen in profile.collectives
        ]
        add_group(table, f"{profile.length:,}", rows)
    return table


def _stage_table(profiles: Sequence[KFACProfile], cuda: bool) -> RenderableType:
    """Table of time and memory: a row per sequence length and stage of K-FAC."""
    table = make_table(
        ">sequence", "stage", ">ms", ">x plain step", ">MB before", ">after", ">peak", *[">reserved"] * cuda
    )
    for profile in profiles:
        rows = []
        for stage in profile.stages:
            memory = stage.memory
            cells = [memory.before, memory.after, memory.peak] + [memory.reserved] * cuda
            rows.append(
                (stage.name, f"{1e3 * stage.seconds:,.2f}", f"{stage.ratio:.2f}", *(megabytes(cell) for cell in cells))
            )
        add_group(table, f"{profile.length:,}", rows)
    return table


def _factor_table(profiles: Sequence[KFACProfile]) -> RenderableType:
    """Table of the memory of K-FAC's factors: a row per sequence length."""
    offloaded = profiles[0].offloaded_bytes is not None
    headings = (">sequence", ">tokens", ">MB of factors", ">x parameters", ">with decompositions")
    table = make_table(*headings, *[">offloaded"] * offloaded, "sides")
    for profile in profiles:
        table.add_row(
            f"{profile.length:,}",
            f"{profile.tokens:,}",
            megabytes(profile.factor_bytes),
            f"{profile.factor_bytes / profile.parameter_bytes:.2f}",
            megabytes(profile.used_bytes),
            *[megabytes(profile.offloaded_bytes)] * offloaded,
            ", ".join(f"{count} {name}" for name, count in profile.representations.items()),
        )
    return table
