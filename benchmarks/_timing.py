"""Timing as ratios in one run: variants take turns, medians are compared."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Callable[[], Any], steps: int) -> float:
    """Wall time of one step in a block of several, the device waited for at both ends, as in training."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def take_turns(variants: dict[str, Callable[[], Any]], rounds: int, steps: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds per step of each variant in each round; every round runs all of them, in alternating order."""
    for step in variants.values():
        seconds(step, warm_up)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        order = list(variants) if turn % 2 == 0 else list(variants)[::-1]
        for name in order:
            times[name].append(seconds(variants[name], steps))
    return times


def kernels(step: Callable[[], Any], most: int = 14) -> dict[str, list[float]]:
    """{kernel: [milliseconds, launches]} of those that take longest in one step, after "all" of them; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
        synchronize()
    found = sorted(traced.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [(event.key[:90], event.self_device_time_total / 1e3, event.count) for event in found]
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return {name: [round(milliseconds, 3), count] for name, milliseconds, count in (total, *rows[:most])}


def ratio(times: list[float], base: list[float]) -> float:
    """Median over rounds of the ratio within a round, so that drift between rounds drops out."""
    return statistics.median(time / against for time, against in zip(times, base, strict=True))


def known(name: str) -> Any:
    """The results that were written before under a name, so that a run of some rows keeps the others; {} if there are none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def write(name: str, results: Any) -> Path:
    """Commit-ready JSON beside the machine it ran on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    return path
