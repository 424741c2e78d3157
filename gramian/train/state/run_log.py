"""What a run tells: `metrics.jsonl`, `events.jsonl`, and TensorBoard or Weights & Biases where they are asked for.

Numbers that follow from the config stand at the top of a line, and a resumed run writes the same ones again; what the clock
says stands under "time". Of a private run everything but ε and the gradient norm is computed on private data without noise: it
is listed under "not_covered_by_epsilon".
"""

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gramian.core.errors import GramianError
from gramian.distill.teaching import told
from gramian.models.gpt import GPT
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.objective import Measured
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.state.run_folder import Lines

if TYPE_CHECKING:
    from gramian.train.loop.trainer import Trainer

PEAK_TERAFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "RTX 4090": 165.0,
    "V100": 125.0,
}
"""Dense half-precision tensor-core peaks that vendors state."""
LOOKED = ("unhealthy", "advice", "rollback", "stopped")
"""Events that follow from a look at the data; the last three do so only where `privacy.decisions` is "raw"."""
NOT_COVERED = (
    "loss", "perplexity", "validation_loss", "validation_perplexity", "clip_share", "scale", "tokens", "validation_tokens",
    "spikes",
)  # fmt: skip
"""Numbers that follow from private data without noise: also how large draws were, and where gradients overflowed."""


