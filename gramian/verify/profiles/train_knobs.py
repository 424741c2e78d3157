"""Measure the effect of each setting on time and memory of a training step: compilation, recomputation, attention, AdamW.

Variants of a setting take turns on one model and one batch, and a ratio is the median of the ratios within a turn, so that
drift of the machine cancels.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import set_recomputation
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.verify.profiles.measurements import (
    StepMemory,
    TimingSpread,
    first_line,
    highest_on_cpu,
    start_memory,
    synchronize,
)

WARM_UP = 3
BLOCK = {"cuda": 4, "cpu": 1}
"""{device: number of steps that are timed together in a variant's turn}; on a GPU the host runs ahead, as in training."""
RATE = 1e-5
"""Learning rate of all measured steps; it only has to keep the weights finite."""
Implementation = Literal["fused", "foreach", "loop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("fused", "foreach", "loop")


@dataclass(frozen=True)
class Variant:
    """Measured time and memory of one value of a setting."""

    name: str
    seconds: TimingSpread
    ratio: float
    """Median ratio of this variant's seconds to those of the first variant."""
    memory: int | None
    """Maximum bytes that the timed work needs in addition to those allocated before it; None: unknown."""


@dataclass(frozen=True)
class Knob:
    """A setting of a training step, and its measured variants."""

    name: str
    key: str
    """Config key of the setting; empty if it has none."""
    what: str
    """What is timed: "step" or "optimizer.step()"."""
    variants: tuple[Variant, ...]
    failure: str = ""
    """Why the variants could not be measured; empty if they were."""


@dataclass(frozen=True)
class _Way:
    """A variant of a setting that is still to be measured."""

    name: str
    step: Callable[[], Any]
    enter: Callable[[], None] = lambda: None
    """Switches the model to this variant; not timed."""


def knob_turns(iterations: int, compiled: bool) -> int:
    """Number of calls of `on_progress` that `profile_knobs` makes with the same `iterations` and `compiled`."""
    return (2 + 2 + 2 * len(IMPLEMENTATIONS) + 2 * compiled) * (WARM_UP + iterations)


def profile_knobs(
    config: Config, grid: ProcessGrid, iterations: int, compiled: bool, on_progress: Callable[[str], None]
) -> Iterator[Knob]:
    """Measure every setting (compilation, recomputation, attention, AdamW) of a config, without [kfac]. Collective.

    `iterations`, `compiled` and `on_progress` are those of `profile_train`.
    """
    asked = config.compile.mode
    config = replace(config, kfac=None, compile=replace(config.compile, mode="off"))
    parts = build(config, grid)
    assert isinstance(parts.stepper, PlainStepper)
    try:
        batch: Any = next(iter(parts.batches_from(0, ())))
    finally:
        parts.close()
    take = partial(parts.stepper.take, batch, RATE)
    measure = partial(_measured, grid=grid, iterations=iterations, on_progress=on_progress)
    if compiled:
        mode = "default" if asked == "off" else asked
        yield measure("compilation", "compile.mode", "step", lambda: _compiled_ways(parts.model, mode, take))
        parts.model._compiled_call_impl = None
    blocks = config.parallel.checkpoint_blocks
    ways = [_Way(str(size), take, partial(set_recomputation, parts.model, size)) for size in (0, blocks or 1)]
    yield measure("activation checkpointing", "parallel.checkpoint_blocks", "step", lambda: ways)
    set_recomputation(parts.model, blocks)
    yield measure("attention", "", "step", lambda: _attention_ways(take))
    steppers = {name: _with_adamw(parts, name) for name in IMPLEMENTATIONS}
    ways_of_adamw = [_Way(name, partial(stepper.take, batch, RATE)) for name, stepper in steppers.items()]
    yield measure("AdamW", "optimizer.implementation", "step", lambda: ways_of_adamw)
    parts.stepper.watch(batch)  # leaves gradients
    alone = [_Way(name, stepper.optimizer.step) for name, stepper in steppers.items()]
    yield measure("AdamW", "optimizer.implementation", "optimizer.step()", lambda: alone)


def _compiled_ways(model: nn.Module, mode: str, take: Callable[[], Any]) -> list[_Way]:
    model.compile(mode=None if mode == "default" else mode)
    call = model._compiled_call_impl

    def enter(impl: Any) -> None:
        model._compiled_call_impl = impl

    return [_Way("off", take, partial(enter, None)), _Way(mode, take, partial(enter, call))]


def _attention_ways(take: Callable[[], Any]) -> list[_Way]:
    def written_out() -> None:
        sdpa = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = written_out_attention
        try:
            take()
        finally:
            F.scaled_dot_product_attention = sdpa

    return [_Way("sdpa", take), _Way("written out", written_out)]


def written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v with the [T, T] weights in memory: what `scaled_dot_product_attention` computes."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = F.dropout(scores.softmax(dim=-1), dropout_p)
    return weights.to(value.dtype) @ value


def _with_adamw(parts: Parts, implementation: Implementation) -> PlainStepper:
    """Make a stepper for the same model with an AdamW of the given implementation ("fused", "foreach" or "loop")."""
    config, grid = parts.config, parts.grid
    options = replace(config.optimizer, kind="adamw", implementation=implementation)
    optimizer = build_optimizer(parts.module, options, grid.device)
    return PlainStepper(parts.module, optimizer, parts.numbers, grid, max_norm=options.max_norm, seed=config.run.seed)


def _measured(
    name: str,
    key: str,
    what: str,
    make: Callable[[], Sequence[_Way]],
    grid: ProcessGrid,
    iterations: int,
    on_progress: Callable[[str], None],
) -> Knob:
    """Measure one setting. If that fails, a single process continues with the next setting; several stop together."""
    try:
        return Knob(name, key, what, _taken_turns(make(), grid, iterations, partial(on_progress, name)))
    except (RuntimeError, MemoryError) as problem:  # out of memory is a RuntimeError in torch
        if grid.size > 1 or isinstance(problem, GramianError):
            raise
        return Knob(name, key, what, (), first_line(problem))


def _taken_turns(
    ways: Sequence[_Way], grid: ProcessGrid, iterations: int, advance: Callable[[], None]
) -> tuple[Variant, ...]:
    block, memory = BLOCK[grid.device.type], {}
    for way in ways:
        way.enter()
        for _ in range(WARM_UP):
            way.step()
            advance()
        memory[way.name] = memory_of(way.step, grid).above
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(iterations):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            way.enter()
            settle(grid)
            began = time.perf_counter()
            for _ in range(block):
                way.step()
            synchronize(grid.device)
            times[way.name].append((time.perf_counter() - began) / block)
            advance()
    base = times[ways[0].name]
    return tuple(
        Variant(
            way.name,
            TimingSpread.of(times[way.name]),
            statistics.median(mine / other for mine, other in zip(times[way.name], base, strict=True)),
            memory[way.name],
        )
        for way in ways
    )


def settle(grid: ProcessGrid) -> None:
    """Wait until all processes and their devices are done, so that the next measurement begins at the same time on all."""
    synchronize(grid.device)
    grid.wait()


def memory_of(step: Callable[[], Any], grid: ProcessGrid) -> StepMemory:
    """Take one more step and measure its memory."""
    if grid.device.type != "cuda":
        return StepMemory(None, highest_on_cpu(step), None)
    after = start_memory(grid.device, step)
    step()
    return after()
