"""What a training step costs, phase by phase, and what each way to make it faster or leaner is worth on this machine.

Phases are those of the run's own stepper on the run's own batches, one step at a time:

    data wait       until the next batch is there
    forward         the model and its loss, over all micro-batches
    backward        the same
    communication   what forward and backward take more than they do without any: gradients under DDP, weights too under FSDP2
    optimizer       gradient norm, clipping and the step; with K-FAC the natural gradient

Knobs are measured on one model and one batch: variants take turns, and a ratio is the median of the ratios within a turn, so
that drift of the machine drops out.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gramian.core.errors import GramianError
from gramian.data import StepBatch
from gramian.models.gpt import GPT
from gramian.parallel.world import World
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.train.build.build_model import recompute
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.stepper import Stepper
from gramian.verify.clipping_profile import ClippingMemory, TimingSpread, highest_on_cpu

WARM_UP = 3
LEAST_ITERATIONS = 10
PHASES = ("data wait", "forward", "backward", "communication", "optimizer")
BLOCK = {"cuda": 4, "cpu": 1}
"""Steps that are timed together where variants take turns; on a GPU the host runs ahead, as it does in training."""
RATE = 1e-5
"""Learning rate of all steps: that weights stay finite matters, where they go does not."""
Implementation = Literal["fused", "foreach", "loop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("fused", "foreach", "loop")
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "model": {"layers": 12, "width": 768, "heads": 12},
        "data": {"length": 1024, "batch": 16},
    },
    "cpu": {
        "model": {"layers": 2, "width": 128, "heads": 4},
        "data": {"length": 128, "batch": 8, "workers": 1, "limit_bytes": 1_000_000},
    },
}
"""What is measured where no config is given."""


@dataclass(frozen=True)
class Variant:
    """One position of a knob."""

    name: str
    seconds: TimingSpread
    ratio: float
    """Over the knob's first variant."""
    memory: int | None
    """Most bytes above those allocated when it begins; None: not known."""


@dataclass(frozen=True)
class Knob:
    """Variants of one thing."""

    name: str
    key: str
    """Of the config; empty: there is none."""
    what: str
    """That is timed: "step" or "optimizer.step()"."""
    variants: tuple[Variant, ...]
    failure: str = ""
    """Why there are no variants."""


@dataclass(frozen=True)
class TrainProfile:
    """Everything measured, by this process."""

    tokens: int
    """Of a step, over all processes."""
    micro_batches: int
    total: TimingSpread
    """Seconds of a step, the wait for its data included."""
    phases: dict[str, TimingSpread]
    memory: ClippingMemory
    knobs: tuple[Knob, ...]

    @property
    def tokens_per_second(self) -> float:
        """Over all processes."""
        return self.tokens / self.total.median

    @property
    def failure(self) -> str:
        """Of the first knob that could not be measured."""
        return next((f"{knob.name}: {knob.failure}" for knob in self.knobs if knob.failure), "")


def default_config(device: str) -> Config:
    """The reference GPT on the embedded corpus, of a size that suits the device ("cuda" or "cpu")."""
    return parse_config(DEFAULTS[device])


def turns(iterations: int, compiled: bool) -> int:
    """Calls of `on_progress`."""
    return (1 + 2 + 2 + 2 * len(IMPLEMENTATIONS) + 2 * compiled) * (WARM_UP + iterations)


def profile_train(
    config: Config,
    where: World,
    *,
    iterations: int = LEAST_ITERATIONS,
    compiled: bool = False,
    on_progress: Callable[[str], None] = lambda what: None,
) -> TrainProfile:
    """Measure the steps of a config, then its knobs. Collective; no folder is written.

    Args:
        config: of the run; its knobs are measured without [kfac], and all but compile.mode without compilation.
        where: this process.
        iterations: timed steps of each kind, after `WARM_UP` others.
        compiled: also measure compile.mode, the config's or "default"; compiling takes a while.
        on_progress: called after each step with what was measured.

    Raises:
        GramianError: if the config is private, or does not fit the data, the model or the machine.
    """
    if config.privacy is not None:
        raise GramianError("privacy: is measured by gramian profile clipping; expected a config without [privacy]")
    found = _phases(config, where, iterations, partial(on_progress, "step"))
    gc.collect()
    return replace(found, knobs=tuple(_knobs(config, where, iterations, compiled, on_progress)))


