"""What the run will take: memory by the plan, time by the clock."""

import statistics
import time
from typing import cast

import torch
from torch import nn

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.parallel.world import World
from gramian.plan.parallel_strategy import decide
from gramian.plan.transformer_memory import Kind
from gramian.train.build.memory_needs import needs_of
from gramian.train.build.run_parts import build_kfac
from gramian.train.build.snapshot_budget import plan_snapshots
from gramian.train.config.config import Config
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.precision import Numbers
from gramian.train.loop.stepper import Stepper

TIMED = 3
"""Steps whose median is taken, after one that warms up."""
MICRO_BATCHES = 2
"""Most of a timed step; the rest of it is taken to cost the same."""
ENOUGH = 3.0
"""Seconds after which no further step is timed."""


def memory(config: Config, vocabulary: int, numbers: Numbers) -> Check:
    """Whether the run fits one GPU of this machine, or all of them; nothing is allocated."""
    if numbers.device != "cuda":
        return Check("memory", "no GPU", "-", True, "gramian plan --gpus N --gpu-memory GB")
    cards = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return planned(config, vocabulary, numbers, len(cards), min(cards))


def planned(config: Config, vocabulary: int, numbers: Numbers, gpus: int, gpu_memory: int) -> Check:
    """Whether the run fits one GPU, or several.

    Args:
        config: of the run. What K-FAC and private training hold on top is not counted.
        vocabulary: of its tokens.
        numbers: its precision.
        gpus: how many there are.
        gpu_memory: bytes of one.
    """
    needs = needs_of(config, vocabulary, cast("Kind", numbers.kind), "cuda")
    decision, hint = decide(needs, 1, gpu_memory, config.parallel.strategy), ""
    if not decision.fits:
        hint = decision.why
        several = decide(needs, gpus, gpu_memory, config.parallel.strategy)
        if several.fits:
            decision, hint = several, f"with torchrun --nproc_per_node={gpus}: {several.why}"
    held = min(decision.rows[-1].held) if decision.strategy is None else decision.held(decision.strategy)
    return Check("memory", format_bytes(held), format_bytes(decision.usable), decision.fits, hint, held)


def host_memory(config: Config, numbers: Numbers, model: nn.Module) -> Check:
    """Whether the copies of the state fit into what this host has left; one process."""
    kfac = None if config.kfac is None else build_kfac(config)
    try:
        plan = plan_snapshots(config, World(0, 1, torch.device(numbers.device), "one"), numbers, model, kfac)
    except GramianError as problem:
        return Check("host memory", "too much", "-", False, str(problem))
    hint = str(plan) if plan.snapshots < plan.wish else ""
    return Check("host memory", format_bytes(plan.host), format_bytes(plan.usable or 0), True, hint, plan.host)


def duration(subject: ExaminedRun, stepper: Stepper) -> Check:
    """Seconds of a step and of the run. Four steps at most, of two micro-batches at most.

    Args:
        subject: what is examined.
        stepper: of a model that may be changed; it is warm.
    """
    config = subject.config
    rows = min(config.data.batch, MICRO_BATCHES * subject.room)
    seconds = []
    for position in range(TIMED + 1):
        batch = subject.batch(rows, position)
        started = _now(subject)
        stepper.take(batch, config.optimizer.lr)
        seconds.append(_now(subject) - started)
        if position and sum(seconds) > ENOUGH:
            break
    step = statistics.median(seconds[1:]) * config.data.batch / rows
    sections = [f"[{name}]" for name in ("kfac", "privacy") if getattr(config, name) is not None]
    beside = [*sections, *["compile.mode"] * (config.compile.mode != "off")]
    hint = f"plain eager steps on one process; {' and '.join(beside)} not counted" if beside else ""
    measured = f"{_told(step)} a step, {_told(step * config.run.steps)} in all"
    return Check("time", measured, "-", True, hint, step)


def _now(subject: ExaminedRun) -> float:
    if subject.world.device.type == "cuda":
        torch.cuda.synchronize(subject.world.device)
    return time.perf_counter()


def _told(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
