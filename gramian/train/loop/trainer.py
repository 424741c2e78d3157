"""The loop: steps, a guard that watches them, snapshots to go back to, checkpoints to resume from.

The state of a run is a few integers (step, position in the data, attempts, positions to leave out), the model and the
optimizer, and what the guard, the scaler, K-FAC and the privacy engine remember. A resumed run is the same run, bit for bit,
because everything else is a function of the config and these integers.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.data import DataWorkerDied, StarvationMeter
from gramian.distill.teaching import EXTRA
from gramian.train.build.run_parts import Parts
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepAttempt, StepOutcome
from gramian.train.loop.evaluate import evaluate, health_of
from gramian.train.loop.guard import Advice, Guard, Observation, Rollback, Stop
from gramian.train.loop.interrupts import Interrupts
from gramian.train.loop.nonfinite_replay import first_nonfinite
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.loop.schedule import learning_rate
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.flat_state import extents, facts_of, load, tensors_of
from gramian.train.state.nested import merge, split
from gramian.train.state.run_folder import RunFolder
from gramian.train.state.run_log import RunLog
from gramian.train.state.run_record import Record
from gramian.train.state.snapshot import Copied, Part, Snapshot, Snapshots

TRAIL = 200
"""Attempts of which is remembered where their data was."""
DEATHS = 3
"""Deaths of data workers that a run gets over."""
EVAL_SHARE = 0.05
"""Of the time, at most, that evaluation takes under eval.every = "auto"."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    step: int
    reason: str
    """"done", "privacy budget spent", "interrupted" or "stopped"."""
    report: str = ""


@dataclass
class _Pending:
    """A copy that waits for the numbers of two steps: of the one that made it, and of the next, the first to use it."""

    copied: Copied
    facts: dict[str, Any]
    """What was known when it was taken; once `whole`, also what the numbers up to it have told."""
    whole: bool = False


