"""Cost of K-FAC on a language model: seconds and memory of each stage, beside a step without it.

plain step   forward and backward
capture      the same inside `kfac.capture`, with the factors made
reduce       the part of the capture spent in collectives that join the sums of several processes
decompose    what the first natural gradient takes more than a second one
apply        the second natural gradient
offload      what a capture takes more if its factors are stored on the CPU
fetch        what a natural gradient takes more in that case; copies that overlap with other work do not show
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gramian.curvature import KFACNaturalGradient
from gramian.parallel.exchange import metered
from gramian.parallel.process_grid import ProcessGrid
from gramian.verify.profiles.measurements import autocast, peak_resident_bytes, resident_bytes, synchronize
from gramian.verify.profiles.profiled_model import ProfiledModel, next_token_loss

WARM_UP = 2
ROUNDS = 5


@dataclass(frozen=True)
class KFACMemory:
    """Bytes before and after a stage of K-FAC: of the CUDA allocator, or of the process on a CPU. None: unknown."""

    before: int | None
    after: int | None
    peak: int | None
    """Maximum bytes during the stage; on a CPU the maximum since the process began."""
    reserved: int | None
    """Bytes reserved by the CUDA allocator after the stage."""


@dataclass(frozen=True)
class Stage:
    """Time and memory of one stage of K-FAC, such as "capture" or "apply"."""

    name: str
    seconds: float
    """Median seconds over the rounds."""
    ratio: float
    """Median over rounds of the stage's time divided by that of the plain step."""
    memory: KFACMemory


@dataclass(frozen=True)
class Collective:
    """Traffic of one kind of collective of K-FAC in one stage, on this process."""

    stage: str
    kind: str
    sent: int
    """Bytes that leave this process, by the cost model of `gramian.parallel.exchange`."""
    seconds: float
    """Median seconds over the rounds, including the wait for slower processes."""


@dataclass(frozen=True)
class KFACProfile:
    """Everything that the profile of K-FAC measured at one sequence length."""

    length: int
    tokens: int
    """Number of tokens of this process's batch."""
    parameter_bytes: int
    factor_bytes: int
    """Bytes of K-FAC's factors as stored."""
    used_bytes: int
    """Bytes of K-FAC's factors together with their decompositions."""
    representations: dict[str, int]
    """{storage format of a factor: number of factors}."""
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...] = ()
    """Communication between processes by stage and kind; empty on one process."""
    offloaded_bytes: int | None = None
    """Bytes of factors that a capture moved from the GPU to the CPU; None: not measured."""


@dataclass(frozen=True)
class _Measured:
    seconds: float
    memory: KFACMemory
    sent: Mapping[str, int] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    """{kind of collective: seconds}."""


def profile_kfac(
    model: ProfiledModel,
    length: int,
    batch_size: int,
    grid: ProcessGrid,
    reduce: str = "gram",
    offload: bool = False,
    rounds: int = ROUNDS,
    on_progress: Callable[[], None] = lambda: None,
) -> KFACProfile:
    """Measure every stage of K-FAC at one sequence length: median times over rounds, memory of the last round. Collective.

    Options of K-FAC are the defaults, with a refresh on every step and without a moving average, so that all rounds are
    alike. On CUDA the passes run under bfloat16 autocast.

    Args:
        model: the language model to measure.
        length: tokens per sequence.
        batch_size: sequences of each process, which has a batch of its own.
        grid: the process grid; all processes call together.
        reduce: how processes join their factors, the option `kfac_distributed_reduce`.
        offload: also measure captures that store their factors on the CPU.
        rounds: number of measured rounds, after `WARM_UP` unmeasured ones.
        on_progress: called after each round.
    """
    device, module = grid.device, model.place(grid)
    x_BT, y_BT = model.batch(batch_size, length, grid)
    options: dict[str, Any] = {"update_freq": 1, "ema_decay": 0.0, "kfac_distributed_reduce": reduce}
    here = KFACNaturalGradient(**options)
    away = KFACNaturalGradient(**options, woodbury_store_device="cpu")
    measure = _Meter(device)

    def step() -> None:
        with autocast(device):
            loss = next_token_loss(module, x_BT, y_BT)
        loss.backward()

    def captured(kfac: KFACNaturalGradient) -> None:
        with kfac.capture(module, num_terms=y_BT.numel()):
            step()

    def natural(kfac: KFACNaturalGradient) -> None:
        kfac.compute_natural_gradient(module)

    seen: dict[str, list[_Measured]] = {}

    def stage(name: str, action: Callable[[], None]) -> None:
        seen.setdefault(name, []).append(measure(action))

    for _ in range(WARM_UP + rounds):
        module.zero_grad()
        stage("plain step", step)
        module.zero_grad()
        stage("capture", lambda: captured(here))
        stage("first", lambda: natural(here))
        stage("apply", lambda: natural(here))
        if offload:
            module.zero_grad()
            stage("capture away", lambda: captured(away))
            natural(away)
            stage("apply away", lambda: natural(away))
        on_progress()
    record = here.record()
    captured(here)  # factors before their first use; an earlier record would have done work that is being measured
    at_rest = here.record()["bytes"]
    sides = [side["representation"] for layer in record["layers"].values() for side in layer["sides"].values()]
    counted = {name: all_[WARM_UP:] for name, all_ in seen.items()}
    return KFACProfile(
        length=length,
        tokens=batch_size * length,
        parameter_bytes=sum(p.nbytes for p in module.parameters()),
        factor_bytes=at_rest,
        used_bytes=record["bytes"],
        representations=dict(Counter(sides).most_common()),
        stages=tuple(_stages(counted)),
        collectives=tuple(_collectives(counted)) if grid.size > 1 else (),
        offloaded_bytes=_moved_bytes(away, device) if offload else None,
    )