# ---- phases ----------------------------------------------------------------------------------------------------------


class _Watched(Stepper):
    """A run's stepper that notes when its parts begin and end."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        super().__init__(
            parts.module,
            parts.optimizer,
            parts.numbers,
            parts.world,
            max_norm=config.optimizer.max_norm,
            seed=config.run.seed,
            kfac=parts.stepper.kfac,
        )
        self.clock, self._cuda, self._began = Stopwatch(on=True), parts.world.device.type == "cuda", None
        parts.module.register_forward_pre_hook(self._forward_begins, prepend=True)
        parts.module.register_forward_hook(self._forward_ends)

    def seconds(self) -> dict[str, float]:
        """Of the forwards, the backwards and the optimizer since the last call; the device must be done."""
        sums = {"forward": 0.0, "passes": 0.0, "optimizer": 0.0}
        for entry in self.clock.entries:
            sums[entry.phase] += entry.milliseconds / 1e3
        self.clock.entries.clear()
        passes = sums.pop("passes")
        return {**sums, "backward": max(0.0, passes - sums["forward"])}

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        self._began = self.clock.now(self._cuda)

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock.add("forward", self._began, self._cuda)

    def _backward(self, batch: StepBatch, coefficient: float) -> Tensor:
        with self.clock.time("passes", cuda=self._cuda):
            return super()._backward(batch, coefficient)

    def _clip(self) -> Tensor:
        with self.clock.time("optimizer", cuda=self._cuda):
            return super()._clip()

    def _step(self) -> bool:
        with self.clock.time("optimizer", cuda=self._cuda):
            return super()._step()


def _phases(config: Config, where: World, iterations: int, advance: Callable[[], None]) -> TrainProfile:
    """The profile without its knobs."""
    parts = build(config, where)
    try:
        stepper = _Watched(parts)
        batches: Iterator[Any] = parts.batches_from(0, ())
        batch: StepBatch = next(batches)
        totals, phases = [], []
        memory = ClippingMemory(None, None, None)
        for turn in range(WARM_UP + iterations):
            if turn == WARM_UP:
                memory = _memory(partial(stepper.take, batch, RATE), where)
            stepper.seconds()
            _settle(where)
            began = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - began
            stepper.take(batch, RATE)
            _wait(where)
            if turn >= WARM_UP:
                totals.append(time.perf_counter() - began)
                phases.append({"data wait": waited, "communication": 0.0, **stepper.seconds()})
            advance()
        if where.size > 1:
            told = [_apart(stepper, batch, where) for _ in range(WARM_UP + iterations)][WARM_UP:]
            phases = [{**step, **apart} for step, apart in zip(phases, told, strict=True)]
        return TrainProfile(
            tokens=batch.tokens,
            micro_batches=len(batch.micro),
            total=TimingSpread.of(totals),
            phases={name: TimingSpread.of([step[name] for step in phases]) for name in PHASES},
            memory=memory,
            knobs=(),
        )
    finally:
        parts.close()


def _apart(stepper: _Watched, batch: StepBatch, where: World) -> dict[str, float]:
    """Forward and backward without communication, and what the same passes take more with it."""
    stepper.seconds()
    _settle(where)
    stepper.watch(batch)
    _wait(where)
    together = stepper.seconds()
    with _without_communication(stepper.module):
        _settle(where)
        stepper.watch(batch)
        _wait(where)
    alone = stepper.seconds()
    passes = ("forward", "backward")
    more = sum(together[name] - alone[name] for name in passes)
    return {**{name: alone[name] for name in passes}, "communication": max(0.0, more)}


@contextmanager
def _without_communication(module: nn.Module) -> Iterator[None]:
    """Forward and backward of this process alone; under FSDP2 all weights are gathered before. Gradients are gone after."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
        module.zero_grad(set_to_none=True)
        return
    assert isinstance(module, FSDPModule)
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.unshard()
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_forward(False)
    module.set_reshard_after_backward(False)
    try:
        yield
    finally:
        module.zero_grad(set_to_none=True)  # those of the gathered weights
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        for unit in units:
            unit.set_reshard_after_forward(unit is not module, recurse=False)
            unit.reshard()


