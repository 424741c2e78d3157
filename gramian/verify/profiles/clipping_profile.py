"""Cost of a private step of a language model, phase by phase, beside the plain step of the same model.

One model is measured plain, made private, and measured plain again, so that drift of the machine cancels in the ratio.
Private steps alternate between two kinds: without inner timing, which give the total, and with the engine's stopwatch on,
which give the phases. Phases do not overlap and add up to the step:

    forward         the model and its loss
    backward        autograd's own part of the backward: gradients of activations
    norm            norms of the per-sample gradients, and the clip factors
    clip            clipped sums: the weight gradients
    communication   waiting for the sum over processes
    noise           noise drawn and added
    step            the optimizer, and the rest of `step()`
"""

import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy import PrivacyEngine
from gramian.privacy.clipping.step_timing import Entry, Stopwatch
from gramian.verify.profiles.measurements import (
    LEAST_ITERATIONS,
    StepMemory,
    TimingSpread,
    autocast,
    start_memory,
    synchronize,
)
from gramian.verify.profiles.profiled_model import ProfiledModel, next_token_loss

WARM_UP = 3
PHASES = ("forward", "backward", "norm", "clip", "communication", "noise", "step")
Seconds = tuple[float, float, float]
"""Seconds of forward, backward and `optimizer.step()` of one step."""


@dataclass(frozen=True)
class Step:
    """Time and memory of one kind of step, private or plain."""

    total: TimingSpread
    """Seconds of forward, backward and `optimizer.step()` together."""
    passes: TimingSpread
    """Seconds of forward and backward alone."""
    memory: StepMemory


@dataclass(frozen=True)
class ClippingProfile:
    """Everything measured for private and plain steps at one sequence length, by this process."""

    length: int
    tokens: int
    """Tokens per step and process."""
    plain: Step
    private: Step
    phases: dict[str, TimingSpread]
    """{phase: seconds} of the private step, measured with the engine's stopwatch on."""
    watched: float
    """Overhead of the stopwatch: time of a private step with it on over one with it off."""
    ways: dict[str, int]
    """{norm algorithm and storage that the clipping plan selects for a parameter: number of parameters}."""
    held: int
    """Bytes that the clipping plan stores between the norms and the clipped sums."""
    budget: int | None
    two_pass: bool
    layers: list[dict[str, Any]]
    """For every parameter: phase, algorithm, milliseconds, TFLOP/s and bytes."""

    @property
    def ratio(self) -> float:
        """Median time of a private step over that of a plain step."""
        return self.private.total.median / self.plain.total.median

    @property
    def ratio_of_passes(self) -> float:
        """Median time of forward and backward of a private step over those of a plain step, without `step()`."""
        return self.private.passes.median / self.plain.passes.median


