"""The log of a run: `metrics.jsonl`, `events.jsonl`, and TensorBoard or Weights & Biases if the config asks for them.

Numbers that follow from the config are at the top level of a line, and a resumed run writes the same again; what depends on the
clock is under "time". In a private run everything but ε and the gradient norm is computed on private data without noise:
it is listed under "not_covered_by_epsilon".
"""

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gramian.curvature.persist.refresh_summary import refresh_summary
from gramian.data import StarvationMeter
from gramian.integrations.trackers import Tracker, open_trackers
from gramian.models.gpt import GPT
from gramian.train.build.run_parts import Parts
from gramian.train.loop.deferred_metrics import StepAttempt, StepOutcome
from gramian.train.loop.objective import Measured
from gramian.train.loop.stepper import TRUST_REGION
from gramian.train.state.run_folder import JsonLines
from gramian.train.state.run_progress import RunProgress
from gramian.train.state.run_record import Record

PEAK_TERAFLOPS = {
    "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "A10G": 70.0, "RTX 4090": 165.0, "V100": 125.0,
}  # fmt: skip
"""{part of a GPU's name: its dense half-precision tensor-core peak in TFLOP/s, as the vendor states it}."""
LOOKED = ("unhealthy", "plans")
"""Names of events that depend on private data, or on how much of it was drawn."""
DECIDED = ("advice", "rollback", "stopped")
"""Names of events that depend on private data if `privacy.decisions` is "raw"."""
NOT_COVERED = (
    "loss", "perplexity", "bits_per_byte", "validation_loss", "validation_perplexity", "validation_bits_per_byte",
    "clip_share", "scale", "tokens", "validation_tokens", "spikes", "sample_norms",
)  # fmt: skip
"""Names of logged numbers that are computed from private data without noise, so that ε does not cover them."""