# ---- knobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """A variant before it is measured."""

    name: str
    step: Callable[[], Any]
    enter: Callable[[], None] = lambda: None
    """Not timed."""


def _knobs(
    config: Config, where: World, iterations: int, compiled: bool, on_progress: Callable[[str], None]
) -> Iterator[Knob]:
    asked = config.compile.mode
    config = replace(config, kfac=None, compile=replace(config.compile, mode="off"))
    parts = build(config, where)
    assert isinstance(parts.stepper, Stepper)
    try:
        batch: Any = next(iter(parts.batches_from(0, ())))
    finally:
        parts.close()
    take = partial(parts.stepper.take, batch, RATE)
    measure = partial(_measured, where=where, iterations=iterations, on_progress=on_progress)
    if compiled:
        mode = "default" if asked == "off" else asked
        yield measure("compilation", "compile.mode", "step", lambda: _compiled_ways(parts.model, mode, take))
        parts.model._compiled_call_impl = None
    blocks = config.parallel.checkpoint_blocks
    ways = [_Way(str(size), take, partial(_recompute, parts.model, size)) for size in (0, blocks or 1)]
    yield measure("activation checkpointing", "parallel.checkpoint_blocks", "step", lambda: ways)
    _recompute(parts.model, blocks)
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


def _recompute(model: nn.Module, blocks: int) -> None:
    """As `recompute`, which only ever turns a Hugging Face model's on."""
    if blocks or isinstance(model, GPT):
        recompute(model, blocks)
    else:
        model.gradient_checkpointing_disable()  # type: ignore[operator]


def _with_adamw(parts: Parts, implementation: Implementation) -> Stepper:
    """A stepper of the same module with its own AdamW."""
    config, world = parts.config, parts.world
    options = replace(config.optimizer, kind="adamw", implementation=implementation)
    optimizer = build_optimizer(parts.module, options, world.device)
    return Stepper(parts.module, optimizer, parts.numbers, world, max_norm=options.max_norm, seed=config.run.seed)


def _measured(
    name: str,
    key: str,
    what: str,
    make: Callable[[], Sequence[_Way]],
    where: World,
    iterations: int,
    on_progress: Callable[[str], None],
) -> Knob:
    """Let the ways take turns. One process goes on to the next knob if this one fails; several stop together."""
    try:
        return Knob(name, key, what, _taken_turns(make(), where, iterations, partial(on_progress, name)))
    except (RuntimeError, MemoryError) as problem:  # out of memory is a RuntimeError in torch
        if where.size > 1 or isinstance(problem, GramianError):
            raise
        lines = str(problem).strip().splitlines() or [""]
        return Knob(name, key, what, (), f"{type(problem).__name__}: {lines[0]}")


def _taken_turns(
    ways: Sequence[_Way], where: World, iterations: int, advance: Callable[[], None]
) -> tuple[Variant, ...]:
    block, memory = BLOCK[where.device.type], {}
    for way in ways:
        way.enter()
        for _ in range(WARM_UP):
            way.step()
            advance()
        memory[way.name] = _memory(way.step, where).above
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(iterations):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            way.enter()
            _settle(where)
            began = time.perf_counter()
            for _ in range(block):
                way.step()
            _wait(where)
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


# ---- the device ------------------------------------------------------------------------------------------------------


def _wait(where: World) -> None:
    """For the device."""
    if where.device.type == "cuda":
        torch.cuda.synchronize(where.device)


def _settle(where: World) -> None:
    """All processes and their devices begin together."""
    _wait(where)
    where.wait()


def _memory(step: Callable[[], Any], where: World) -> ClippingMemory:
    """Of one more step."""
    device = where.device
    if device.type != "cuda":
        return ClippingMemory(None, highest_on_cpu(step), None)
    _wait(where)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    step()
    _wait(where)
    above = torch.cuda.max_memory_allocated(device) - allocated
    return ClippingMemory(allocated, above, torch.cuda.memory_reserved(device))