def rounds(iterations: int) -> int:
    """Number of calls of `on_progress` that `profile_clipping` makes for one sequence length."""
    return 2 * (WARM_UP + -(-iterations // 2)) + 2 * (WARM_UP + iterations)


def profile_clipping(
    model: ProfiledModel,
    length: int,
    batch_size: int,
    grid: ProcessGrid,
    *,
    mode: str = "auto",
    algorithm: str = "auto",
    iterations: int = LEAST_ITERATIONS,
    on_progress: Callable[[], None] = lambda: None,
) -> ClippingProfile:
    """Measure plain and private steps at one sequence length. Collective.

    On CUDA the forward runs under bfloat16 autocast. The optimizer is SGD, the noise multiplier 1, batches are fixed and
    differ between processes. `mode` and `algorithm` are `clipping=` and `norm_algorithm=` of `make_private`; `iterations`
    counts the timed steps of each kind after `WARM_UP` untimed ones, and `on_progress` is called after each step.
    """
    bench = _Bench(model, length, batch_size, grid, on_progress)
    before = bench.series(bench.plain_step, -(-iterations // 2))
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
        private = bench.series(partial(bench.private_step, engine), iterations, partial(bench.watched_step, engine))
        plan = engine.plan
    finally:
        engine.detach()
    after = bench.series(bench.plain_step, -(-iterations // 2))
    assert plan is not None
    reader = Stopwatch(on=True)
    reader.entries.extend(entry for step in private.watched for entry in step.entries)
    watched = [step.phases for step in private.watched]
    return ClippingProfile(
        length=length,
        tokens=batch_size * length,
        plain=_step([*before.seconds, *after.seconds], before.memory),
        private=_step(private.seconds, private.memory),
        phases={name: TimingSpread.of([phases[name] for phases in watched]) for name in PHASES},
        watched=statistics.median(sum(phases.values()) for phases in watched)
        / statistics.median(sum(seconds) for seconds in private.seconds),
        ways=dict(Counter(row.way for row in plan.rows).most_common()),
        held=plan.held,
        budget=plan.budget,
        two_pass=plan.two_pass,
        layers=[line for line in reader.report() if line["what"]],
    )


def _step(seconds: Sequence[Seconds], memory: StepMemory) -> Step:
    return Step(TimingSpread.of([sum(s) for s in seconds]), TimingSpread.of([s[0] + s[1] for s in seconds]), memory)


class _Watched(NamedTuple):
    """A private step with the stopwatch on: seconds of its phases, and the stopwatch's entries."""

    phases: dict[str, float]
    entries: list[Entry]


class _Series(NamedTuple):
    """Measurements of steps of one kind."""

    seconds: list[Seconds]
    memory: StepMemory
    watched: list[_Watched]


class _Bench:
    """A model to measure, with its optimizer and a fixed batch."""

    def __init__(
        self, model: ProfiledModel, length: int, batch_size: int, grid: ProcessGrid, on_progress: Callable[[], None]
    ) -> None:
        self.where, self.device, self._on_progress = grid, grid.device, on_progress
        self.model = model.place(grid)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.tokens = model.batch(batch_size, length, grid)

    def loader(self) -> DataLoader[Any]:
        """A data loader of 100 batches over all processes, so that the sample rate is 1 %."""
        batch_size = self.tokens.shape[1]
        return DataLoader(TensorDataset(torch.zeros(100 * batch_size * self.where.data[1])), batch_size=batch_size)

    def series(
        self, step: Callable[[], Seconds], count: int, watched_step: Callable[[], _Watched] | None = None
    ) -> _Series:
        """Time `count` steps, after `WARM_UP` untimed ones, and measure their memory; `watched_step` runs after each one."""
        seconds: list[Seconds] = []
        watched: list[_Watched] = []
        for number in range(WARM_UP + count):
            if number == WARM_UP:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                memory = start_memory(self.device, step)
            seconds.append(step())
            self._on_progress()
            if watched_step is not None:
                watched.append(watched_step())
                self._on_progress()
        return _Series(seconds[WARM_UP:], memory(), watched[WARM_UP:])

    def plain_step(self) -> Seconds:
        """Take an ordinary, not private step; returns its seconds."""
        return self._run(lambda loss: loss.backward())

    def private_step(self, engine: PrivacyEngine) -> Seconds:
        """Take a private step without timing its phases; returns its seconds."""
        engine.stopwatch.on = False
        return self._run(engine.backward)

    def watched_step(self, engine: PrivacyEngine) -> _Watched:
        """Take a private step with the engine's stopwatch on; returns the seconds of its phases and the stopwatch's entries."""
        watch = engine.stopwatch
        watch.on = True
        watch.entries.clear()
        in_backward = 0

        def backward(loss: Tensor) -> None:
            nonlocal in_backward
            engine.backward(loss)
            in_backward = len(watch.entries)

        forward, passes, step = self._run(backward)
        entries = list(watch.entries)
        first, then = _sums(entries[:in_backward]), _sums(entries[in_backward:])
        norm, clip = first["norm"] + first["factors"], first["clip"]
        phases = {
            "forward": forward,
            "backward": max(passes - norm - clip - first["communication"], 0.0),
            "norm": norm,
            "clip": clip,
            "communication": first["communication"] + then["communication"],
            "noise": then["noise"],
            "step": max(step - then["noise"] - then["communication"], 0.0),
        }
        return _Watched(phases, entries)

    def _run(self, backward: Callable[[Tensor], None]) -> Seconds:
        """Take one step with the given backward and clear the gradients; returns seconds of forward, backward and `step()`."""
        clock, cuda = Stopwatch(on=True), self.device.type == "cuda"
        synchronize(self.device)
        with clock.time("forward", cuda=cuda), autocast(self.device):
            loss = next_token_loss(self.model, *self.tokens)
        with clock.time("backward", cuda=cuda):
            backward(loss)
        with clock.time("step", cuda=cuda):
            self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        forward, passes, step = (entry.milliseconds / 1e3 for entry in clock.entries)
        return forward, passes, step


def _sums(entries: Sequence[Entry]) -> defaultdict[str, float]:
    """Add up stopwatch entries: {phase: seconds}."""
    sums: defaultdict[str, float] = defaultdict(float)
    for entry in entries:
        sums[entry.phase] += entry.milliseconds / 1e3
    return sums
