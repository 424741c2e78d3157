"""Numbers that come a step late, as from a GPU: the same run, and snapshots that hold the same."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.train.config.config import Config
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepOutcome
from gramian.train.loop.trainer import Trainer
from gramian.train.state.run_folder import read_lines
from gramian.train.state.snapshot import Copied, Snapshot, Snapshots
from tests.train.distilled import LEARNED, student
from tests.train.runs import UNPROVEN, run, small
from tests.train.test_faults import at_positions

pytestmark = pytest.mark.xdist_group("distill")
Held = dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]]
CONFIGS: dict[str, Callable[[Path], Config]] = {
    "plain": lambda folder: small(
        folder, run={"steps": 20}, checkpoint={"snapshot_every": 3, "every": 7}, eval={"every": 9}
    ),
    "sgd, every step": lambda folder: small(folder, optimizer={"kind": "sgd"}, checkpoint={"snapshot_every": 1}),
    "taught": lambda folder: student(folder, teacher=LEARNED, checkpoint={"snapshot_every": 4, "every": 6}),
    "kfac": lambda folder: small(folder, run={"steps": 12}, kfac={}, checkpoint={"snapshot_every": 5}),
    "private": lambda folder: small(folder, run={"steps": 12}, privacy=UNPROVEN, checkpoint={"snapshot_every": 5}),
}


class OneLate(DeferredMetrics):
    """All but the newest, which nobody waits for unless told to; whatever the device."""

    def read(self, wait: bool) -> list[StepOutcome]:
        newest = None if wait or not self._waiting else self._waiting.pop()
        found = super().read(wait=False)
        if newest is not None:
            self._waiting.append(newest)
        return found


def snapshots_of(
    config: Config, late: type[DeferredMetrics], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[Trainer, Held]:
    """The run, and all its snapshots: facts and tensors."""
    held: Held = {}
    plain = Snapshots.keep_copy

    def keep(self: Snapshots, copied: Copied, facts: Any) -> Snapshot:
        snapshot = plain(self, copied, facts)
        held[snapshot.step] = snapshot.facts, {name: part.local.clone() for name, part in snapshot.parts.items()}
        return snapshot

    monkeypatch.setattr(Snapshots, "keep_copy", keep)
    monkeypatch.setattr("gramian.train.loop.trainer.DeferredMetrics", late)
    trainer, ended = run(config, **how)
    monkeypatch.undo()
    assert ended.reason == "done"
    return trainer, held


def told(facts: dict[str, Any]) -> str:
    """All of them but how long K-FAC took, and the random name of an account."""
    return re.sub(r'"seconds": [^,}]*|"account": "[0-9a-f]{16}"', "", json.dumps(facts, sort_keys=True))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.full) if kind in ("sgd, every step", "taught", "kfac") else kind
        for kind in CONFIGS
    ],
)
def test_snapshots_hold_the_same_when_numbers_come_late(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, now = snapshots_of(CONFIGS[kind](tmp_path / "now"), DeferredMetrics, monkeypatch)
    _, late = snapshots_of(CONFIGS[kind](tmp_path / "late"), OneLate, monkeypatch)
    both = [
        step for step in now if step in late
    ]  # of copies that follow each other at once, one is left out until it is judged
    assert len(both) > 2 and (both == list(now) == list(late) or kind == "sgd, every step")
    for step in both:
        (facts, tensors), (other, values) = now[step], late[step]
        assert told(facts) == told(other), step
        assert tensors.keys() == values.keys() and all(torch.equal(tensors[name], values[name]) for name in tensors)


@pytest.mark.full
def test_a_fault_that_is_seen_a_step_late_ends_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is in the very step that a copy was begun after: it is not kept."""

    def spoil(stepper: Any) -> None:
        next(p for p in stepper.module.parameters() if p.grad is not None).grad.fill_(math.nan)

    ends = []
    for name, late in (("now", DeferredMetrics), ("late", OneLate)):
        config = small(tmp_path / name, checkpoint={"snapshot_every": 5, "every": 5}, eval={"every": 40})
        trainer, held = snapshots_of(config, late, monkeypatch, fault=at_positions({24}, spoil))
        assert all(torch.isfinite(t).all() for _, tensors in held.values() for t in tensors.values())
        events = [event["event"] for event in read_lines(tmp_path / name / "events.jsonl")]
        assert events.count("rollback") == 1
        ends.append(
            (held[40][1], [line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in line])
        )
    (now, told), (late_end, told_late) = ends
    assert all(torch.equal(now[name], late_end[name]) for name in now) and told == told_late
