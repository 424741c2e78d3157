"""What K-FAC costs on the reference GPT: seconds and memory of each stage, beside a step without it.

Stages: "plain step" is forward and backward; "capture" the same inside `kfac.capture`, factors made; "reduce", on several
processes, that part of it which is spent in collectives that join their sums; "decompose" what the first natural gradient
takes more than a second one; "apply" that second one. Where factors are kept on the CPU too: "offload" is what a capture takes
more that way, "fetch" what a natural gradient does; copies that run beside other work do not show.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional as F

from gramian.curvature import KFACNaturalGradient
from gramian.models import GPT, GPTConfig
from gramian.parallel.exchange import metered
from gramian.parallel.world import World
from gramian.verify.model_layouts import spread

WARM_UP = 2
ROUNDS = 5


@dataclass(frozen=True)
class KFACMemory:
    """Bytes around a stage: of the CUDA allocator, or of the process on a CPU. None: this system does not say."""

    before: int | None
    after: int | None
    peak: int | None
    """Most during the stage; on a CPU the most since the process began."""
    reserved: int | None
    """What the CUDA allocator holds afterwards."""


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str
    seconds: float
    """Median of the rounds."""
    ratio: float
    """Over the plain step, median of the ratios within a round."""
    memory: KFACMemory


@dataclass(frozen=True)
class Collective:
    """What one kind of collective of K-FAC did in one stage, on this process."""

    stage: str
    kind: str
    sent: int
    """Bytes that leave this process, by the model of `gramian.parallel.exchange`."""
    seconds: float
    """Median of the rounds, waiting for slower processes included."""


@dataclass(frozen=True)
class KFACProfile:
    """The stages at one sequence length."""

    length: int
    tokens: int
    """Per step, of the whole batch of this process."""
    parameter_bytes: int
    factor_bytes: int
    """Of the factors at rest."""
    used_bytes: int
    """Of the factors with their decompositions."""
    representations: dict[str, int]
    """{representation: sides}."""
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...] = ()
    """None on one process."""
    offloaded_bytes: int | None = None
    """Of factors that a capture moved from the GPU to the CPU; None: it was not asked for."""


@dataclass(frozen=True)
class _Measured:
    seconds: float
    memory: KFACMemory
    sent: Mapping[str, int] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds of collectives, by kind."""


def model_config(layers: int, width: int, vocabulary: int, context: int) -> GPTConfig:
    """The reference GPT of this size; heads are 64 wide where that fits, and 4 where it does not.

    Raises:
        GramianError: naming the field that does not fit.
    """
    heads = max(4, width // 64) if width % 64 == 0 else 4
    return GPTConfig(vocabulary=vocabulary, context=context, layers=layers, width=width, heads=heads)


def profile_kfac(
    config: GPTConfig,
    length: int,
    batch_size: int,
    where: World,
    reduce: str = "gram",
    offload: bool = False,
    rounds: int = ROUNDS,
    on_progress: Callable[[], None] = lambda: None,
) -> KFACProfile:
    """Measure every stage at one sequence length. Collective on several processes, each with a batch of its own.

    Options of K-FAC are the defaults, with a refresh on every step and without a moving average, so that every round does
    the same. On CUDA the passes run under bfloat16 autocast.

    Args:
        config: the model's shape.
        length: tokens per sequence.
        batch_size: sequences of each process.
        where: this process; several are spread by DDP or FSDP2.
        reduce: `kfac_distributed_reduce`.
        offload: measure captures that keep their factors on the CPU, too.
        rounds: measured ones, after `WARM_UP` others.
        on_progress: called after each round.

    Returns:
        Medians over the rounds; memory of the last.
    """
    device = where.device
    model = spread(GPT(config).to(device), where)
    generator = torch.Generator().manual_seed(where.rank)
    x, y = torch.randint(config.vocabulary, (2, batch_size, length), generator=generator).to(device)
    here = KFACNaturalGradient(update_freq=1, ema_decay=0.0, kfac_distributed_reduce=reduce)
    away = KFACNaturalGradient(
        update_freq=1, ema_decay=0.0, kfac_distributed_reduce=reduce, woodbury_store_device="cpu"
    )
    measure = _Meter(device)

    def step() -> None:
        with _autocast(device):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()

    def captured(kfac: KFACNaturalGradient) -> None:
        with kfac.capture(model, num_terms=y.numel()):
            step()

    def natural(kfac: KFACNaturalGradient) -> None:
        kfac.compute_natural_gradient(model)

    seen: dict[str, list[_Measured]] = {}

    def stage(name: str, action: Callable[[], None]) -> None:
        seen.setdefault(name, []).append(measure(action))

    for _ in range(WARM_UP + rounds):
        model.zero_grad()
        stage("plain step", step)
        model.zero_grad()
        stage("capture", lambda: captured(here))
        stage("first", lambda: natural(here))
        stage("apply", lambda: natural(here))
        if offload:
            model.zero_grad()
            stage("capture away", lambda: captured(away))
            natural(away)
            stage("apply away", lambda: natural(away))
        on_progress()
    record = here.record()
    captured(
        here
    )  # factors as they are before their first use; asking earlier would have done work that is being measured
    at_rest = here.record()["bytes"]
    sides = [side["representation"] for layer in record["layers"].values() for side in layer["sides"].values()]
    counted = {name: all_[WARM_UP:] for name, all_ in seen.items()}
    return KFACProfile(
        length=length,
        tokens=batch_size * length,
        parameter_bytes=sum(p.nbytes for p in model.parameters()),
        factor_bytes=at_rest,
        used_bytes=record["bytes"],
        representations=dict(Counter(sides).most_common()),
        stages=tuple(_stages(counted)),
        collectives=tuple(_collectives(counted)) if where.size > 1 else (),
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
    """Of the capture, the first natural gradient and a second one."""
    for stage, name in (("capture", "capture"), ("first", "first use"), ("apply", "apply")):
        for kind, sent in sorted(seen[stage][-1].sent.items()):
            yield Collective(name, kind, sent, statistics.median(m.waited.get(kind, 0.0) for m in seen[stage]))


def _moved_bytes(kfac: KFACNaturalGradient, home: torch.device) -> int:
    """Of factors that lie on another kind of device than the model."""
    factors = {id(f): f for block in kfac.kfac_factors.values() for f in block.factors.values()}
    return sum(factor.nbytes for factor in factors.values() if factor.device.type != home.type)


@dataclass
class _Meter:
    """Measures what is done on one device."""

    device: torch.device
    highest: int = 0
    """Most memory of the process that was seen; the kernel's own record follows with some delay."""

    def __call__(self, action: Callable[[], None]) -> _Measured:
        """Seconds until the device is done, and memory around it."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        before = _in_use(self.device)
        started = time.perf_counter()
        with metered() as collectives:
            action()
        if cuda:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        after, peak = _in_use(self.device), _peak(self.device)
        if not cuda and peak is not None:
            peak = self.highest = max(self.highest, peak, before or 0, after or 0)
        reserved = torch.cuda.memory_reserved(self.device) if cuda else None
        return _Measured(seconds, KFACMemory(before, after, peak, reserved), collectives.sent, collectives.seconds)


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _in_use(device: torch.device) -> int | None:
    """Bytes allocated on the GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (ImportError, OSError):
        return None


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
