"""Measure the time of a step, and estimate the time of the run."""

import statistics
import time

import torch

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun

TIMED = 3
"""Number of timed steps, after one warm-up step; their median counts."""
MICRO_BATCHES = 2
"""Maximum number of micro-batches of a timed step; the time is extrapolated to all of them."""
ENOUGH = 3.0
"""Seconds after which no further step is timed."""


def step_time(run: ExaminedRun) -> list[Check]:
    """Time up to four steps of at most two micro-batches and extrapolate to the whole run; the trial model changes."""
    config = run.config
    rows = min(config.data.batch, MICRO_BATCHES * run.backward_windows)
    seconds = []
    for position in range(TIMED + 1):
        batch = run.batch(rows, position)
        started = _now(run)
        run.trial_stepper.take(batch, config.optimizer.lr)
        seconds.append(_now(run) - started)
        if position and sum(seconds) > ENOUGH:
            break
    step = statistics.median(seconds[1:]) * config.data.batch / rows
    sections = [f"[{name}]" for name in ("kfac", "privacy") if getattr(config, name) is not None]
    missing = [*sections, *["compile.mode"] * (config.compile.mode != "off")]
    hint = f"plain eager steps on one process; {' and '.join(missing)} not counted" if missing else ""
    measured = f"{_format(step)} a step, {_format(step * config.run.steps)} in all"
    return [Check("time", measured, "-", True, hint, step)]


def _now(run: ExaminedRun) -> float:
    if run.grid.device.type == "cuda":
        torch.cuda.synchronize(run.grid.device)
    return time.perf_counter()


def _format(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
