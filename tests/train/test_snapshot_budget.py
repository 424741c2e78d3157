"""The copies of the state that a run holds are those of its plan: counted, lowered where memory is short, or refused."""

import json
import os
import time
import tomllib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.plan.host_memory import HostPlan, available_memory, copy_bytes
from gramian.plan.transformer_memory import optimizer_states
from gramian.train.build import snapshot_budget
from gramian.train.build.build_model import build_model
from gramian.train.build.memory_needs import shape_of
from gramian.train.build.run_parts import build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.trainer import Trainer
from gramian.train.state import checkpoint, sharded_checkpoint, snapshot
from gramian.train.state.run_folder import RunFolder
from tests.kit.processes import run_on_ranks
from tests.train.distilled import student
from tests.train.runs import PRIVATE, events, run, small

pytestmark = pytest.mark.xdist_group("processes")

TOLERANCE = 0.01
"""Scalars of the optimizer, counters, a temperature: what the plan leaves out."""
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "run": {"steps": 26},
    "checkpoint": {"snapshot_every": 2, "every": 12},
    "eval": {"every": 100},
}
"""The first checkpoint is still being written when three newer snapshots are there."""


class Held:
    """Bytes of the copies that a run holds, and the most at any time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pieces: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = self.oldest = 0
        self.first: int | None = None
        allocate, keep = snapshot._allocate, snapshot.Snapshots.keep_copy

        def counted(shape: Any) -> Any:
            found = allocate(shape)
            self.pieces.update(found)
            self.most = max(self.most, sum(piece.memory.nbytes for piece in self.pieces))
            return found

        def kept(snapshots: Any, copied: Any, facts: Any) -> Any:
            found = keep(snapshots, copied, facts)
            self.oldest = snapshots.steps[0]
            return found

        patch.setattr(snapshot, "_allocate", counted)
        patch.setattr(snapshot.Snapshots, "keep_copy", kept)
        for module in (checkpoint, sharded_checkpoint):
            patch.setattr(module, "write_tensors", self.slow(module.write_tensors))

    def slow(self, write: Any) -> Any:
        """A disk that is done with the first checkpoint behind step 0 when its snapshot was dropped."""

        def written(path: Path, *told: Any) -> Any:
            step = int(path.parent.name.rpartition("-")[2])
            if step and self.first in (None, step):
                self.first = step
                while self.oldest <= step:
                    time.sleep(0.01)
            return write(path, *told)

        return written


def held_by(rank: int, size: int, told: dict[str, Any], kind: str) -> tuple[int, HostPlan]:
    """Most bytes of copies on a process, and its plan."""
    config, world = parse_config(told), ProcessGrid(rank, size, torch.device("cpu"), kind)
    deterministic = torch.are_deterministic_algorithms_enabled()
    folder = RunFolder(config)
    if rank == 0:
        folder.__enter__()
    world.most(0.0)
    with pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        try:
            parts = build(config, world)
            Trainer(parts, folder).run()
        finally:
            folder.__exit__(None, None, None)
            torch.use_deterministic_algorithms(deterministic)
    return held.most, parts.host


def config_of(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    told = {name: {**SNAPSHOTS.get(name, {}), **sections.get(name, {})} for name in {**SNAPSHOTS, **sections}}
    return tomllib.loads(small(folder, **told).toml())


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "sgd, two snapshots": {"optimizer": {"kind": "sgd"}, "checkpoint": {"snapshots": 2}},
    "momentum, float64, copies of every step": {
        "optimizer": {"kind": "sgd", "momentum": 0.9},
        "precision": {"kind": "fp64"},
        "checkpoint": {"snapshot_every": 1, "snapshots": 4},
    },
    "private": {"privacy": PRIVATE},
}


@pytest.mark.full
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_holds_the_copies_of_its_plan(kind: str, tmp_path: Path) -> None:
    most, plan = held_by(0, 1, config_of(tmp_path / "run", **RUNS[kind]), "one")
    assert most == pytest.approx(plan.process, rel=TOLERANCE)
    assert plan.host == plan.process and plan.snapshots == RUNS[kind].get("checkpoint", {}).get("snapshots", 3)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_processes_hold_the_copies_of_their_plan(kind: str, tmp_path: Path) -> None:
    """Under DDP rank 0 alone writes, so the others hold a copy less; with FSDP2 everyone holds its shards."""
    told = config_of(tmp_path / "run", parallel={"strategy": kind})
    found = run_on_ranks(2, held_by, told, kind)
    plan = found[0][1]
    held = [most for most, _ in found]
    writing = plan.process
    assert held[0] == pytest.approx(writing, rel=TOLERANCE)
    assert held[1] == pytest.approx(writing if kind == "fsdp2" else plan.snapshots * plan.copy, rel=TOLERANCE)
    assert sum(held) == pytest.approx(plan.host, rel=TOLERANCE)
    whole = copy_bytes([p.shape for p in build_model(parse_config(told), 257).parameters()], 4, 2)
    assert plan.copy == pytest.approx(whole / (2 if kind == "fsdp2" else 1), rel=TOLERANCE)


@pytest.mark.parametrize(
    "kfac",
    [
        {"update_freq": 4, "ema_decay": 0.5},
        pytest.param({"update_freq": 4}, marks=pytest.mark.full),
        pytest.param({"update_freq": 4, "kfac_policy": "small_only"}, marks=pytest.mark.full),
    ],
)
def test_factors_of_curvature_are_in_the_copies(kfac: dict[str, Any], tmp_path: Path) -> None:
    most, plan = held_by(0, 1, config_of(tmp_path / "run", kfac=kfac), "one")
    without = copy_bytes([p.shape for p in build_model(small(), 257).parameters()], 4, 2)
    assert plan.copy > 1.2 * without
    assert 0.9 * plan.process <= most <= plan.process * (1 + TOLERANCE)


def test_less_memory_means_fewer_snapshots_and_says_so_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(config_of(tmp_path / "whole"))
    whole, _ = run(config)
    assert not events(config, "fewer_snapshots")
    copy = whole.parts.host.copy
    monkeypatch.setattr(snapshot_budget, "available_memory", lambda: int(3.2 * copy / 0.9))
    lowered = parse_config(config_of(tmp_path / "lowered"))
    trainer, _ = run(lowered)
    assert trainer.parts.host.snapshots == trainer.saver.snapshots.keep == 2
    (event,) = events(lowered, "fewer_snapshots")
    assert "checkpoint.snapshots=3 would take too much" in event["plan"] and event["wish"] == 3
    for name, p in trainer.parts.model.state_dict().items():
        assert torch.equal(p, whole.parts.model.state_dict()[name])
    assert lowered.hash == config.hash == parse_config(config_of(tmp_path, checkpoint={"snapshots": 9})).hash


def test_a_run_whose_copies_do_not_fit_is_refused_before_any_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot_budget, "available_memory", lambda: 10**6)
    monkeypatch.setattr(snapshot, "_allocate", lambda shape: pytest.fail("a copy was allocated"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    (tmp_path / "run.toml").write_text(small(tmp_path / "run").toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("gramian: checkpoint.snapshots: not even 2 and the one being written fit: ")
    assert "on a host of 8 processes, 0.9 MB can be used" in error.replace("900.0 KB", "0.9 MB")


def lowered_on_one(rank: int, size: int, told: dict[str, Any], room: float) -> tuple[int, str]:
    """A process whose host has little memory decides for all."""
    config, world = parse_config(told), ProcessGrid(rank, size, torch.device("cpu"), "ddp")
    with pytest.MonkeyPatch.context() as patch:
        plenty = build(config, world).host
        patch.setattr(snapshot_budget, "available_memory", lambda: int((room if rank else 1000) * plenty.copy))
        try:
            return build(config, world).host.snapshots, ""
        except GramianError as problem:
            return 0, str(problem)


@pytest.mark.dist
def test_processes_agree_on_the_fewest_and_refuse_together(tmp_path: Path) -> None:
    told = config_of(tmp_path / "run", checkpoint={"snapshots": 4})
    assert run_on_ranks(2, lowered_on_one, told, 7.9) == [(3, ""), (3, "")]
    (mine, first), (other, second) = run_on_ranks(2, lowered_on_one, told, 3.0)
    assert mine == other == 0
    assert first.startswith("checkpoint.snapshots: they do not fit into the memory of another host")
    assert second.startswith("checkpoint.snapshots: not even 2 and the one being written fit")


@pytest.mark.parametrize("model", [{}, {"tied": True, "layers": 3}, {"kind": "goose"}])
def test_the_shapes_of_the_plan_are_the_models(model: dict[str, Any]) -> None:
    config: Config = small(model=model)
    shapes = [tuple(p.shape) for p in build_model(config, 257).parameters()]
    assert list(shape_of(config, 257).parameter_shapes) == shapes
    assert optimizer_states("adamw", 0.0) == 2 and optimizer_states("sgd", 0.0) == 0


def test_what_is_available_is_what_the_kernel_says_within_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() < total
    files = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **_: files[str(self)] if str(self) in files else missing(self))
    assert available_memory() == 4000 * 1024
    files["/sys/fs/cgroup/memory.stat"] = "anon 5\ninactive_file 300\n"
    files["/sys/fs/cgroup/memory.current"] = "1000\n"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory() == 4000 * 1024
    files["/sys/fs/cgroup/memory.max"] = "5000\n"
    assert available_memory() == 5000 - (1000 - 300)


def missing(path: Path) -> str:
    raise FileNotFoundError(path)


def test_the_record_and_a_students_run_have_it(tmp_path: Path) -> None:
    trainer, _ = run(student(tmp_path / "run", run={"steps": 10}))
    told = json.loads((tmp_path / "run" / "record.json").read_text())["host_memory"]
    assert told == {"snapshots": 3, "bytes_of_one": trainer.parts.host.copy, "bytes": trainer.parts.host.process}
