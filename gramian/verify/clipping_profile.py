"""What a private step costs on the reference GPT, phase by phase, beside the plain step of the same run.

One model is measured plain, made private, and measured plain again, so that drift of the machine drops out of the ratio.
Private steps alternate between two kinds: untimed inside, which give the total, and with the engine's stopwatch on, which
give the phases. Phases do not overlap and add up to the step:

    forward         the model and its loss
    backward        autograd's own part of the backward: gradients of activations
    norm            norms of the per-sample gradients, and the clip factors
    clip            clipped sums: the weight gradients
    communication   waiting for the sum over processes
    noise           drawn and added
    step            the optimizer, and what is left of `step()`
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gramian.models import GPT, GPTConfig
from gramian.parallel.world import World
from gramian.privacy import PrivacyEngine
from gramian.privacy.clipping.step_timing import Entry, Stopwatch
from gramian.verify.model_layouts import spread

WARM_UP = 3
LEAST_ITERATIONS = 10
PHASES = ("forward", "backward", "norm", "clip", "communication", "noise", "step")


@dataclass(frozen=True)
class TimingSpread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> TimingSpread:
        """Of measured values, at least one."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    @property
    def iqr(self) -> float:
        """Between the quartiles."""
        return self.high - self.low

    @property
    def noisy(self) -> bool:
        """True if the quartiles lie further apart than a quarter of the median."""
        return self.iqr > 0.25 * self.median


@dataclass(frozen=True)
class ClippingMemory:
    """Bytes: of the CUDA allocator; on a CPU of the process, and above that of torch's allocator. None: not known."""

    allocated: int | None
    """When a step begins."""
    above: int | None
    """Most that a step needs above that."""
    reserved: int | None
    """Held by the CUDA allocator."""

    @property
    def peak(self) -> int | None:
        """Most at any time in a step."""
        return None if self.allocated is None or self.above is None else self.allocated + self.above


@dataclass(frozen=True)
class Step:
    """One kind of step."""

    total: TimingSpread
    """Seconds of forward, backward and `step()`."""
    passes: TimingSpread
    """Seconds of forward and backward alone."""
    memory: ClippingMemory


@dataclass(frozen=True)
class ClippingProfile:
    """Everything measured at one sequence length, by this process."""

    length: int
    tokens: int
    """Per step and process."""
    plain: Step
    private: Step
    phases: dict[str, TimingSpread]
    """Seconds, with the stopwatch on."""
    watched: float
    """A step with the stopwatch on over one with it off."""
    ways: dict[str, int]
    """{way of the plan: parameters}."""
    held: int
    """Bytes that the plan holds between norms and sums."""
    budget: int | None
    two_pass: bool
    layers: list[dict[str, Any]]
    """Of every parameter: phase, way, milliseconds, TFLOP/s and bytes."""

    @property
    def ratio(self) -> float:
        """Private over plain step."""
        return self.private.total.median / self.plain.total.median

    @property
    def ratio_of_passes(self) -> float:
        """The same without `step()`."""
        return self.private.passes.median / self.plain.passes.median


# ---- processes -------------------------------------------------------------------------------------------------------


# ---- measuring -------------------------------------------------------------------------------------------------------


def rounds(iterations: int) -> int:
    """Calls of `on_progress` for one length."""
    return 2 * (WARM_UP + _half(iterations)) + 2 * WARM_UP + 2 * iterations


def profile_clipping(
    config: GPTConfig,
    length: int,
    batch_size: int,
    where: World,
    *,
    mode: str = "auto",
    algorithm: str = "auto",
    iterations: int = LEAST_ITERATIONS,
    on_progress: Callable[[], None] = lambda: None,
) -> ClippingProfile:
    """Measure plain and private steps at one sequence length. Collective.

    On CUDA the forward runs under bfloat16 autocast. The optimizer is SGD, the noise multiplier 1, batches are fixed and of
    their own on every process.

    Args:
        config: the model's shape.
        length: tokens per sequence.
        batch_size: sequences per step and process.
        where: this process.
        mode: `clipping=` of `make_private`.
        algorithm: `norm_algorithm=` of `make_private`.
        iterations: timed steps of each kind, after `WARM_UP` others.
        on_progress: called after each step.
    """
    bench = _Bench(config, length, batch_size, where, on_progress)
    before = bench.plain(_half(iterations))
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches are fixed, and nothing is released
        engine.make_private(
            module=bench.model,
            optimizer=bench.optimizer,
            data_loader=bench.loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=mode,
            norm_algorithm=algorithm,
            poisson_sampling=False,
        )
    try:
        private, watched, entries = bench.private(engine, iterations)
        plan = engine.plan
    finally:
        engine.detach()
    after = bench.plain(_half(iterations))
    assert plan is not None
    phases = {name: TimingSpread.of([step[name] for step in watched]) for name in PHASES}
    reader = Stopwatch(on=True)
    reader.entries.extend(entries)
    return ClippingProfile(
        length=length,
        tokens=batch_size * length,
        plain=_step([*before.seconds, *after.seconds], before.memory),
        private=_step(private.seconds, private.memory),
        phases=phases,
        watched=statistics.median(sum(step.values()) for step in watched)
        / statistics.median(sum(step) for step in private.seconds),
        ways=dict(Counter(row.way for row in plan.rows).most_common()),
        held=plan.held,
        budget=plan.budget,
        two_pass=plan.two_pass,
        layers=[line for line in reader.report() if line["what"]],
    )


