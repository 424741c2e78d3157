"""Cost of a training step, phase by phase.

Phases are those of the run's own stepper on the run's own batches, one step at a time:

    data wait       until the next batch is there
    forward         the model and its loss, over all micro-batches
    backward        the backward passes of all micro-batches
    communication   what forward and backward take more than without any: gradients under DDP, weights too under FSDP2
    optimizer       gradient norm, clipping and the step; with K-FAC the natural gradient

`train_knobs` measures the effect of each setting on the step's time and memory.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gramian.core.errors import GramianError
from gramian.data import StepBatch
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.verify.profiles.measurements import LEAST_ITERATIONS, StepMemory, TimingSpread, synchronize
from gramian.verify.profiles.train_knobs import RATE, WARM_UP, Knob, knob_turns, memory_of, profile_knobs, settle

PHASES = ("data wait", "forward", "backward", "communication", "optimizer")
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {"model": {"layers": 12, "width": 768, "heads": 12}, "data": {"length": 1024, "batch": 16}},
    "cpu": {
        "model": {"layers": 2, "width": 128, "heads": 4},
        "data": {"length": 128, "batch": 8, "workers": 1, "limit_bytes": 1_000_000},
    },
}
"""{device: config that `gramian profile train` measures if none is given}."""


@dataclass(frozen=True)
class TrainProfile:
    """Everything that the profile of a training step measured, on this process."""

    tokens: int
    """Number of tokens of a step, over all processes."""
    micro_batches: int
    total: TimingSpread
    """Seconds of a step, the wait for its data included."""
    phases: dict[str, TimingSpread]
    memory: StepMemory
    knobs: tuple[Knob, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all processes together."""
        return self.tokens / self.total.median

    @property
    def failure(self) -> str:
        """Name of the first setting (knob) that could not be measured, and why; empty if all were."""
        return next((f"{knob.name}: {knob.failure}" for knob in self.knobs if knob.failure), "")


def default_config(device: str) -> Config:
    """A config of the reference GPT on the embedded corpus, of a size that suits the device ("cuda" or "cpu")."""
    return parse_config(DEFAULTS[device])


def turns(iterations: int, compiled: bool) -> int:
    """Number of calls of `on_progress` that `profile_train` makes with the same `iterations` and `compiled`."""
    return WARM_UP + iterations + knob_turns(iterations, compiled)


def profile_train(
    config: Config,
    grid: ProcessGrid,
    *,
    iterations: int = LEAST_ITERATIONS,
    compiled: bool = False,
    on_progress: Callable[[str], None] = lambda name: None,
) -> TrainProfile:
    """Measure the training step of a config, then the effect of its settings (knobs). Collective; nothing is written.

    Knobs are measured without [kfac], and all but compile.mode without compilation; `compiled` adds compile.mode itself, with
    the config's mode or "default". `iterations` counts the timed steps of each kind after `WARM_UP` untimed ones; `on_progress`
    is called after each step with the name of what was measured.

    Raises:
        GramianError: if the config is private, or does not fit the data, the model or the machine.
    """
    if config.privacy is not None:
        raise GramianError("privacy: is measured by gramian profile clipping; expected a config without [privacy]")
    found = _phases(config, grid, iterations, partial(on_progress, "step"))
    gc.collect()
    return replace(found, knobs=tuple(profile_knobs(config, grid, iterations, compiled, on_progress)))


class _Watched(PlainStepper):
    """A training stepper that times its forward, backward and optimizer."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        super().__init__(
            parts.module,
            parts.optimizer,
            parts.numbers,
            parts.grid,
            max_norm=config.optimizer.max_norm,
            seed=config.run.seed,
            kfac=parts.stepper.kfac,
        )
        self.clock, self._cuda, self._began = Stopwatch(on=True), parts.grid.device.type == "cuda", None
        parts.module.register_forward_pre_hook(self._forward_begins, prepend=True)
        parts.module.register_forward_hook(self._forward_ends)

    def seconds(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer since the last call; call it when the device is done."""
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


def _phases(config: Config, grid: ProcessGrid, iterations: int, advance: Callable[[], None]) -> TrainProfile:
    """Measure time and phases of the training step and its memory; the settings (knobs) are left empty."""
    parts = build(config, grid)
    try:
        stepper = _Watched(parts)
        batches: Iterator[Any] = parts.batches_from(0, ())
        batch: StepBatch = next(batches)
        totals, phases = [], []
        memory = StepMemory(None, None, None)
        for turn in range(WARM_UP + iterations):
            if turn == WARM_UP:
                memory = memory_of(partial(stepper.take, batch, RATE), grid)
            stepper.seconds()
            settle(grid)
            began = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - began
            stepper.take(batch, RATE)
            synchronize(grid.device)
            if turn >= WARM_UP:
                totals.append(time.perf_counter() - began)
                phases.append({"data wait": waited, "communication": 0.0, **stepper.seconds()})
            advance()
        if grid.size > 1:
            alone = [_apart(stepper, batch, grid) for _ in range(WARM_UP + iterations)][WARM_UP:]
            phases = [{**step, **apart} for step, apart in zip(phases, alone, strict=True)]
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


def _apart(stepper: _Watched, batch: StepBatch, grid: ProcessGrid) -> dict[str, float]:
    """Seconds of forward and backward without communication, and how much longer they take with it."""
    stepper.seconds()
    settle(grid)
    stepper.watch(batch)
    synchronize(grid.device)
    together = stepper.seconds()
    with _without_communication(stepper.module):
        settle(grid)
        stepper.watch(batch)
        synchronize(grid.device)
    alone = stepper.seconds()
    passes = ("forward", "backward")
    more = sum(together[name] - alone[name] for name in passes)
    return {**{name: alone[name] for name in passes}, "communication": max(0.0, more)}


@contextmanager
def _without_communication(module: nn.Module) -> Iterator[None]:
    """Context manager: forward and backward run without collectives; all gradients are cleared afterwards.

    FSDP2 gathers all weights before.
    """
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
