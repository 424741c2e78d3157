"""`gramian profile clipping`: what a private step costs here, how that grows with the sequence, and what to turn."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.cli.under_torchrun import first_speaks
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType

    from gramian.models import GPTConfig
    from gramian.parallel.world import World
    from gramian.verify.clipping_profile import ClippingProfile, TimingSpread
    from gramian.verify.clipping_scaling import PowerLaw

USAGE = (
    "gramian profile clipping [--seq-lengths T ...] [--batch-size B] [--layers L] [--width W] [--vocabulary V] [--cpu] "
    "[--fsdp] [--mode auto|bookkeeping|keep|two_pass] [--algorithm auto|gram|direct] [--iterations N] [--json FILE] [--out DIR]"
)
MODES = ("auto", "bookkeeping", "keep", "two_pass")
ALGORITHMS = ("auto", "gram", "direct")
LEAST_ITERATIONS = 10
ON_CUDA = {"seq_lengths": [1024, 2048, 4096, 8192], "batch_size": 4, "layers": 6, "width": 768, "vocabulary": 8192}
ON_CPU = {"seq_lengths": [64, 128, 256, 512], "batch_size": 4, "layers": 2, "width": 128, "vocabulary": 256}
OUT = Path("runs/profile")

Progress = Callable[["Console", int], AbstractContextManager[Callable[[int], None]]]


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured."""

    seq_lengths: list[int]
    batch_size: int
    layers: int
    width: int
    vocabulary: int


def run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress) -> int:
    """Measure, print, and write `clipping.json` and `clipping.svg`; the first process alone prints and writes.

    Args:
        arguments: of the command.
        console_of: makes the console.
        progress: makes the bar.
    """
    return first_speaks(lambda first: _run(arguments, console_of, progress, first))


def _run(arguments: argparse.Namespace, console_of: Callable[[], Console], progress: Progress, first: bool) -> int:
    mode, algorithm = _choice("--mode", arguments.mode, MODES), _choice("--algorithm", arguments.algorithm, ALGORITHMS)
    if mode == "keep" and algorithm != "auto":
        raise GramianError(
            f"argument --algorithm: {algorithm!r} is not used by --mode keep, whose norms are those of what it keeps; "
            "accepted: auto"
        )
    iterations = LEAST_ITERATIONS if arguments.iterations is None else arguments.iterations
    if iterations < LEAST_ITERATIONS:
        raise GramianError(
            f"argument --iterations: got '{iterations}'; accepted: an integer of at least {LEAST_ITERATIONS}"
        )

    import torch

    from gramian.parallel.world import world
    from gramian.verify import clipping_profile
    from gramian.verify.kfac_profile import model_config

    cuda = torch.cuda.is_available() and not arguments.cpu
    size = _size(arguments, ON_CUDA if cuda else ON_CPU)
    try:
        config = model_config(size.layers, size.width, size.vocabulary, max(size.seq_lengths))
    except GramianError as problem:
        raise GramianError(f"argument --{problem}") from None
    targets = _targets(arguments) if first else []

    console = console_of()
    profiles: list[ClippingProfile] = []
    failure = ""
    with world(arguments.cpu, arguments.fsdp) as where:
        steps = clipping_profile.rounds(iterations) * len(size.seq_lengths)
        with progress(console, steps if first else 0) as advance:
            for length in size.seq_lengths:
                try:
                    measured = clipping_profile.profile_clipping(
                        config,
                        length,
                        size.batch_size,
                        where,
                        mode=mode,
                        algorithm=algorithm,
                        iterations=iterations,
                        on_progress=lambda length=length: advance(length),  # type: ignore[misc]
                    )
                    where.wait()
                except (RuntimeError, MemoryError, GramianError) as problem:  # out of memory is a RuntimeError in torch
                    lines = str(problem).splitlines() or [""]
                    failure = where.first_failure(f"sequence length {length}: {type(problem).__name__}: {lines[0]}")
                    break
                profiles.append(measured)
    if first and profiles:
        title = _title(config, size.batch_size, where, mode, algorithm)
        for part in _report(profiles, title, where, iterations):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
        for line in _write(targets, profiles, title, size, where, mode, algorithm, iterations):
            console.print(line, markup=False, soft_wrap=True)
    if failure:
        raise RunFailed(f"profile clipping: {failure}")
    return 0