def _stages(seen: Mapping[str, Sequence[_Measured]]) -> Iterator[Stage]:
    seconds = {name: [m.seconds for m in all_] for name, all_ in seen.items()}
    seconds["decompose"] = _more(seconds["first"], seconds["apply"])
    seen = {**seen, "decompose": seen["first"]}
    if any(m.sent for m in seen["capture"]):
        seconds["reduce"] = [sum(m.waited.values()) for m in seen["capture"]]
    if "capture away" in seconds:
        seconds["offload"] = _more(seconds["capture away"], seconds["capture"])
        seconds["fetch"] = _more(seconds["apply away"], seconds["apply"])
        seen = {**seen, "offload": seen["capture away"], "fetch": seen["apply away"]}
    for name in ("plain step", "capture", "reduce", "decompose", "apply", "offload", "fetch"):
        if name in seconds:
            ratio = statistics.median(s / p for s, p in zip(seconds[name], seconds["plain step"], strict=True))
            memory = seen[name][-1].memory if name in seen else KFACMemory(None, None, None, None)
            yield Stage(name, statistics.median(seconds[name]), ratio, memory)


def _more(seconds: Sequence[float], than: Sequence[float]) -> list[float]:
    return [max(a - b, 0.0) for a, b in zip(seconds, than, strict=True)]


def _collectives(seen: Mapping[str, Sequence[_Measured]]) -> Iterator[Collective]:
    """Communication of the capture, of the first natural gradient and of a second one, by kind of collective."""
    for stage, name in (("capture", "capture"), ("first", "first use"), ("apply", "apply")):
        for kind, sent in sorted(seen[stage][-1].sent.items()):
            yield Collective(name, kind, sent, statistics.median(m.waited.get(kind, 0.0) for m in seen[stage]))


def _moved_bytes(kfac: KFACNaturalGradient, home: torch.device) -> int:
    """Bytes of the factors that are on another kind of device than `home`, the model's."""
    factors = {id(f): f for block in kfac.kfac_factors.values() for f in block.factors.values()}
    return sum(factor.nbytes for factor in factors.values() if factor.device.type != home.type)


@dataclass
class _Meter:
    """Measures seconds and memory of actions on one device."""

    device: torch.device
    highest: int = 0
    """Maximum bytes of the process measured so far; the kernel's own record follows with some delay."""

    def __call__(self, action: Callable[[], None]) -> _Measured:
        """Run `action` and measure the seconds until the device is done, memory before and after, and collectives."""
        cuda = self.device.type == "cuda"
        synchronize(self.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else resident_bytes()
        started = time.perf_counter()
        with metered() as collectives:
            action()
        synchronize(self.device)
        seconds = time.perf_counter() - started
        if cuda:
            counters = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
            memory = KFACMemory(before, *(count(self.device) for count in counters))
        else:
            after, peak = resident_bytes(), peak_resident_bytes()
            if peak is not None:
                peak = self.highest = max(self.highest, peak, before or 0, after or 0)
            memory = KFACMemory(before, after, peak, None)
        return _Measured(seconds, memory, collectives.sent, collectives.seconds)
