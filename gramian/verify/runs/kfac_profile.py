"""What K-FAC costs on the reference GPT: seconds and memory of each stage, beside a step without it.

Stages: "plain step" is forward and backward; "capture" the same inside `kfac.capture`, factors made; "decompose" what the
first natural gradient takes more than a second one; "apply" that second one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from gramian.curvature import KFACNaturalGradient
from gramian.models import GPT, GPTConfig

WARM_UP = 2
ROUNDS = 5


@dataclass(frozen=True)
class Memory:
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
    memory: Memory


@dataclass(frozen=True)
class Profile:
    """The stages at one sequence length."""

    length: int
    tokens: int
    """Per step, of the whole batch."""
    parameter_bytes: int
    factor_bytes: int
    """Of the factors at rest."""
    used_bytes: int
    """Of the factors with their decompositions."""
    representations: dict[str, int]
    """{representation: sides}."""
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class _Measured:
    seconds: float
    memory: Memory


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
    device: torch.device,
    rounds: int = ROUNDS,
    on_progress: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure every stage at one sequence length.

    Options of K-FAC are the defaults, with a refresh on every step and without a moving average, so that every round does
    the same. On CUDA the passes run under bfloat16 autocast.

    Args:
        config: the model's shape.
        length: tokens per sequence.
        batch_size: sequences.
        device: where it runs.
        rounds: measured ones, after `WARM_UP` others.
        on_progress: called after each round.

    Returns:
        Medians over the rounds; memory of the last.
    """
    model = GPT(config).to(device)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(config.vocabulary, (2, batch_size, length), generator=generator).to(device)
    kfac = KFACNaturalGradient(update_freq=1, ema_decay=0.0)
    measure = _Meter(device)

    def step() -> None:
        with _autocast(device):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()

    def captured() -> None:
        with kfac.capture(model, num_terms=y.numel()):
            step()

    def natural() -> None:
        kfac.compute_natural_gradient(model)

    seen: dict[str, list[_Measured]] = {"plain step": [], "capture": [], "first": [], "apply": []}
    for _ in range(WARM_UP + rounds):
        model.zero_grad()
        seen["plain step"].append(measure(step))
        model.zero_grad()
        seen["capture"].append(measure(captured))
        seen["first"].append(measure(natural))
        seen["apply"].append(measure(natural))
        on_progress()
    record = kfac.record()
    captured()  # factors as they are before their first use; asking earlier would have done work that is being measured
    at_rest = kfac.record()["bytes"]
    sides = [side["representation"] for layer in record["layers"].values() for side in layer["sides"].values()]
    return Profile(
        length=length,
        tokens=batch_size * length,
        parameter_bytes=sum(p.nbytes for p in model.parameters()),
        factor_bytes=at_rest,
        used_bytes=record["bytes"],
        representations=dict(Counter(sides).most_common()),
        stages=tuple(_stages({name: all_[WARM_UP:] for name, all_ in seen.items()})),
    )


def _stages(seen: dict[str, list[_Measured]]) -> Iterator[Stage]:
    plain = [m.seconds for m in seen["plain step"]]
    apply = [m.seconds for m in seen["apply"]]
    first = [max(m.seconds - again, 0.0) for m, again in zip(seen["first"], apply, strict=True)]
    times = {
        "plain step": (plain, seen["plain step"]),
        "capture": ([m.seconds for m in seen["capture"]], seen["capture"]),
        "decompose": (first, seen["first"]),
        "apply": (apply, seen["apply"]),
    }
    for name, (seconds, measured) in times.items():
        ratio = statistics.median(s / p for s, p in zip(seconds, plain, strict=True))
        yield Stage(name, statistics.median(seconds), ratio, measured[-1].memory)


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
        action()
        if cuda:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        after, peak = _in_use(self.device), _peak(self.device)
        if not cuda and peak is not None:
            peak = self.highest = max(self.highest, peak, before or 0, after or 0)
        reserved = torch.cuda.memory_reserved(self.device) if cuda else None
        return _Measured(seconds, Memory(before, after, peak, reserved))


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
