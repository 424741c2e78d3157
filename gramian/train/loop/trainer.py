"""The training loop: steps, a guard that detects faults, rollbacks to snapshots, and checkpoints to resume from.

The state of a run is its `RunProgress` (a few integers), the model and the optimizer, and the states of guard, loss scaler,
K-FAC and privacy engine. A resumed run is the same run, bit for bit, because everything else is a function of the config and
this state.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gramian.core.errors import GramianError
from gramian.data import DataWorkerDied, StarvationMeter
from gramian.train.build.remarks import remarks
from gramian.train.build.run_parts import Parts
from gramian.train.health.gradient_statistics import GradientStatistics
from gramian.train.health.nonfinite_replay import first_nonfinite
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepAttempt, StepOutcome
from gramian.train.loop.evaluate import evaluate, health_of, weights_are_finite
from gramian.train.loop.guard import Advice, Guard, Observation, Rollback, Stop
from gramian.train.loop.interrupts import Interrupts
from gramian.train.loop.schedule import learning_rate
from gramian.train.state.run_folder import RunFolder
from gramian.train.state.run_log import RunLog
from gramian.train.state.run_progress import RunProgress
from gramian.train.state.run_record import Record
from gramian.train.state.run_saver import RunSaver

DEATHS = 3
"""Maximum number of deaths of data workers that a run survives; the next one raises."""
EVAL_SHARE = 0.05
"""Largest fraction of the run's time that evaluation takes with eval.every = "auto"."""


@dataclass(frozen=True)
class Ended:
    """Why and at which step a run ended."""

    step: int
    reason: str
    """Why the run ended: "done", "privacy budget spent", "interrupted" or "stopped"."""
    report: str = ""


