"""`gramian profile clipping`: cost of a DP-SGD step, its growth with the sequence length, and advice."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.profile.profile_output import (
    Output,
    machine_facts,
    megabytes,
    noise_warning,
    open_console,
    place_name,
    publish,
    read_choice,
    read_iterations,
    with_spread,
)
from gramian.cli.profile.profile_sizes import measure_lengths, profile_world, read_sizes
from gramian.cli.terminal import make_table, progress_bar
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.parallel.process_grid import ProcessGrid
    from gramian.verify.profiles.clipping_profile import ClippingProfile
    from gramian.verify.profiles.clipping_scaling import PowerLaw

MODES = ("auto", "bookkeeping", "keep", "two_pass")
ALGORITHMS = ("auto", "gram", "direct")
ON_CUDA = {"seq_lengths": [1024, 2048, 4096, 8192], "batch_size": 4, "layers": 6, "width": 768, "vocabulary": 8192}
ON_CPU = {"seq_lengths": [64, 128, 256, 512], "batch_size": 4, "layers": 2, "width": 128, "vocabulary": 256}
OUT = Path("runs/profile")


def run(arguments: argparse.Namespace) -> int:
    """Measure private and plain steps, print tables, and write `clipping.json` and `clipping.svg`. Returns the exit code."""
    mode, algorithm = read_choice(arguments, "mode", MODES), read_choice(arguments, "algorithm", ALGORITHMS)
    if mode == "keep" and algorithm != "auto":
        raise GramianError(
            f"argument --algorithm: {algorithm!r} is not used by --mode keep, which computes norms from the gradients that it "
            "stores; expected auto"
        )
    iterations = read_iterations(arguments)

    import torch

    from gramian.verify.profiles import clipping_profile

    cuda = torch.cuda.is_available() and not arguments.cpu
    sizes = read_sizes(arguments, ON_CUDA if cuda else ON_CPU)
    numbers_file, picture_file = (Path(arguments.out or OUT, f"clipping.{suffix}") for suffix in ("json", "svg"))
    console = open_console(("--out", numbers_file), ("--out", picture_file), ("--json", arguments.json))
    with profile_world(sizes, arguments) as grid:
        profiles, failure = measure_lengths(
            sizes.seq_lengths,
            grid,
            progress_bar(console),
            clipping_profile.rounds(iterations),
            lambda length, on_progress: clipping_profile.profile_clipping(
                sizes.model,
                length,
                sizes.batch_size,
                grid,
                mode=mode,
                algorithm=algorithm,
                iterations=iterations,
                on_progress=on_progress,
            ),
        )
    if not profiles:
        return publish("clipping", console, (), (), failure)

    from gramian.verify.profiles.clipping_plot import draw

    title = (
        f"Private step on {place_name(grid, ', bfloat16 autocast')}. {sizes.model.title}; batch {sizes.batch_size}; "
        f"mode {mode}, algorithm {algorithm}"
    )
    options = {"seq_lengths": sizes.seq_lengths, "batch_size": sizes.batch_size}
    options |= {name: sizes.model.facts[name] for name in ("layers", "width", "vocabulary")}
    fits = scaling(profiles)
    numbers = {
        "title": title,
        "options": {**options, "mode": mode, "algorithm": algorithm, "iterations": iterations},
        **machine_facts(grid),
        "profiles": [_numbers(profile, grid.kind) for profile in profiles],
        "scaling": {name: {**dataclasses.asdict(fit), "growth": fit.growth} for name, fit in fits.items()},
    }
    files: list[Output] = [
        ("numbers", numbers, numbers_file),
        ("picture", draw(profiles, title), picture_file),
        ("numbers", numbers, arguments.json),
    ]
    return publish("clipping", console, _report(profiles, title, grid, iterations), files, failure)


def _report(
    profiles: Sequence[ClippingProfile], title: str, grid: ProcessGrid, iterations: int
) -> Iterator[RenderableType]:
    from gramian.verify.profiles.clipping_scaling import advice, communication_share, shares

    yield title
    yield _time_table(profiles)
    yield (
        f"Milliseconds, medians of {iterations} steps of each kind after warm-up; ± half the distance between the quartiles. "
        "x: private over plain step of this run; no step(): the same of forward and backward alone."
    )
    yield _memory_table(profiles, grid.device.type == "cuda")
    yield _memory_note(grid)
    fits = scaling(profiles)
    if fits:
        yield _scaling_table(fits)
    for profile in profiles:
        for name, step in (("private", profile.private), ("plain", profile.plain)):
            if step.total.noisy:
                yield noise_warning(f"{name} step at {profile.length:,}", step.total)
    for profile in profiles:
        ways = ", ".join(f"{count} {way}" for way, count in profile.ways.items())
        stores = "two passes, nothing held" if profile.two_pass else f"holds {profile.held / 1e6:,.1f} MB"
        yield f"plan at {profile.length:,}: {ways}; {stores}"
    last = profiles[-1]
    phases = {name: spread.median for name, spread in last.phases.items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares(phases).items())
    flags = advice(phases, grid.kind)
    yield f"verdict at {last.length:,}: {parts}; communication {communication_share(phases):.0%} of the backward"
    for line in flags or ["nothing to turn: no phase is above its limit"]:
        yield f"{'FLAG' if flags else 'ok'}: {line}"


def _time_table(profiles: Sequence[ClippingProfile]) -> RenderableType:
    """Table of times in milliseconds: a row per sequence length, a column per phase of the private step."""
    from gramian.verify.profiles.clipping_profile import PHASES

    broken = {"communication": "communi-\ncation"}  # a narrow column
    headings = ("tokens", *(broken.get(name, name) for name in PHASES), "total", "plain", "x", "no\nstep()")
    table = make_table(*(f">{heading}" for heading in headings))
    for profile in profiles:
        table.add_row(
            f"{profile.length:,}",
            *(f"{1e3 * profile.phases[name].median:,.1f}" for name in PHASES),
            with_spread(profile.private.total),
            with_spread(profile.plain.total),
            f"{profile.ratio:.2f}",
            f"{profile.ratio_of_passes:.2f}",
        )
    return table


def _memory_table(profiles: Sequence[ClippingProfile], cuda: bool) -> RenderableType:
    kinds = [f">{kind}{name}" for kind in ("", "plain\n") for name in ("+ step", "peak", *["reserved"] * cuda)]
    table = make_table(">tokens", ">MB\nallocated", *kinds, ">x\n+ step")
    for profile in profiles:
        ours, plain = profile.private.memory, profile.plain.memory
        cells = [c for m in (ours, plain) for c in (m.above, m.peak, *[m.reserved] * cuda)]
        ratio = "-" if not ours.above or not plain.above else f"{ours.above / plain.above:.2f}"
        table.add_row(f"{profile.length:,}", megabytes(ours.allocated), *map(megabytes, cells), ratio)
    return table


def _memory_note(grid: ProcessGrid) -> str:
    whose = "" if grid.size == 1 else " of the first process"
    if grid.device.type == "cuda":
        return (
            f"Memory{whose}, of the CUDA allocator. allocated: when a step begins; + step: the most it needs above that; peak: "
            "both; reserved: by the allocator."
        )
    return (
        f"Memory{whose}. allocated: resident in the process when a step begins; + step: the most that torch allocates above "
        "that; peak: both."
    )


def scaling(profiles: Sequence[ClippingProfile]) -> dict[str, PowerLaw]:
    """{cost: power law in the sequence length} of times and memory of private and plain steps; empty for a single length."""
    from gramian.verify.profiles.clipping_scaling import fit_power

    costs: dict[str, list[float]] = {
        "private step": [p.private.total.median for p in profiles],
        "plain step": [p.plain.total.median for p in profiles],
        "norms": [p.phases["norm"].median for p in profiles],
        "clipped sums": [p.phases["clip"].median for p in profiles],
        "memory, private": [float(p.private.memory.above or 0) for p in profiles],
        "memory, plain": [float(p.plain.memory.above or 0) for p in profiles],
    }
    fits = {name: fit_power([p.length for p in profiles], values) for name, values in costs.items()}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _scaling_table(fits: dict[str, PowerLaw]) -> RenderableType:
    table = make_table("exponent in T", ">fit", ">95 % interval", "growth")
    for name, fit in fits.items():
        interval = "-" if fit.low is None or fit.high is None else f"{fit.low:.2f} to {fit.high:.2f}"
        table.add_row(name, f"{fit.exponent:.2f}", interval, fit.growth)
    return table


def _numbers(profile: ClippingProfile, kind: str) -> dict[str, Any]:
    from gramian.verify.profiles.clipping_scaling import COMMUNICATION_LIMIT, advice, communication_share, shares

    phases = {name: spread.median for name, spread in profile.phases.items()}
    waits = communication_share(phases)
    return {
        **dataclasses.asdict(profile),
        "ratio": profile.ratio,
        "ratio_of_passes": profile.ratio_of_passes,
        "shares": shares(phases),
        "communication_of_backward": waits,
        "flagged": waits > COMMUNICATION_LIMIT,
        "advice": advice(phases, kind),
    }