class RunLog:
    """The log of one run; only rank 0 writes."""

    def __init__(self, run: "Trainer", on_event: Callable[[Mapping[str, Any]], None] = lambda event: None) -> None:
        """Nothing is opened yet.

        Args:
            run: whose.
            on_event: told every event, too.
        """
        self._run, self._on_event = run, on_event
        self._writes = run.world.rank == 0
        self._metrics: Lines | None = None
        self._events: Lines | None = None
        self._waiting: list[dict[str, Any]] = []
        self._started = self._last = time.perf_counter()
        self._last_tokens = 0
        self._attempts_before = 0
        self.eval_seconds = 0.0
        self._last_eval: float | None = None
        self._clock_at_eval = self._started
        self.clipped: deque[bool] = deque(maxlen=run.config.guard.window)
        """Which of the last gradients were clipped."""
        self._advised: str | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None

    # ---- files ---------------------------------------------------------------------------------------------------------

    def begin(self, upto: int | None) -> None:
        """Open the files; metrics of attempts after `upto` are cut off, a run that is resumed there writes them again."""
        if not self._writes:
            return
        folder, config = self._run.folder.path, self._run.config
        private = config.privacy is not None  # a loss without noise tells data sets apart
        self._metrics = Lines(folder / "metrics.jsonl", upto=-1 if upto is None else upto, private=private)
        self._events = Lines(folder / "events.jsonl", private=private)
        if config.run.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise GramianError("run.tensorboard: needs the package tensorboard; expected it installed") from None
            (folder / "tensorboard").mkdir(mode=0o700 if private else 0o777, exist_ok=True)
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        if config.run.wandb:
            try:
                import wandb  # type: ignore[import-not-found]
            except ImportError:
                raise GramianError("run.wandb: needs the package wandb; expected it installed") from None
            self._wandb = wandb.init(dir=str(folder), name=folder.name, resume="allow")
        for line in self._waiting:
            self._events.write(line)
        self._waiting.clear()
        self._started = self._last = self._clock_at_eval = time.perf_counter()
        self._attempts_before, self._last_tokens = self._run.attempt, self._run.tokens

    def close(self) -> None:
        """No more lines."""
        for lines in (self._metrics, self._events):
            if lines is not None:
                lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def event(self, event: Mapping[str, Any]) -> None:
        """Something happened."""
        if not self._writes:
            return
        line = {"step": self._run.step, "attempt": self._run.attempt, "clock": round(time.time(), 3), **event}
        privacy = self._run.config.privacy
        if privacy is not None and event["event"] in (LOOKED if privacy.decisions == "raw" else LOOKED[:1]):
            line["covered_by_epsilon"] = False
        if self._events is None:
            self._waiting.append(line)
        else:
            self._events.write(line)
        with contextlib.suppress(OSError, ValueError):  # a terminal that is full or closed is no reason to end
            self._on_event(line)

    # ---- numbers -------------------------------------------------------------------------------------------------------

    def outcome(self, outcome: StepOutcome) -> None:
        """A step; every so many get a line."""
        run, attempt = self._run, outcome.attempt
        limit = run.config.optimizer.max_norm
        self.clipped.append(bool(limit) and outcome.grad_norm > limit and run.config.privacy is None)
        if not self._writes or (attempt.step + 1) % run.config.run.log_every:
            return
        line: dict[str, Any] = {
            "step": attempt.step + 1,
            "attempt": attempt.number,
            "loss": outcome.loss,
            "perplexity": perplexity(outcome.loss),
            "lr": attempt.rate,
            "grad_norm": outcome.grad_norm,
            "clip_share": sum(self.clipped) / len(self.clipped),
            "scale": attempt.scale,
            "tokens": run.tokens,
        }
        if run.parts.teaching is not None:
            line |= told(outcome.extra, outcome.tokens)
        if run.config.privacy is not None:
            line["not_covered_by_epsilon"] = [name for name in NOT_COVERED if name in line]
        self._write({**line, "time": self._time()})

    def evaluation(self, measured: Measured, more: Mapping[str, Any], seconds: float) -> None:
        """A validation loss, and what else was measured with it."""
        run, first = self._run, self._last_eval is None
        attempts = run.attempt - self._attempts_before
        step_seconds = (time.perf_counter() - self._started - seconds) / attempts if attempts > 0 else None
        self.eval_seconds += seconds
        self._last_eval, self._clock_at_eval = seconds, time.perf_counter()
        if not self._writes:
            return
        line: dict[str, Any] = {
            "step": run.step,
            "attempt": run.attempt - 1,
            "validation_loss": measured.loss,
            "validation_perplexity": perplexity(measured.loss),
            "validation_tokens": measured.tokens,
            **more,
        }
        if isinstance(run.parts.stepper, PrivateStepper):
            line["epsilon"] = run.parts.stepper.epsilon()
            if run.record.not_valid:
                line["epsilon_not_valid"] = True
            line["not_covered_by_epsilon"] = [name for name in NOT_COVERED if name in line]
        self._write({**line, "time": {"seconds": seconds, "eval_share": self.eval_share()}})
        if first and step_seconds:
            costs = {str(every): seconds / (seconds + every * step_seconds) for every in (100, 300, 500)}
            self.event({"event": "eval_cost", "share_of_time_by_interval": {**costs, "auto": 0.05}})

    def eval_fits(self, share: float) -> bool:
        """True if another evaluation keeps their share of the time below this."""
        if self._last_eval is None:
            return True
        return (time.perf_counter() - self._clock_at_eval) * share >= self._last_eval

    def eval_share(self) -> float:
        """Of the time since this process began."""
        return self.eval_seconds / max(1e-9, time.perf_counter() - self._started)

    def _time(self) -> dict[str, Any]:
        """What the clock says, since the last line."""
        run, now = self._run, time.perf_counter()
        seconds, tokens = now - self._last, run.tokens - self._last_tokens
        self._last, self._last_tokens = now, run.tokens
        rate = max(0, tokens) / seconds if seconds > 0 else 0.0
        waited = run.meter.share(seconds)
        self._advise(run.meter.advice(run.config.data.workers, run.config.data.prefetch))
        cuda = run.world.device.type == "cuda"
        peak = peak_flops(run.world.device) * run.world.size
        return {
            "elapsed": now - self._started,
            "tokens_per_second": rate,
            "mfu": rate * flops_per_token(run.parts.model, run.config.data.length) / peak if peak else None,
            "memory_gib": (torch.cuda.max_memory_allocated() if cuda else most_held()) / 2**30,
            "data_wait": waited,
            "eval_share": self.eval_share(),
        }

    def _advise(self, advice: str | None) -> None:
        """Say once which knob would keep the device fed."""
        knob = None if advice is None else advice.partition(":")[0]
        if knob is not None and knob != self._advised:
            self.event({"event": "data_starved", "text": advice})
        self._advised = knob or self._advised

    def _write(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write(line)
        numbers = {name: value for name, value in (line | line["time"]).items() if isinstance(value, int | float)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["attempt"])


def perplexity(loss: float) -> float:
    """exp(loss), never cut off."""
    return math.inf if loss >= 700 else math.exp(loss)


def most_held() -> int:
    """Bytes of host memory that this process held at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def flops_per_token(model: torch.nn.Module, length: int) -> float:
    """Forward and backward of one token: 6 per weight that is multiplied, and 6·T·D per layer of causal attention."""
    tables = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters())
    weights = sum(p.numel() for p in model.parameters()) - tables
    if isinstance(model, GPT):
        weights += model.config.vocabulary * model.config.width * model.config.tied
        return 6.0 * weights + 6.0 * length * model.config.width * model.config.layers
    return 6.0 * weights


def peak_flops(device: torch.device) -> float:
    """What a known GPU can do; 0 where nobody said."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak * 1e12 for known, peak in PEAK_TERAFLOPS.items() if known in name), 0.0)
