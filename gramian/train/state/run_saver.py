"""Save and restore the state of a run: snapshots in memory, and checkpoints on disk.

The state is tensors (model, optimizer, K-FAC, privacy, teacher) and facts, plain values in JSON. Metrics of a step may arrive
after the next one was taken, so facts come in two parts: those known when the step was taken, and its metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.train.build.run_parts import Parts
from gramian.train.state.checkpoint import CheckpointStore, LoadedCheckpoint
from gramian.train.state.flat_state import extents, facts_of, load, tensors_of
from gramian.train.state.nested import merge, split
from gramian.train.state.run_progress import RunProgress
from gramian.train.state.snapshot import Copied, Snapshot, Snapshots
from gramian.train.state.tensor_parts import Part

SECTIONS = ("privacy", "kfac", "teaching")
"""Names of the sections of state that a stepper may have (`Stepper.sections`)."""


@dataclass
class _PendingCopy:
    """A copy of the state that becomes a snapshot if the metrics of the step before it and of the next one show no fault."""

    copied: Copied
    facts: dict[str, Any]
    judged: bool = False
    """Whether the metrics of the step before the copy have arrived and are in the facts."""


class RunSaver:
    """Copies the state of a run to host memory, writes it to checkpoints, and restores it from either.

    `judged` returns the facts that depend on the metrics read so far; `on_event` receives the events of the checkpoint store,
    also from its thread.
    """

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        judged: Callable[[], dict[str, Any]],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._parts, self._options, self._judged = parts, parts.config.checkpoint, judged
        self.snapshots = Snapshots(parts.host.snapshots)
        self.store = CheckpointStore(folder, self._options.keep, parts.grid.rank, parts.grid.size, on_event=on_event)
        self.due = False
        """Whether a snapshot of the state is due."""
        self.written = 0
        """Step of the last checkpoint that was passed to the writing thread."""
        self._pending: _PendingCopy | None = None

    # ---- copying -----------------------------------------------------------------------------------------------------

    def note_step(self, step: int) -> None:
        """Mark a snapshot as due after `step` if `snapshot_every` divides it and there is none of this step yet."""
        pending = [] if self._pending is None else [self._pending.copied.step]
        if step % self._options.snapshot_every == 0 and step not in [*self.snapshots.steps, *pending]:
            self.due = True

    def begin_copy(self, progress: RunProgress) -> None:
        """Copy the state, if a snapshot is due and no earlier copy still waits for its metrics."""
        if self.due and self._pending is None:
            self._pending = _PendingCopy(*self._copy(progress))
            self.due = False

    def judge_copy(self, position: int, calm: bool) -> None:
        """Make the pending copy a snapshot, or drop it, when the metrics of the step on batch `position` have arrived.

        A loss is computed before its update, so the effect of an update shows in the next loss: the copy becomes a snapshot
        after the metrics of its own step and of the next. If the guard has seen a high loss (not `calm`) in either, the copy is
        dropped, and another is due.
        """
        pending = self._pending
        if pending is None:
            return
        makes = pending.facts["position"] == position + 1
        uses = pending.judged and pending.facts["position"] <= position
        if (makes or uses) and not calm:
            self._pending, self.due = None, True
        elif makes:
            pending.facts, pending.judged = self._with_judged(pending.facts), True
        elif uses:
            self._pending = None
            self.write_if_due(self.snapshots.keep_copy(pending.copied, pending.facts))

    def snapshot(self, progress: RunProgress) -> Snapshot:
        """Copy the state to a new snapshot when all metrics were read; replaces a pending copy."""
        self._pending, self.due = None, False
        copied, facts = self._copy(progress)
        return self.snapshots.keep_copy(copied, self._with_judged(facts))

    def _copy(self, progress: RunProgress) -> tuple[Copied, dict[str, Any]]:
        """Copy the tensors of the state; returns them with the facts (JSON values) that the next step changes."""
        parts, stepper = self._parts, self._parts.stepper
        tensors = tensors_of(parts.module, parts.optimizer)
        facts: dict[str, Any] = {
            "config_hash": parts.config.hash,
            "data": parts.digests,
            "teacher": stepper.teacher(),
            **progress.step_facts(),
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
            "optimizer": facts_of(parts.module, parts.optimizer),
        }
        facts |= {name: split(name, state, tensors) for name, state in stepper.sections().items()}
        steady = {name for name, t in tensors.items() if isinstance(t, nn.Parameter) or name.startswith("optimizer.")}
        return self.snapshots.copy(progress.step, tensors, steady), facts

    def _with_judged(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts with those added that depend on metrics up to that step; metrics of later steps must not be read yet."""
        sections = self._parts.stepper.judged_sections()
        more = {name: {**facts[name], **split(name, state, {})} for name, state in sections.items()}
        return {**facts, **self._judged(), **more}

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, best: bool = False) -> None:
        """Write a snapshot to a checkpoint in the background; `best` marks it as the best so far."""
        self.written = snapshot.step
        self.store.write(snapshot, best=best)

    def write_if_due(self, snapshot: Snapshot, best: bool = False) -> None:
        """Write a snapshot to a checkpoint if it is the best, or the first in its interval of `checkpoint.every` steps."""
        every = self._options.every
        if best or snapshot.step // every > self.written // every:
            self.write(snapshot, best)

    def lost(self, step: int) -> str:
        """Wait for the writing thread; returns why the checkpoint of `step` failed on some process, or "" if none did."""
        errors = [error for error in self.store.wait() if f"step {step} " in str(error)]
        if not self._parts.grid.most(float(bool(errors))):
            return ""
        return str(errors[0]) if errors else "on another process"

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def find(self) -> LoadedCheckpoint | None:
        """The newest checkpoint from which this run can be resumed; None if there is none.

        Raises `GramianError` if there are only checkpoints that cannot be used, or of other data or another teacher.
        """
        store = self.store
        found = store.newest(self._parts.config.hash)
        if found is None and store.refused:  # beginning anew would cut off the metrics of that run
            name, reason = next(iter(store.refused.items()))
            raise GramianError(
                f"{store.folder / name}: {reason}; expected a checkpoint to resume, or another run.folder"
            )
        if found is not None:
            self._refuse_other_inputs(found)
        return found

    def _refuse_other_inputs(self, found: LoadedCheckpoint) -> None:
        """Raise if a checkpoint was made with other data or another teacher, naming the config key."""
        data = found.facts.get("data")
        before = data if isinstance(data, dict) else {}  # earlier versions noted training data alone
        for part, digest in self._parts.digests.items():
            if before.get(part) != digest:
                raise GramianError(
                    f"{self._parts.field_of(part)}: the {part} data is not, or not known to be, that of {found.folder}; "
                    "expected the same data, or another run.folder"
                )
        if found.facts.get("teacher") != self._parts.stepper.teacher():
            raise GramianError(
                f"teacher: is not the one of {found.folder}; expected the same model, or another run.folder"
            )

    def read(self, found: LoadedCheckpoint) -> dict[str, Part]:
        """Read the parts of a checkpoint's tensors that this process needs, {name: part}."""
        return found.parts(extents(self._parts.module, found.shapes))

    def restore(
        self, saved: Mapping[str, Part], facts: Mapping[str, Any], validated: int | None = None
    ) -> dict[str, Any]:
        """Restore model, optimizer, loss scaler and the stepper's sections, not the run's progress; returns the sections.

        For a rollback, `validated` is the step up to which evaluations are not repeated; else None.
        """
        parts, stepper = self._parts, self._parts.stepper
        self.snapshots.settle()
        model = {name: part for name, part in saved.items() if name.startswith(("model.", "optimizer."))}
        load(parts.module, parts.optimizer, model, facts["optimizer"])
        if stepper.scaler is not None:
            stepper.scaler.load_state_dict(facts["scaler"])
        sections = {name: merge(facts[name], _cloned(saved, name).__getitem__) for name in SECTIONS if name in facts}
        stepper.load_sections(sections, validated)
        return sections

    def state_before(self, step: int) -> tuple[dict[str, Part], dict[str, Any]]:
        """Tensors and facts of the newest state at or before `step`: in memory, else on disk, else the oldest in memory."""
        snapshot = self.snapshots.before(step)
        if snapshot is None:
            found = self.store.newest(self._parts.config.hash, upto=step)
            if found is not None:
                return self.read(found), found.facts
            snapshot = self.snapshots.before(self.snapshots.steps[0])
        assert snapshot is not None
        return snapshot.parts, snapshot.facts

    def drop_after(self, step: int) -> None:
        """Discard snapshots and checkpoints of steps after `step`, to which the run was rolled back."""
        self._pending, self.due = None, False
        self.snapshots.drop_after(step)
        self.store.drop_after(step)
        self.written = min(self.written, step)


def _cloned(saved: Mapping[str, Part], section: str) -> dict[str, Tensor]:
    """Copies of a section's saved tensors, because the memory of a snapshot is used again."""
    return {name: part.local.clone() for name, part in saved.items() if name.startswith(f"{section}.")}