def _half(iterations: int) -> int:
    return -(-iterations // 2)


def _step(seconds: Sequence[tuple[float, float, float]], memory: ClippingMemory) -> Step:
    return Step(TimingSpread.of([sum(s) for s in seconds]), TimingSpread.of([s[0] + s[1] for s in seconds]), memory)


@dataclass(frozen=True)
class _Series:
    """Steps of one kind: seconds of forward, backward and `step()`."""

    seconds: list[tuple[float, float, float]]
    memory: ClippingMemory


class _Bench:
    """A model, its optimizer and a batch."""

    def __init__(
        self, config: GPTConfig, length: int, batch_size: int, where: World, on_progress: Callable[[], None]
    ) -> None:
        self.where, self.cuda, self._on_progress = where, where.device.type == "cuda", on_progress
        self.model = spread(GPT(config).to(where.device), where)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(where.rank)
        self.tokens = torch.randint(config.vocabulary, (2, batch_size, length), generator=generator).to(where.device)

    def loader(self) -> DataLoader[Any]:
        """Of as many records as make a sample rate of 1 %."""
        batch_size = self.tokens.shape[1]
        return DataLoader(TensorDataset(torch.zeros(100 * batch_size * self.where.size)), batch_size=batch_size)

    def plain(self, count: int) -> _Series:
        """Ordinary steps."""
        clock = Stopwatch(on=True)

        def step() -> tuple[float, float, float]:
            return self._run(clock, lambda loss: loss.backward())

        for _ in range(WARM_UP):
            step()
            self._on_progress()
        memory = self._memory(step)
        seconds = []
        for _ in range(count):
            seconds.append(step())
            self._on_progress()
        return _Series(seconds, memory())

    def private(self, engine: PrivacyEngine, count: int) -> tuple[_Series, list[dict[str, float]], list[Entry]]:
        """Private steps: seconds without the stopwatch, then the phases and entries of those with it."""
        clock = Stopwatch(on=True)

        def step() -> tuple[float, float, float]:
            engine.stopwatch.on = False
            return self._run(clock, engine.backward)

        for _ in range(WARM_UP):
            step()
            self._on_progress()
            self._watched(engine, clock)
            self._on_progress()
        memory = self._memory(step)
        seconds, phases, entries = [], [], []
        for _ in range(count):
            seconds.append(step())
            self._on_progress()
            found, seen = self._watched(engine, clock)
            phases.append(found)
            entries += seen
            self._on_progress()
        return _Series(seconds, memory()), phases, entries

    def _watched(self, engine: PrivacyEngine, clock: Stopwatch) -> tuple[dict[str, float], list[Entry]]:
        """One step with the engine's stopwatch on."""
        watch = engine.stopwatch
        watch.on = True
        watch.entries.clear()
        in_backward = 0

        def backward(loss: Tensor) -> None:
            nonlocal in_backward
            engine.backward(loss)
            in_backward = len(watch.entries)

        forward, whole, step = self._run(clock, backward)
        entries = list(watch.entries)
        first, then = _sums(entries[:in_backward]), _sums(entries[in_backward:])
        norm, clip = first["norm"] + first["factors"], first["clip"]
        return {
            "forward": forward,
            "backward": max(whole - norm - clip - first["communication"], 0.0),
            "norm": norm,
            "clip": clip,
            "communication": first["communication"] + then["communication"],
            "noise": then["noise"],
            "step": max(step - then["noise"] - then["communication"], 0.0),
        }, entries

    def _run(self, clock: Stopwatch, backward: Callable[[Tensor], None]) -> tuple[float, float, float]:
        """Seconds of the three parts of one step; gradients are gone afterwards."""
        clock.entries.clear()
        x, y = self.tokens
        self._wait()
        with clock.time("forward", cuda=self.cuda), _autocast(self.cuda):
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        with clock.time("backward", cuda=self.cuda):
            backward(loss)
        with clock.time("step", cuda=self.cuda):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        forward, whole, step = (entry.milliseconds / 1e3 for entry in clock.entries)
        return forward, whole, step

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.where.device)

    def _memory(self, step: Callable[[], Any]) -> Callable[[], ClippingMemory]:
        """Ask what is returned once the steps are over."""
        device = self.where.device
        if not self.cuda:
            found = ClippingMemory(_resident(), highest_on_cpu(step), None)
            return lambda: found
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)

        def after() -> ClippingMemory:
            above = torch.cuda.max_memory_allocated(device) - allocated
            return ClippingMemory(allocated, above, torch.cuda.memory_reserved(device))

        return after


def _sums(entries: Sequence[Entry]) -> defaultdict[str, float]:
    """{phase: seconds}."""
    sums: defaultdict[str, float] = defaultdict(float)
    for entry in entries:
        sums[entry.phase] += entry.milliseconds / 1e3
    return sums


def _autocast(cuda: bool) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()


def _resident() -> int | None:
    """Bytes of this process in memory."""
    try:
        import resource

        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (ImportError, OSError):
        return None


def highest_on_cpu(step: Callable[[], Any]) -> int | None:
    """Most bytes that torch's CPU allocator held during a step above what it held before, from its own record."""
    with _quiet(), torch.autograd.profiler.profile(profile_memory=True) as recorded:
        step()
    found = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest or None


@contextmanager
def _quiet() -> Iterator[None]:
    """The recorder writes lines to the process's standard error that no setting turns off."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
