"""What `gramian train` prints: a bar with loss, learning rate and remaining time, and a line for each event.

Without a terminal, as in a log file, a line after every tenth of the run takes the place of the bar. A run with K-FAC prints a
line about its factors after the first refresh, and again about once in every tenth of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gramian.cli.terminal import duration, in_parts

if TYPE_CHECKING:
    from rich.console import Console

    from gramian.train.config.config import Config
    from gramian.train.loop.deferred_metrics import StepOutcome
    from gramian.train.loop.trainer import Trainer

EVENT_LINES = {
    "resumed": "resumed from {folder}",
    "checkpoint_skipped": "{folder} is passed over: {reason}",
    "checkpoint_failed": "{error}",
    "data_worker_died": "{problem}; started again",
    "rollback": "step {from}: {reason}; back to step {to}, batches left out: {skipped}",
    "fewer_snapshots": "{plan}",
    "advice": "{text}",
    "remark": "{text}",
    "not_observed": "{text}",
    "unhealthy": "step {step}: {listed}",
    "data_starved": "{text}",
    "temperature_stuck": "{text}",
    "features_off": "{text}",
    "teacher_far": "{text}",
    "eval_cost": "evaluation would take {every_100:.1%} of the time every 100 steps, {every_300:.1%} every 300, "
    "{every_500:.1%} every 500, at most {every_auto:.0%} with eval.every=auto",
}
"""{event: the line that is printed for it}, with fields of the event in braces."""
TENTHS = 10
"""Number of parts of a run after each of which a line is printed if there is no terminal."""


class Progress:
    """Prints the progress of one training run."""

    def __init__(self, console: Console, config: Config) -> None:
        """Prepare the progress bar of a run on a console, which is quiet on all processes but the first."""
        from rich import progress

        self._console = console
        self._bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[state]}"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=config.run.steps, state="")
        self._label = " (not covered by ε)" if config.privacy is not None else ""
        self._steps, self._first_step, self._started = config.run.steps, 0, 0.0
        self._lines = None if console.is_terminal else in_parts(TENTHS, self._print_line)
        self._curvature: Mapping[str, Any] | None = None
        self._curvature_tenth = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show_step(self, outcome: StepOutcome, run: Trainer) -> None:
        """Update the progress bar after a training step."""
        state = f"loss {outcome.loss:.4f}{self._label}  lr {outcome.attempt.rate:.2e}"
        if run.best is not None:
            state += f"  best validation {run.best['loss']:.4f}"
        done = outcome.attempt.step + 1
        self._bar.update(self._task, completed=done, state=state)
        if self._lines is not None:
            if not self._started:
                self._first_step, self._started = done, time.perf_counter()
            self._lines(done, self._steps, state)
        if run.log.curvature is not self._curvature and run.log.curvature is not None:
            self._show_refresh(run.log.curvature, outcome, done)

    def _show_refresh(self, summary: Mapping[str, Any], outcome: StepOutcome, done: int) -> None:
        """Print the line of a refresh of K-FAC's factors: of the first one, and of the first after every tenth of the run."""
        from gramian.curvature.persist.refresh_summary import summary_line

        tenth, first = done * TENTHS // self._steps, self._curvature is None
        if first or tenth > self._curvature_tenth:
            line = summary_line(summary, outcome.extra.get("trust_region", math.nan))
            self._print(f"step {done}: {line}")
        self._curvature, self._curvature_tenth = summary, tenth

    def _print_line(self, done: int, total: int, state: str) -> None:
        """Print a line about the steps so far, with the remaining time as the steps of this process took it."""
        taken, left = done - self._first_step, ""
        if taken > 0:
            left = f"  {duration((time.perf_counter() - self._started) / taken * (total - done))} left"
        self._print(f"step {done} of {total}: {state}{left}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show_event(self, event: Mapping[str, Any]) -> None:
        """Print the line of a logged event, if `EVENT_LINES` has one; may be called from any thread."""
        line = line_of(event)
        if line is not None:
            label = self._label if event.get("covered_by_epsilon") is False else ""
            self._print(f"{line}{label}")

    def end(self, run: Trainer, reason: str) -> None:
        """Print the last line of a run: why it ended, its step, and the best validation loss."""
        best = ""
        if run.best is not None:
            best = f", best validation loss {run.best['loss']:.4f}{self._label} at step {run.best['step']}"
        last_line = (
            f"{reason} at step {run.step} of {run.config.run.steps}{best}{self.validity(run)}; {run.folder.path}"
        )
        self._print(last_line)

    @staticmethod
    def validity(run: Trainer) -> str:
        """Text that says why the reported ε is not valid; empty if it is valid, or if the run is not private."""
        return f"; ε is not valid: {'; '.join(run.record.not_valid)}" if run.record.not_valid else ""


def line_of(event: Mapping[str, Any]) -> str | None:
    """The line that is printed for an event; None if `EVENT_LINES` has none."""
    form = EVENT_LINES.get(event["event"])
    shares = {f"every_{every}": share for every, share in event.get("share_of_time_by_interval", {}).items()}
    listed = "; ".join(map(str, event.get("problems", ())))
    return None if form is None else form.format_map({**event, **shares, "listed": listed})