# ---- input -----------------------------------------------------------------------------------------------------------


def _choice(option: str, given: str | None, known: Sequence[str]) -> str:
    if given is None:
        return "auto"
    if given not in known:
        raise GramianError(f"argument {option}: got {given!r}; accepted: {', '.join(known)}")
    return given


def _size(arguments: argparse.Namespace, defaults: dict[str, Any]) -> Size:
    given = {name: getattr(arguments, name) for name in defaults}
    size = Size(**{name: default if given[name] is None else given[name] for name, default in defaults.items()})
    return dataclasses.replace(size, seq_lengths=sorted(set(size.seq_lengths)))


def _targets(arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    """("numbers" or "picture", file), with their folders made, before anything is measured."""
    out: Path = arguments.out or OUT
    asked = [("--out", "numbers", out / "clipping.json"), ("--out", "picture", out / "clipping.svg")]
    if arguments.json is not None:
        asked.append(("--json", "numbers", arguments.json))
    for option, _, file in asked:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            problem = "Is a directory" if file.is_dir() else ""
            if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
                problem = "Permission denied"
        except OSError as refused:
            problem = refused.strerror or type(refused).__name__
        if problem:
            raise GramianError(f"argument {option}: {file}: {problem}; accepted: a file that can be written")
    return [(kind, file) for _, kind, file in asked]


# ---- output ----------------------------------------------------------------------------------------------------------


def _title(config: GPTConfig, batch_size: int, where: World, mode: str, algorithm: str) -> str:
    import torch

    on = f"CPU, {_counted(torch.get_num_threads(), 'thread')}"
    if where.device.type == "cuda":
        on = f"{torch.cuda.get_device_name(where.device)}, bfloat16 autocast"
    spread = {"one": "", "ddp": f", DDP over {where.size}", "fsdp2": f", FSDP2 over {where.size}"}[where.kind]
    return (
        f"Private step on {on}{spread}. GPT: {_counted(config.layers, 'layer')}, width {config.width}, vocabulary "
        f"{config.vocabulary}; batch {batch_size}; mode {mode}, algorithm {algorithm}"
    )


def _report(profiles: Sequence[ClippingProfile], title: str, where: World, iterations: int) -> Iterator[RenderableType]:
    from gramian.verify.clipping_scaling import advice, communication_share, shares

    yield title
    yield _time_table(profiles)
    yield (
        f"Milliseconds, medians of {iterations} steps of each kind after warm-up; ± half the distance between the quartiles. "
        "x: private over plain step of this run; no step(): the same of forward and backward alone."
    )
    yield _memory_table(profiles, where.device)
    yield _memory_note(where)
    fits = scaling(profiles)
    if fits:
        yield _scaling_table(fits)
    for profile in profiles:
        for name, step in (("private", profile.private), ("plain", profile.plain)):
            if step.total.noisy:
                yield (
                    f"noisy: quartiles of the {name} step at {profile.length:,} lie {step.total.iqr / step.total.median:.0%} "
                    "of its median apart; is the machine busy? More --iterations help"
                )
    for profile in profiles:
        ways = ", ".join(f"{count} {way}" for way, count in profile.ways.items())
        held = "two passes, nothing held" if profile.two_pass else f"holds {profile.held / 1e6:,.1f} MB"
        yield f"plan at {profile.length:,}: {ways}; {held}"
    last = profiles[-1]
    phases = {name: spread.median for name, spread in last.phases.items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares(phases).items())
    flags = advice(phases, where.kind)
    yield f"verdict at {last.length:,}: {parts}; communication {communication_share(phases):.0%} of the backward"
    for line in flags or ["nothing to turn: no phase is above its limit"]:
        yield f"{'FLAG' if flags else 'ok'}: {line}"


def _table(*headings: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _time_table(profiles: Sequence[ClippingProfile]) -> RenderableType:
    """A row per sequence length."""
    from gramian.verify.clipping_profile import PHASES

    broken = {"communication": "communi-\ncation"}  # so that a row fits into 100 columns
    table = _table("tokens", *(broken.get(name, name) for name in PHASES), "total", "plain", "x", "no\nstep()")
    for profile in profiles:
        table.add_row(
            f"{profile.length:,}",
            *(_milliseconds(profile.phases[name]) for name in PHASES),
            _with_spread(profile.private.total),
            _with_spread(profile.plain.total),
            f"{profile.ratio:.2f}",
            f"{profile.ratio_of_passes:.2f}",
        )
    return table  # type: ignore[no-any-return]


def _memory_table(profiles: Sequence[ClippingProfile], device: torch.device) -> RenderableType:
    cuda = device.type == "cuda"
    kinds = [f"{kind}{name}" for kind in ("", "plain\n") for name in ("+ step", "peak", *["reserved"] * cuda)]
    table = _table("tokens", "MB\nallocated", *kinds, "x\n+ step")
    for profile in profiles:
        ours, plain = profile.private.memory, profile.plain.memory
        cells = [c for m in (ours, plain) for c in (m.above, m.peak, *[m.reserved] * cuda)]
        ratio = "-" if not ours.above or not plain.above else f"{ours.above / plain.above:.2f}"
        table.add_row(f"{profile.length:,}", _megabytes(ours.allocated), *map(_megabytes, cells), ratio)
    return table  # type: ignore[no-any-return]


def _memory_note(where: World) -> str:
    whose = "" if where.size == 1 else " of the first process"
    if where.device.type == "cuda":
        return (
            f"Memory{whose}, of the CUDA allocator. allocated: when a step begins; + step: the most it needs above that; peak: "
            "both; reserved: what the allocator holds."
        )
    return (
        f"Memory{whose}. allocated: resident in the process when a step begins; + step: the most that torch allocates above "
        "that; peak: both."
    )


def scaling(profiles: Sequence[ClippingProfile]) -> dict[str, PowerLaw]:
    """Exponents in T of what grows with it, by name; empty for a single length."""
    from gramian.verify.clipping_scaling import fit_power

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
    table = _table("exponent in T", "fit", "95 % interval")
    table.add_column("growth")
    table.columns[0].justify = "left"
    for name, fit in fits.items():
        interval = "-" if fit.low is None or fit.high is None else f"{fit.low:.2f} to {fit.high:.2f}"
        table.add_row(name, f"{fit.exponent:.2f}", interval, fit.growth)
    return table  # type: ignore[no-any-return]


def _write(
    files: Sequence[tuple[str, Path]],
    profiles: Sequence[ClippingProfile],
    title: str,
    size: Size,
    where: World,
    mode: str,
    algorithm: str,
    iterations: int,
) -> Iterator[str]:
    from gramian.verify.clipping_plot import draw

    numbers = {
        "title": title,
        "options": {**dataclasses.asdict(size), "mode": mode, "algorithm": algorithm, "iterations": iterations},
        **_machine(where),
        "profiles": [_numbers(profile, where.kind) for profile in profiles],
        "scaling": {name: {**dataclasses.asdict(fit), "growth": fit.growth} for name, fit in scaling(profiles).items()},
    }
    text = json.dumps(numbers, indent=2) + "\n"
    for kind, file in files:
        try:
            file.write_text(draw(profiles, title) if kind == "picture" else text, encoding="utf-8")
        except OSError as problem:
            raise RunFailed(f"profile clipping: {file}: {problem.strerror}") from None
        yield f"{kind}: {file}"


def _machine(where: World) -> dict[str, Any]:
    import torch

    cuda = where.device.type == "cuda"
    return {
        "processes": where.size,
        "parallel": where.kind,
        "device": torch.cuda.get_device_name(where.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _numbers(profile: ClippingProfile, kind: str) -> dict[str, Any]:
    from gramian.verify.clipping_scaling import COMMUNICATION_LIMIT, advice, communication_share, shares

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


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _milliseconds(spread: TimingSpread) -> str:
    return f"{1e3 * spread.median:,.1f}"


def _with_spread(spread: TimingSpread) -> str:
    return f"{1e3 * spread.median:,.1f}±{1e3 * spread.iqr / 2:,.1f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