class Trainer:
    """Trains one run, from where its folder left off to its end.

    Args:
        parts: all parts of the run (`build`).
        folder: the run folder, locked by rank 0.
        on_outcome: called with every step's metrics and the trainer, for a progress bar.
        on_event: called with every event, also from the thread that writes checkpoints.

    Example:
        >>> with RunFolder(config) as folder:  # doctest: +SKIP
        ...     ended = Trainer(build(config, grid), folder).run()
    """

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        on_outcome: Callable[[StepOutcome, "Trainer"], None] = lambda outcome, run: None,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        self.parts, self.config, self.grid = parts, parts.config, parts.grid
        self.folder, self._on_outcome = folder, on_outcome
        self.progress = RunProgress()
        self.record = Record(folder.path, parts)
        self.guard = Guard(self.config.guard)
        self.deferred = DeferredMetrics(parts.stepper.extra)
        self.meter = StarvationMeter()
        self.log = RunLog(parts, folder.path, self.record, self.meter, lambda: self.progress, on_event)
        self.saver = RunSaver(parts, folder.checkpoints, self._judged_facts, self.log.event)
        self._batches: Iterator[Any] = iter(())
        self._statistics = GradientStatistics(parts)
        self._flagged, self._deaths = False, 0
        decisions = "raw" if self.config.privacy is None else self.config.privacy.decisions
        self._judges_loss, self._judges_validation = decisions == "raw", decisions != "noised"
        """Whether rollbacks and the best checkpoint may depend on training and validation losses; see privacy.decisions."""

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.progress.step

    @property
    def best(self) -> Mapping[str, Any] | None:
        """{"loss": lowest validation loss, "step": its step}; None before the first evaluation."""
        return self.progress.best

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Train to the last step, or until the guard, a signal or the privacy budget ends the run; returns how it ended."""
        settled = self.parts.optimizer.register_step_pre_hook(lambda *_: self.saver.snapshots.settle())
        try:
            with Interrupts() as interrupts:
                self._resume()
                for text in remarks(self.parts):
                    self.log.event({"event": "remark", "text": text})
                if (host := self.parts.host).snapshots < host.wish:
                    self.log.event({"event": "fewer_snapshots", "wish": host.wish, "plan": str(host)})
                if not self._ends():
                    self.parts.stepper.prepare()
                self.record.update()
                return self._loop(interrupts)
        finally:
            settled.remove()
            for error in self.saver.store.close():
                self.log.event({"event": "checkpoint_lost", "error": str(error)})
            self.parts.close()
            self.log.close()

    def _loop(self, interrupts: Interrupts) -> Ended:
        self._batches = self.parts.batches_from(self.progress.position, self.progress.skipped)
        if not len(self.saver.snapshots):
            self.saver.snapshot(self.progress)
            if self.config.privacy is not None:  # the key is on disk before the first release
                self.saver.write(self.saver.snapshots.newest)  # a variable would keep this copy until the run ends
                if lost := self.saver.lost(self.step):
                    return Ended(self.step, "stopped", f"the key was not saved: {lost}")
        elif self._eval_due() and (ended := self._keep_up()) is not None:  # the interrupted run left before it
            return ended
        while True:
            while not self._ends():
                self._attempt(interrupts.requested is not None)
                due = self._due()
                if not due:
                    self.saver.begin_copy(self.progress)
                sound, ended = self._judge(wait=due)
                if ended is None and self._flagged:  # on any process; all of them see it here
                    _, ended = self._judge(wait=True)
                    return ended or self._leave("interrupted")
                if ended is None and due and sound:
                    ended = self._keep_up()
                if ended is not None:
                    return ended
            if (ended := self._keep_up()) is not None:
                return ended
            if self._ends():  # and the last state was not taken back
                return self._leave("done" if self.step >= self.config.run.steps else "privacy budget spent")

    def _ends(self) -> bool:
        """Whether all steps were taken, or a private run has made all noised sums (releases) that its budget allows."""
        return self.step >= self.config.run.steps or self.parts.stepper.exhausted(self.config.run.steps)

    def _judge(self, wait: bool) -> tuple[bool, Ended | None]:
        """Pass the steps whose metrics have arrived to the guard (with `wait`: all steps taken), and follow its verdicts.

        Returns False if the guard rolled back or stopped the run, else True; and how the run ended, None if it goes on.
        """
        for outcome in self.deferred.read(wait):
            attempt = outcome.attempt
            self.progress = replace(self.progress, tokens=self.progress.tokens + outcome.tokens)
            self._flagged = self._flagged or outcome.flagged
            if attempt.repeated:
                self.saver.judge_copy(attempt.position, self.guard.calm)
                continue
            verdict = self.guard.observe(self._observation(outcome))
            self.log.outcome(outcome)
            with contextlib.suppress(OSError, ValueError):  # of a terminal
                self._on_outcome(outcome, self)
            for event in self.parts.stepper.observe(outcome):
                self.log.event(event)
            if isinstance(verdict, Advice):
                self.log.event({"event": "advice", "text": verdict.text})
            if isinstance(verdict, Stop):
                return False, self._stop(verdict, outcome)
            if isinstance(verdict, Rollback):
                self._roll_back(verdict, attempt.position, outcome)
                return False, None
            self.saver.judge_copy(attempt.position, self.guard.calm)
        return True, None

    def _attempt(self, flag: bool) -> None:
        """Take one optimizer step on the next batch; its metrics are read later. `flag`: this process was asked to end."""
        with self.meter.wait(), self.parts.stepper.stopwatch.time("data"):
            batch = self._next_batch()
        stepper, progress, rate = self.parts.stepper, self.progress, self._rate()
        stepper.begin(progress.step)
        every = 0 if progress.repeating else self.config.run.observe_every
        if every and (progress.step + 1) % every == 0:
            self._statistics.observe(batch, progress.attempt, self.log)
        try:
            taken = stepper.take(batch, rate, flag)
            if self.config.privacy is not None and not taken.stepped:
                self.record.mark_not_valid("the loss scaler left out steps by looking at sums without noise")
        finally:
            if self.config.privacy is not None:  # a row proof may have run
                with contextlib.suppress(GramianError):  # of a full disk; written after the next step
                    self.record.update()
        scale = None if stepper.scaler is None else stepper.scaler.get_scale()
        attempt = StepAttempt(
            progress.attempt, progress.step, batch.position, rate, taken.stepped, scale, progress.repeating
        )
        self.log.refreshed(attempt)
        self.deferred.add(attempt, taken.values)
        self.progress = progress.after(batch.position, taken.stepped)

    def _next_batch(self) -> Any:
        """Return the next batch of the run; data workers that died are started again, up to `DEATHS` times."""
        while True:
            try:
                return next(self._batches)
            except DataWorkerDied as problem:
                self._deaths += 1
                self.log.event({"event": "data_worker_died", "problem": str(problem), "deaths": self._deaths})
                if self._deaths > DEATHS:
                    raise
                self._batches = self.parts.batches_from(self.progress.position, self.progress.skipped)

    def _rate(self) -> float:
        planned = learning_rate(self.step, self.config.run.steps, self.config.schedule, self.config.optimizer)
        return planned * self.guard.lr_scale(self.step)

    def _observation(self, outcome: StepOutcome) -> Observation:
        attempt, limit = outcome.attempt, self.config.optimizer.max_norm
        return Observation(
            attempt.step,
            outcome.loss if self._judges_loss else None,
            outcome.grad_norm,
            finite=math.isfinite(outcome.grad_norm),
            scale=attempt.scale if self._judges_loss else None,
            clipped=bool(limit) and outcome.grad_norm > limit and self.config.privacy is None,
        )

    # ---- what is due -------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Whether this step's metrics are needed now, because the model is evaluated or the step is the last."""
        self.saver.note_step(self.step)
        return self._eval_due() or self.step >= self.config.run.steps

    def _eval_due(self) -> bool:
        """Whether the model is evaluated after this step; eval.every = "auto": a logged step, if rank 0's clock allows it."""
        progress, every = self.progress, self.config.eval.every
        if progress.evaluated == progress.step or progress.step == 0 or progress.repeating:
            return False
        if every != "auto":
            return progress.step % every == 0
        if progress.step % self.config.run.log_every:
            return False
        mine = self.grid.rank == 0 and self.log.eval_fits(EVAL_SHARE)
        return self.grid.most(float(mine)) > 0

    def _keep_up(self) -> Ended | None:
        """Evaluate the model, copy its state and write a checkpoint, each if it is due; returns how the run ended, else None.

        A validation loss that is not finite takes back the last update, as the next step's loss would. If decisions must not
        depend on the validation loss (privacy), weights that are not finite do so instead.
        """
        better = False
        if self._eval_due() or self._ends():
            loss, better = self._evaluate()
            broken = "" if math.isfinite(loss) else f"the validation loss is {loss}"
            if not self._judges_validation:
                broken = "" if weights_are_finite(self.parts) else "a weight is not finite"
            if broken:
                verdict = self.guard.broken(self.step - 1, broken)
                if isinstance(verdict, Stop):
                    return self._stop(verdict)
                if isinstance(verdict, Rollback):
                    self._roll_back(verdict, self.progress.position)
                    return None
        if better or (self.saver.due and self.guard.calm):
            self.saver.write_if_due(self.saver.snapshot(self.progress), better)
        return None

    def _evaluate(self) -> tuple[float, bool]:
        """Validation loss of the model, and whether it is the best so far; (0, False) for a step that was evaluated before."""
        if self.progress.evaluated == self.step:
            return 0.0, False
        self.progress = replace(self.progress, evaluated=self.step)
        started = time.perf_counter()
        with self.parts.stepper.stopwatch.time("evaluation"):
            measured = evaluate(self.parts, self.config.eval.windows)
            numbers, wrong = health_of(self.parts)
        self.log.evaluation(measured, numbers, time.perf_counter() - started)
        if wrong and not self.progress.unhealthy:  # reported again if it was well in between
            self.log.event({"event": "unhealthy", "problems": wrong})
        self.progress = replace(self.progress, unhealthy=bool(wrong))
        for event in self.parts.stepper.validated(self.step, measured.loss):
            self.log.event(event)
        best = math.inf if self.best is None else self.best["loss"]
        if not self._judges_validation or not self.guard.calm or not measured.loss < best:  # nor is NaN
            return measured.loss, False
        self.progress = replace(self.progress, best={"loss": measured.loss, "step": self.step})
        return measured.loss, True

    # ---- state -------------------------------------------------------------------------------------------------------

    def _judged_facts(self) -> dict[str, Any]:
        """The state that depends on the metrics read so far, as JSON values: best loss, clipped steps and the guard's state."""
        return {**self.progress.judged_facts(), "clipped": list(self.log.clipped), "guard": self.guard.state_dict()}

    def _resume(self) -> None:
        """Restore the newest checkpoint of the run folder, or start a new run."""
        found, stepper = self.saver.find(), self.parts.stepper
        stepper.attach(self.folder.path, resumed=found is not None)
        if found is None:
            self.log.begin(None)
            return
        self.progress = RunProgress.from_facts(found.facts)
        sections = self.saver.restore(self.saver.read(found), found.facts)
        self.guard.load_state_dict(found.facts["guard"])
        self.log.clipped.extend(found.facts["clipped"])
        not_replayed = stepper.resume(sections, replay=self.config.run.deterministic)
        self.saver.written = self.step
        self.saver.store.drop_after(self.step)
        self.log.begin(self.progress.attempt - 1)
        self.log.event({"event": "resumed", "folder": found.folder.name})
        if not_replayed is not None:
            self.log.event({"event": "not_replayed", "reason": not_replayed})
        self.saver.snapshot(self.progress)

    def _restore(self, saved: Any, facts: Mapping[str, Any], validated: int) -> RunProgress:
        """Restore a saved state of model and optimizer; returns the progress (step, data position) that was saved with it."""
        self.deferred.clear()
        self.saver.restore(saved, facts, validated)
        return RunProgress.from_facts(facts)

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def _roll_back(self, verdict: Rollback, judged: int, outcome: StepOutcome | None = None) -> None:
        """Restore the state before the first suspicious step, and leave out the data of all suspicious steps from now on.

        `judged` is the data position of the last batch whose metrics the guard has seen. A later batch is not left out, even if
        it has a suspicious step's number because the loss scaler skipped that step. `outcome`: of the step that failed, which
        is replayed if it is not finite, so that the event names the module; None: nothing is replayed.
        """
        before, repeatable = self.progress, self.parts.stepper.repeatable
        replayed = outcome is not None and not _is_finite(outcome) and repeatable and self.config.compile.mode == "off"
        found = f"; {self._first_nonfinite(outcome.attempt)}" if replayed and outcome else ""
        bad = {position for step, position in before.trail if step in verdict.skip and position <= judged}
        saved = self._restore(*self.saver.state_before(verdict.to_before), verdict.to_before)
        self.progress = before.rolled_back(saved, verdict.to_before, frozenset(bad), repeatable)
        self.saver.drop_after(self.step)
        event = {"event": "rollback", "from": before.step, "to": self.step, "reason": f"{verdict.reason}{found}"}
        self.log.event({**event, "skipped": sorted(bad), "lr_factor": verdict.lr_factor})
        if repeatable:  # draws of a private run go on
            self._batches = self.parts.batches_from(self.progress.position, self.progress.skipped)

    def _stop(self, verdict: Stop, outcome: StepOutcome | None = None) -> Ended:
        report = verdict.report
        if outcome is not None and not _is_finite(outcome):
            report += f"\n{self._first_nonfinite(outcome.attempt)}"
        self.log.event({"event": "stopped", "reason": verdict.reason, "report": report})
        return Ended(self.step, "stopped", report)

    def _first_nonfinite(self, bad: StepAttempt) -> str:
        """Replay from the last snapshot up to the failed step `bad`, and name the first module or value that is not finite."""
        stepper = self.parts.stepper
        if not stepper.repeatable:
            return "not replayed: that would be another look at private data"
        snapshot = self.saver.snapshots.before(bad.step)
        if snapshot is None:
            return "not replayed: no earlier state is left"
        saved = self._restore(snapshot.parts, snapshot.facts, bad.step)
        self.progress = self.progress.restored(saved, repeatable=True)
        batches: Iterator[Any] = self.parts.batches_from(self.progress.position, self.progress.skipped)
        for batch in batches:
            stepper.begin(self.step)
            if batch.position == bad.position:
                found = first_nonfinite(self.parts.module, partial(stepper.watch, batch))
                return "not seen again in a replay" if found is None else f"first not finite: {found}"
            stepped = stepper.take(batch, self._rate()).stepped
            self.progress = replace(self.progress, step=self.step + stepped)
        raise AssertionError("batches have no end")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> Ended:
        self.record.update(curvature=True)
        if self.saver.written != self.step:
            self._save_last()
        if lost := self.saver.lost(self.step):
            self.log.event({"event": "last_state_lost"})
            return Ended(self.step, "stopped", f"the last state was not saved: {lost}")
        self.log.event({"event": reason})
        return Ended(self.step, reason)

    def _save_last(self) -> None:
        """Write a checkpoint of the state; if its weights are not finite, of the newest snapshot instead."""
        saver = self.saver
        if not self.config.guard.on or weights_are_finite(self.parts):
            saver.write(saver.snapshot(self.progress))
            return
        self.log.event({"event": "last_state_not_finite", "resumes_from": saver.snapshots.steps[-1]})
        if saver.snapshots.newest.step > saver.written:
            saver.write(saver.snapshots.newest)


def _is_finite(outcome: StepOutcome) -> bool:
    """Whether loss and gradient norm of a step are finite."""
    return math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)