class RunLog:
    """The log of one run; only rank 0 writes, and no file is opened before `begin`.

    `record` has the reasons why ε is not valid, `meter` the time that steps wait for data. `progress` returns the current
    progress of the run; `on_event` is called with every event.
    """

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        record: Record,
        meter: StarvationMeter,
        progress: Callable[[], RunProgress],
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        self._parts, self._config, self._grid = parts, parts.config, parts.grid
        self._folder, self._record, self._meter = folder, record, meter
        self._progress, self._on_event = progress, on_event
        self._writes = parts.grid.rank == 0
        self._metrics: JsonLines | None = None
        self._events: JsonLines | None = None
        self._waiting: list[dict[str, Any]] = []
        self._started = self._last = time.perf_counter()
        self._last_tokens = 0
        self._attempts_before = 0
        self.eval_seconds = 0.0
        self._last_eval: float | None = None
        self._clock_at_eval = self._started
        self.clipped: deque[bool] = deque(maxlen=parts.config.guard.window)
        """Whether each of the last gradients was clipped."""
        self.observed: dict[int, dict[str, Any]] = {}
        """{attempt: further numbers of its step}, until its line is written."""
        self.curvature: dict[str, Any] | None = None
        """The last refresh of K-FAC's factors whose step was logged (`refresh_summary`); None before the first one."""
        self._advised: str | None = None
        self._planned = False
        self._trackers: list[Tracker] = []

    # ---- files ---------------------------------------------------------------------------------------------------------

    def begin(self, upto: int | None) -> None:
        """Open the log files; raises a GramianError if TensorBoard or Weights & Biases is asked for and not installed.

        Metrics of attempts (tried optimizer steps) after number `upto` are removed, because the resumed run writes them again;
        None: a new run, all are removed.
        """
        if not self._writes:
            return
        folder, config = self._folder, self._config
        private = config.privacy is not None  # losses without noise distinguish data sets
        self._metrics = JsonLines(folder / "metrics.jsonl", upto=-1 if upto is None else upto, private=private)
        self._events = JsonLines(folder / "events.jsonl", private=private)
        run = config.run
        self._trackers = open_trackers(folder, tensorboard=run.tensorboard, wandb=run.wandb, private=private)
        for line in self._waiting:
            self._events.write(line)
        self._waiting.clear()
        self._started = self._last = self._clock_at_eval = time.perf_counter()
        self._attempts_before, self._last_tokens = self._progress().attempt, self._progress().tokens

    def close(self) -> None:
        """Close the log files, TensorBoard and Weights & Biases."""
        for lines in (self._metrics, self._events):
            if lines is not None:
                lines.close()
        for tracker in self._trackers:
            tracker.close()

    def event(self, event: Mapping[str, Any]) -> None:
        """Write an event to `events.jsonl` with step and time; also called from the thread that writes checkpoints."""
        if not self._writes:
            return
        progress, privacy = self._progress(), self._config.privacy
        line = {"step": progress.step, "attempt": progress.attempt, "clock": round(time.time(), 3), **event}
        if privacy is not None and event["event"] in (LOOKED + DECIDED if privacy.decisions == "raw" else LOOKED):
            line["covered_by_epsilon"] = False
        if self._events is None:
            self._waiting.append(line)
        else:
            self._events.write(line)
        with contextlib.suppress(OSError, ValueError):  # a terminal that is closed does not end the run
            self._on_event(line)

    # ---- numbers -------------------------------------------------------------------------------------------------------

    def outcome(self, outcome: StepOutcome) -> None:
        """Record the metrics of a step; every `run.log_every` steps a line is written to `metrics.jsonl`."""
        config, attempt = self._config, outcome.attempt
        limit = config.optimizer.max_norm
        self.clipped.append(bool(limit) and outcome.grad_norm > limit and config.privacy is None)
        observed = self.observed.pop(attempt.number, {})
        self.curvature = observed.get("kfac", self.curvature)
        if not self._writes:
            return
        if (attempt.step + 1) % config.run.log_every:
            if "kfac" in observed:
                self._write_refresh(outcome, observed)
            return
        line: dict[str, Any] = {
            "step": attempt.step + 1,
            "attempt": attempt.number,
            "loss": outcome.loss,
            "perplexity": perplexity(outcome.loss),
            "bits_per_byte": self._parts.training.stream.bits_per_byte(outcome.loss),
            "lr": attempt.rate,
            "grad_norm": outcome.grad_norm,
            "clip_share": sum(self.clipped) / len(self.clipped),
            "scale": attempt.scale,
            "tokens": self._progress().tokens,
            **self._parts.stepper.metrics(outcome),
            **observed,
        }
        if config.privacy is not None:
            line["not_covered_by_epsilon"] = [name for name in NOT_COVERED if name in line]
        seconds = line.pop("refresh_seconds", None)
        self._write({**line, "time": self._time() | ({} if seconds is None else {"refresh_seconds": seconds})})
        if not self._planned and (plans := self._parts.stepper.plans()):
            self.event({"event": "plans", "plans": plans})
        self._planned = True

    def refreshed(self, attempt: StepAttempt) -> None:
        """Note λ, κ, tokens and clips of every layer if the step has refreshed K-FAC's factors; of all processes together.

        In all other steps nothing is read from the device.
        """
        kfac = self._parts.stepper.kfac
        if kfac is None or kfac.state.last_refresh != kfac.steps - 1 or attempt.repeated:
            return
        record = self._parts.stepper.curvature_record()
        assert record is not None
        facts = {"kfac": refresh_summary(record), "refresh_seconds": record["seconds"]["build"]}
        self.observed[attempt.number] = {**self.observed.get(attempt.number, {}), **facts}

    def _write_refresh(self, outcome: StepOutcome, observed: Mapping[str, Any]) -> None:
        """Write a line about the refresh of a step that is not logged otherwise."""
        line: dict[str, Any] = {"step": outcome.attempt.step + 1, "attempt": outcome.attempt.number}
        line |= {name: outcome.extra[name] for name in TRUST_REGION if name in outcome.extra}
        self._write({**line, "kfac": observed["kfac"], "time": {"refresh_seconds": observed["refresh_seconds"]}})

    def evaluation(self, measured: Measured, more: Mapping[str, Any], seconds: float) -> None:
        """Write a validation loss, the further numbers `more`, and the seconds that the evaluation took to `metrics.jsonl`."""
        progress, first = self._progress(), self._last_eval is None
        attempts = progress.attempt - self._attempts_before
        step_seconds = (time.perf_counter() - self._started - seconds) / attempts if attempts > 0 else None
        self.eval_seconds += seconds
        self._last_eval, self._clock_at_eval = seconds, time.perf_counter()
        if not self._writes:
            return
        line: dict[str, Any] = {
            "step": progress.step,
            "attempt": progress.attempt - 1,
            "validation_loss": measured.loss,
            "validation_perplexity": perplexity(measured.loss),
            "validation_bits_per_byte": self._parts.validation.stream.bits_per_byte(measured.loss),
            "validation_tokens": measured.tokens,
            **more,
        }
        if (epsilon := self._parts.stepper.epsilon()) is not None:
            line["epsilon"] = epsilon
            if self._record.not_valid:
                line["epsilon_not_valid"] = True
            line["not_covered_by_epsilon"] = [name for name in NOT_COVERED if name in line]
        self._write({**line, "time": {"seconds": seconds, "eval_share": self.eval_share()}})
        if first and step_seconds:
            costs = {str(every): seconds / (seconds + every * step_seconds) for every in (100, 300, 500)}
            self.event({"event": "eval_cost", "share_of_time_by_interval": {**costs, "auto": 0.05}})

    def eval_fits(self, share: float) -> bool:
        """Whether another evaluation now would take at most the fraction `share` of the time since the last one."""
        if self._last_eval is None:
            return True
        return (time.perf_counter() - self._clock_at_eval) * share >= self._last_eval

    def eval_share(self) -> float:
        """Fraction of the time since `begin` that evaluation took."""
        return self.eval_seconds / max(1e-9, time.perf_counter() - self._started)

    def _time(self) -> dict[str, Any]:
        """Speeds and memory since the last line of metrics, which differ from run to run."""
        config, grid, now, tokens = self._config, self._grid, time.perf_counter(), self._progress().tokens
        seconds, new = now - self._last, tokens - self._last_tokens
        self._last, self._last_tokens = now, tokens
        rate = max(0, new) / seconds if seconds > 0 else 0.0
        waited = self._meter.share(seconds)
        self._advise(self._meter.advice(config.data.workers, config.data.prefetch))
        cuda = grid.device.type == "cuda"
        peak = peak_flops(grid.device) * grid.size
        return {
            "elapsed": now - self._started,
            "tokens_per_second": rate,
            "mfu": rate * flops_per_token(self._parts.model, config.data.length) / peak if peak else None,
            "memory_gib": (torch.cuda.max_memory_allocated() if cuda else peak_host_memory()) / 2**30,
            "data_wait": waited,
            "eval_share": self.eval_share(),
        }

    def _advise(self, advice: str | None) -> None:
        """Write the starvation meter's advice as an event, unless the last one named the same config key; None: no advice."""
        key = None if advice is None else advice.partition(":")[0]
        if key is not None and key != self._advised:
            self.event({"event": "data_starved", "text": advice})
        self._advised = key or self._advised

    def _write(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write(line)
        numbers = {name: value for name, value in (line | line["time"]).items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, step=line["step"], attempt=line["attempt"])


def perplexity(loss: float) -> float:
    """exp(loss), the perplexity of a mean loss in nats; infinite where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def peak_host_memory() -> int:
    """Largest number of bytes of host memory that this process has used."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def flops_per_token(model: torch.nn.Module, length: int) -> float:
    """FLOPs of forward and backward per token: 6 per weight outside embedding tables, and causal attention of a GPT.

    Attention costs 6 · length · width per layer. The tied head of a GPT counts as a weight.
    """
    tables = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters())
    weights = sum(p.numel() for p in model.parameters()) - tables
    if isinstance(model, GPT):
        weights += model.config.vocabulary * model.config.width * model.config.tied
        return 6.0 * weights + 6.0 * length * model.config.width * model.config.layers
    return 6.0 * weights


def peak_flops(device: torch.device) -> float:
    """Peak FLOP/s of a GPU that `PEAK_TERAFLOPS` lists; 0 for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak * 1e12 for known, peak in PEAK_TERAFLOPS.items() if known in name), 0.0)