class Trainer:
    """One run, from where its folder left off to its end."""

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        on_outcome: Callable[[StepOutcome, "Trainer"], None] = lambda outcome, run: None,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        """Take over the parts; the state is loaded by `run`.

        Args:
            parts: of the run.
            folder: taken by rank 0.
            on_outcome: shown every step, for a progress bar.
            on_event: told what happens, also from the thread that writes checkpoints.
        """
        self.parts, self.config, self.world = parts, parts.config, parts.world
        self.folder, self._on_outcome = folder, on_outcome
        self.record = Record(folder.path, parts)
        self.step = self.position = self.attempt = self.tokens = 0
        self.skipped: set[int] = set()
        self.trail: list[tuple[int, int]] = []
        self.best: dict[str, Any] | None = None
        self.guard, self.snapshots = Guard(self.config.guard), Snapshots(parts.host.snapshots)
        self.late = DeferredMetrics(EXTRA if parts.teaching is not None else ())
        self.meter = StarvationMeter()
        self.log: RunLog = RunLog(self, on_event)
        self.store = CheckpointStore(
            folder.checkpoints, self.config.checkpoint.keep, self.world.rank, self.world.size, on_event=self.log.event
        )
        self._batches: Iterator[Any] = iter(())
        self._snapshot_due = self._flagged = False
        self._copies: deque[_Pending] = deque()
        self._evaluated = self._written = self._deaths = 0
        self._unhealthy = False
        decisions = "raw" if self.config.privacy is None else self.config.privacy.decisions
        self._judges_loss, self._judges_validation = decisions == "raw", decisions != "noised"
        """Which losses decide on rollbacks and on the best: of a private run, none that ε does not cover."""
        self._repeats_until = 0
        """Steps before it were made and told before a rollback, and are computed again."""

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Train to the end, or until something ends it."""
        settled = self.parts.optimizer.register_step_pre_hook(lambda *told: self.snapshots.settle())
        try:
            with Interrupts() as interrupts:
                self._resume()
                if (host := self.parts.host).snapshots < host.wish:
                    self.log.event({"event": "fewer_snapshots", "wish": host.wish, "plan": str(host)})
                if isinstance(stepper := self.parts.stepper, PrivateStepper) and not self._ends():
                    stepper.prove_loss()
                self.record.update()
                return self._loop(interrupts)
        finally:
            settled.remove()
            for error in self.store.close():
                self.log.event({"event": "checkpoint_lost", "error": str(error)})
            self.parts.close()
            self.log.close()

    def _loop(self, interrupts: Interrupts) -> Ended:
        self._batches = self.parts.batches_from(self.position, self.skipped)
        if not len(self.snapshots):
            self._snapshot()
            if isinstance(self.parts.stepper, PrivateStepper):  # the key is on disk before the first release
                self.store.write(self.snapshots.newest)  # not a variable: it would hold a copy for the whole run
                lost = self.store.wait()
                if self.world.most(float(bool(lost))):
                    return Ended(
                        self.step, "stopped", f"the key was not saved: {lost[0] if lost else 'on another process'}"
                    )
        elif (
            self._eval_due() and (ended := self._keep_up()) is not None
        ):  # one that was asked to leave did so before it
            return ended
        while True:
            while not self._ends():
                self._attempt(interrupts.requested is not None)
                due = self._due()
                if self._snapshot_due and not due and not self._copies:  # one waits to be judged: the next after it
                    self._copies.append(_Pending(*self._copy()))
                    self._snapshot_due = False
                went_on, ended = self._look(wait=due)
                if ended is None and self._flagged:  # on any process; all of them see it here
                    _, ended = self._look(wait=True)
                    return ended or self._leave("interrupted")
                if ended is None and due and went_on:
                    ended = self._keep_up()
                if ended is not None:
                    return ended
            if (ended := self._keep_up()) is not None:
                return ended
            if self._ends():  # and the last state was not taken back
                return self._leave("done" if self.step >= self.config.run.steps else "privacy budget spent")

    def _ends(self) -> bool:
        return self.step >= self.config.run.steps or self._budget_spent()

    def _budget_spent(self) -> bool:
        """Rollbacks repeat steps, and each is a release: a run with a target ends when its releases are made."""
        stepper, privacy = self.parts.stepper, self.config.privacy
        if not isinstance(stepper, PrivateStepper) or privacy is None or privacy.target_epsilon is None:
            return False
        return stepper.engine.released >= self.config.run.steps

    def _look(self, wait: bool) -> tuple[bool, Ended | None]:
        """Judge the steps whose numbers have arrived. False if one of them was taken back; and how the run ended, if it did."""
        for outcome in self.late.read(wait):
            self.tokens += outcome.tokens
            if outcome.attempt.repeated:
                self._flagged = self._flagged or outcome.flagged
                self._keep_copy(outcome)
                continue
            verdict = self.guard.observe(self._observation(outcome))
            self.log.outcome(outcome)
            with contextlib.suppress(OSError, ValueError):  # of a terminal
                self._on_outcome(outcome, self)
            if self.parts.teaching is not None:
                for event in self.parts.teaching.heard(outcome.extra):
                    self.log.event(event)
            self._flagged = self._flagged or outcome.flagged
            if isinstance(verdict, Advice):
                self.log.event({"event": "advice", "text": verdict.text})
            if isinstance(verdict, Stop):
                return False, self._stop(verdict, outcome)
            if isinstance(verdict, Rollback):
                self._roll_back(verdict, outcome.attempt.position)
                return False, None
            self._keep_copy(outcome)
        return True, None

    def _attempt(self, flag: bool) -> None:
        """Take one optimizer step; its numbers come later."""
        with self.meter.wait():
            batch = self._next_batch()
        rate = self._rate()
        if self.parts.teaching is not None:
            self.parts.teaching.begin(self.step)
        try:
            taken = self.parts.stepper.take(batch, rate, flag)
            if self.config.privacy is not None and not taken.stepped:
                self.record.mark_not_valid("the loss scaler left out steps by looking at sums without noise")
        finally:
            if self.config.privacy is not None:  # a row proof may have run
                with contextlib.suppress(GramianError):  # of a full disk; written after the next step
                    self.record.update()
        scaler = self.parts.stepper.scaler
        scale = None if scaler is None else scaler.get_scale()
        repeated = self.step < self._repeats_until
        attempt = StepAttempt(self.attempt, self.step, batch.position, rate, taken.stepped, scale, repeated)
        self.late.add(attempt, taken.values)
        self.trail = [*self.trail, (self.step, batch.position)][-TRAIL:]
        self.attempt += not repeated
        self.position = batch.position + 1
        self.step += taken.stepped

    def _next_batch(self) -> Any:
        """The next one; data workers that died are started again, a few times."""
        while True:
            try:
                return next(self._batches)
            except DataWorkerDied as problem:
                self._deaths += 1
                self.log.event({"event": "data_worker_died", "problem": str(problem), "deaths": self._deaths})
                if self._deaths > DEATHS:
                    raise
                self._batches = self.parts.batches_from(self.position, self.skipped)

    def _rate(self) -> float:
        config = self.config
        planned = learning_rate(self.step, config.run.steps, config.schedule, config.optimizer)
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
        """True if this step's numbers are needed now: the model is evaluated, or it is the last. Copies are begun before."""
        held = [*self.snapshots.steps, *(pending.copied.step for pending in self._copies)]
        if self.step % self.config.checkpoint.snapshot_every == 0 and self.step not in held:
            self._snapshot_due = True  # else the scaler skipped the step: the copy is from before
        return self._eval_due() or self.step >= self.config.run.steps

    def _keep_up(self) -> Ended | None:
        """Evaluate, copy and write what is due; what was found out by the first is in the others. How the run ended, if it did.

        A validation loss that is not finite tells what the next step's loss would: the last update is taken back. Where it must
        not decide, weights that are not finite do.
        """
        better = False
        if self._eval_due() or self._ends():
            loss, better = self._evaluate()
            broken = "" if math.isfinite(loss) else f"the validation loss is {loss}"
            if not self._judges_validation:
                broken = "" if self._weights_are_finite() else "a weight is not finite"
            if broken:
                verdict = self.guard.broken(self.step - 1, broken)
                if isinstance(verdict, Stop):
                    return self._stop(verdict)
                if isinstance(verdict, Rollback):
                    self._roll_back(verdict, self.position)
                    return None
        if better or (self._snapshot_due and self.guard.calm):
            self._snapshot_due = False
            self._write_if_due(self._snapshot(), better)
        return None

    def _keep_copy(self, outcome: StepOutcome) -> None:
        """The numbers of a step are there: the copy it made is whole; the one whose weights it used becomes a snapshot.

        A loss is computed before its update, so what an update did shows in the next one. A copy whose own step or the next
        is under suspicion is none to go back to: it is dropped, and another is due.
        """
        at = outcome.attempt.position
        for pending in [*self._copies]:
            makes, uses = pending.facts["position"] == at + 1, pending.whole and pending.facts["position"] <= at
            if (makes or uses) and not self.guard.calm:
                self._copies.remove(pending)
                self._snapshot_due = True
            elif makes:
                pending.facts, pending.whole = self._with_heard(pending.facts), True
            elif uses:
                self._copies.remove(pending)
                self._write_if_due(self.snapshots.keep_copy(pending.copied, pending.facts))

    def _write_if_due(self, snapshot: Snapshot, better: bool = False) -> None:
        every = self.config.checkpoint.every
        if better or snapshot.step // every > self._written // every:
            self._write(snapshot, best=better)

    def _write(self, snapshot: Snapshot, best: bool = False) -> None:
        self._written = snapshot.step
        self.store.write(snapshot, best=best)

    def _eval_due(self) -> bool:
        every = self.config.eval.every
        if self._evaluated == self.step or self.step == 0 or self.step < self._repeats_until:
            return False
        if every == "auto":
            return self._auto_due()
        return self.step % every == 0

    def _auto_due(self) -> bool:
        """Rank 0's clock decides, asked where numbers are read anyway."""
        if self.step % self.config.run.log_every:
            return False
        mine = self.world.rank == 0 and self.log.eval_fits(EVAL_SHARE)
        return self.world.most(float(mine)) > 0

    # ---- state -------------------------------------------------------------------------------------------------------

    def _copy(self) -> tuple[Copied, dict[str, Any]]:
        """Copy the tensors of the state; with it the facts that the next step changes."""
        parts = self.parts
        tensors = tensors_of(parts.module, parts.optimizer)
        scaler = parts.stepper.scaler
        facts: dict[str, Any] = {
            "config_hash": self.config.hash,
            "data": parts.digests,
            "teacher": None if parts.teaching is None else parts.teaching.teacher,
            "step": self.step,
            "position": self.position,
            "attempt": self.attempt,
            "skipped": sorted(self.skipped),
            "trail": [list(entry) for entry in self.trail],
            "repeats_until": self._repeats_until,
            "scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": facts_of(parts.module, parts.optimizer),
        }
        if isinstance(parts.stepper, PrivateStepper):
            facts["privacy"] = split("privacy", parts.stepper.engine.state_dict(), tensors)
        if parts.stepper.kfac is not None:
            facts["kfac"] = split("kfac", parts.stepper.kfac.state_dict(), tensors)
        if parts.teaching is not None:
            facts["teaching"] = split("teaching", parts.teaching.state_dict(), tensors)
        steady = {name for name, t in tensors.items() if isinstance(t, nn.Parameter) or name.startswith("optimizer.")}
        return self.snapshots.copy(self.step, tensors, steady), facts

    def _with_heard(self, facts: dict[str, Any]) -> dict[str, Any]:
        """With what the numbers up to that step have told; those of later steps must not have been read yet."""
        more: dict[str, Any] = {
            "tokens": self.tokens,
            "best": self.best,
            "evaluated": self._evaluated,
            "unhealthy": self._unhealthy,
            "clipped": list(self.log.clipped),
            "guard": self.guard.state_dict(),
        }
        if self.parts.teaching is not None:
            more["teaching"] = {**facts["teaching"], **split("teaching", self.parts.teaching.heard_state(), {})}
        return {**facts, **more}

    def _snapshot(self) -> Snapshot:
        """The state now, when all numbers were read; it takes the place of a copy that waits to be judged."""
        self._copies.clear()
        copied, facts = self._copy()
        return self.snapshots.keep_copy(copied, self._with_heard(facts))

    def _restore(self, saved: dict[str, Part], facts: dict[str, Any], validated: int | None = None) -> None:
        """Model, optimizer, scaler, factors and position; not the guard, the best, nor what privacy has spent.

        Args:
            saved: the tensors.
            facts: the rest.
            validated: of a rollback: evaluations after at most so many steps are not made again.
        """
        parts = self.parts
        self.snapshots.settle()
        load(parts.module, parts.optimizer, _of_model(saved), facts["optimizer"])
        if parts.stepper.scaler is not None:
            parts.stepper.scaler.load_state_dict(facts["scaler"])
        if parts.stepper.kfac is not None:
            held = {name: part.local.clone() for name, part in saved.items() if name.startswith("kfac")}
            parts.stepper.kfac.load_state_dict(merge(facts["kfac"], held), parts.stepper.captured)
        if parts.teaching is not None:
            held = {name: part.local for name, part in saved.items() if name.startswith("teaching")}
            parts.teaching.load_state_dict(merge(facts["teaching"], held), validated)
        self.step, self.tokens = facts["step"], facts["tokens"]
        self.trail = [(step, position) for step, position in facts["trail"]]
        if not isinstance(parts.stepper, PrivateStepper):
            self.position = facts["position"]

    def _resume(self) -> None:
        found = self.store.newest(self.config.hash)
        if found is None and self.store.refused:  # beginning anew would cut off what is told of that run
            name, reason = next(iter(self.store.refused.items()))
            raise GramianError(
                f"{self.store.folder / name}: {reason}; expected a checkpoint to resume, or another run.folder"
            )
        stepper = self.parts.stepper
        if isinstance(stepper, PrivateStepper):
            stepper.engine.bind_counter(self.folder.path / "releases.json", must_exist=found is not None)
        if found is None:
            self.log.begin(None)
            return
        facts = found.facts
        self._refuse_other_data(facts["data"], str(found.folder))
        if self.parts.teaching is not None and facts["teacher"] != self.parts.teaching.teacher:
            raise GramianError(
                f"teacher: is not the one of {found.folder}; expected the same model, or another run.folder"
            )
        saved = found.parts(extents(self.parts.module, found.shapes))
        self._restore(saved, facts)
        self.position, self.attempt = facts["position"], facts["attempt"]
        self.skipped, self.best, self._evaluated = set(facts["skipped"]), facts["best"], facts["evaluated"]
        self._unhealthy = facts["unhealthy"]
        self._written, self._repeats_until = self.step, facts["repeats_until"]
        self.guard.load_state_dict(facts["guard"])
        self.log.clipped.extend(facts["clipped"])
        if isinstance(stepper, PrivateStepper):
            held = {name: part.local for name, part in saved.items() if name.startswith("privacy")}
            replay = self.config.run.deterministic
            stepper.engine.load_state_dict(merge(facts["privacy"], held), replay=replay)
        self.store.drop_after(self.step)
        self.log.begin(self.attempt - 1)
        self.log.event({"event": "resumed", "folder": found.folder.name})
        if isinstance(stepper, PrivateStepper) and stepper.engine.not_replayed is not None:
            self.log.event({"event": "not_replayed", "reason": stepper.engine.not_replayed})
        self._snapshot()

    def _refuse_other_data(self, saved: Any, folder: str) -> None:
        """Raise for data that a checkpoint was not made of, by the key that names it.

        Raises:
            GramianError: naming the key.
        """
        before = saved if isinstance(saved, dict) else {}  # versions before noted training data alone
        for part, digest in self.parts.digests.items():
            if before.get(part) != digest:
                raise GramianError(
                    f"{self.parts.field_of(part)}: the {part} data is not, or not known to be, that of {folder}; expected "
                    "the same data, or another run.folder"
                )

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def _roll_back(self, verdict: Rollback, judged: int) -> None:
        """Restore the state from before the first suspicious step, and leave the data of all of them out from now on.

        Args:
            verdict: the guard's.
            judged: position of the last batch whose numbers it has seen; later ones may have a suspicious step's number, if
                the scaler skipped that, and are not to blame.
        """
        self.late.clear()
        self._copies.clear()
        bad = sorted({position for step, position in self.trail if step in verdict.skip and position <= judged})
        at = self.step
        self._restore(*self._state_before(verdict.to_before), verdict.to_before)
        self.skipped |= set(bad)
        self.snapshots.drop_after(self.step)
        self.store.drop_after(self.step)
        self._snapshot_due, self._written = False, min(self._written, self.step)
        if not isinstance(self.parts.stepper, PrivateStepper):  # whose steps come again with other draws
            self._repeats_until = verdict.to_before
        self._evaluated = min(self._evaluated, max(self.step, self._repeats_until))
        self.log.event(
            {
                "event": "rollback",
                "from": at,
                "to": self.step,
                "reason": verdict.reason,
                "skipped": bad,
                "lr_factor": verdict.lr_factor,
            }  # fmt: skip
        )
        if not isinstance(self.parts.stepper, PrivateStepper):  # whose draws go on
            self._batches = self.parts.batches_from(self.position, self.skipped)

    def _state_before(self, step: int) -> tuple[dict[str, Part], dict[str, Any]]:
        """The newest state of a step or an earlier one: in memory, on disk, or else the oldest there is."""
        snapshot = self.snapshots.before(step)
        if snapshot is None:
            found = self.store.newest(self.config.hash, upto=step)
            if found is not None:
                return found.parts(extents(self.parts.module, found.shapes)), found.facts
            snapshot = self.snapshots.before(self.snapshots.steps[0])
        assert snapshot is not None
        return snapshot.parts, snapshot.facts

    def _stop(self, verdict: Stop, outcome: StepOutcome | None = None) -> Ended:
        report = verdict.report
        if outcome is not None and not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            report += f"\n{self._first_nonfinite(outcome)}"
        self.log.event({"event": "stopped", "reason": verdict.reason, "report": report})
        return Ended(self.step, "stopped", report)

    def _first_nonfinite(self, outcome: StepOutcome) -> str:
        """Go back to the last snapshot, repeat the steps up to the bad one, and watch that one."""
        stepper = self.parts.stepper
        if isinstance(stepper, PrivateStepper):
            return "not replayed: that would be another look at private data"
        snapshot = self.snapshots.before(outcome.attempt.step)
        if snapshot is None:
            return "not replayed: no earlier state is left"
        self.late.clear()
        self._restore(snapshot.parts, snapshot.facts, outcome.attempt.step)
        batches: Iterator[Any] = self.parts.batches_from(self.position, self.skipped)
        for batch in batches:
            if self.parts.teaching is not None:
                self.parts.teaching.begin(self.step)
            if batch.position == outcome.attempt.position:
                found = first_nonfinite(self.parts.module, partial(stepper.watch, batch))
                return "not seen again in a replay" if found is None else f"first not finite: {found}"
            self.step += stepper.take(batch, self._rate()).stepped
        raise AssertionError("batches have no end")

    # ---- evaluation and the end ----------------------------------------------------------------------------------------

    def _evaluate(self) -> tuple[float, bool]:
        """Validation loss, and whether it is the best so far; of a step that was evaluated before, 0."""
        if self._evaluated == self.step:
            return 0.0, False
        self._evaluated = self.step
        started = time.perf_counter()
        measured = evaluate(self.parts, self.config.eval.windows)
        numbers, wrong = health_of(self.parts)
        self.log.evaluation(measured, numbers, time.perf_counter() - started)
        if wrong and not self._unhealthy:  # told again if it was well in between
            self.log.event({"event": "unhealthy", "problems": wrong})
        self._unhealthy = bool(wrong)
        if self.parts.teaching is not None:
            for event in self.parts.teaching.validated(self.step, measured.loss):
                self.log.event(event)
        best = math.inf if self.best is None else self.best["loss"]
        if not self._judges_validation or not self.guard.calm or not measured.loss < best:  # nor is NaN
            return measured.loss, False
        self.best = {"loss": measured.loss, "step": self.step}
        return measured.loss, True

    def _leave(self, reason: str) -> Ended:
        if self._written != self.step:
            self._save_last()
        lost = [error for error in self.store.wait() if f"step {self.step} " in str(error)]
        if self.world.most(float(bool(lost))):
            self.log.event({"event": "last_state_lost"})
            return Ended(
                self.step, "stopped", f"the last state was not saved: {lost[0] if lost else 'on another process'}"
            )
        self.log.event({"event": reason})
        return Ended(self.step, reason)

    def _save_last(self) -> None:
        """Write the state; where its weights are not finite, which no loss has told yet, the newest snapshot in its place."""
        if not self.config.guard.on or self._weights_are_finite():
            self._write(self._snapshot())
            return
        step = self.snapshots.steps[-1]
        self.log.event({"event": "last_state_not_finite", "resumes_from": step})
        snapshot = self.snapshots.before(step)
        if snapshot is not None and step > self._written:
            self._write(snapshot)

    def _weights_are_finite(self) -> bool:
        """On all processes; a question to them."""
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in self.parts.module.parameters()]
        finite = torch.stack([p.detach().isfinite().all() for p in parameters]).all() if parameters else True
        return not self.world.most(float(not finite))


def _of_model(saved: dict[str, Part]) -> dict[str, Part]:
    return {name: part for name, part in saved.items() if name.startswith(("model.", "optimizer."))}
