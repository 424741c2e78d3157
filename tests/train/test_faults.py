"""Faults put into a run: it recovers or stops cleanly, says so, and ends where the clean run ends."""

import errno
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.data import load_windows
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config
from gramian.train.loop.evaluate import evaluate
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.trainer import Trainer
from gramian.train.state import checkpoint
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.run_folder import RunFolder, read_lines
from gramian.verify.resume import differences, train
from tests.kit.waiting import PATIENCE
from tests.train.runs import ONE, PRIVATE, UNPROVEN, events, run, small

STEPS = 60
# Few tokens: half precision on a CPU costs ten times what float32 does.
HALF: dict[str, Any] = {"precision": {"kind": "fp16"}, "data": {"length": 16, "batch": 2}}


one_worker = pytest.mark.xdist_group("clean run")
"""Of xdist, which then trains it once."""


def last_loss(config: Config) -> float:
    lines = read_lines(Path(config.run.folder) / "metrics.jsonl")
    return float([line["validation_loss"] for line in lines if "validation_loss" in line][-1])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    config = small(tmp_path_factory.mktemp("clean") / "run", run={"steps": STEPS})
    run(config)
    return last_loss(config)


def at_positions(positions: set[int], spoil: Callable[[PlainStepper], None], times: int = 1) -> Callable[[Parts], None]:
    """Spoil the gradients of some batches, each so many times."""

    def fault(parts: Parts) -> None:
        stepper, seen = parts.stepper, dict.fromkeys(positions, 0)
        assert isinstance(stepper, PlainStepper)
        plain = stepper._backward

        def backward(batch: Any, coefficient: float) -> torch.Tensor:
            total = plain(batch, coefficient)
            if seen.get(batch.position, times) < times:
                seen[batch.position] += 1
                spoil(stepper)
            return total

        stepper._backward = backward  # type: ignore[method-assign]

    return fault


def nan_gradient(stepper: PlainStepper) -> None:
    p = next(p for p in stepper.module.parameters() if p.grad is not None)
    assert p.grad is not None
    p.grad.view(-1)[0] = math.nan


@one_worker
def test_a_gradient_that_is_not_a_number_is_rolled_back_and_its_batch_left_out(tmp_path: Path, clean: float) -> None:
    config = small(tmp_path / "run", run={"steps": STEPS})
    trainer, ended = run(config, at_positions({33}, nan_gradient, times=9))
    assert ended.reason == "done"
    assert trainer.step == STEPS
    assert trainer.progress.skipped == {33}
    (rollback,) = events(config, "rollback")
    assert (rollback["from"], rollback["to"], rollback["skipped"]) == (34, 30, [33])
    assert all(bool(p.isfinite().all()) for p in trainer.parts.module.parameters())
    assert abs(last_loss(config) - clean) < 0.15


def test_a_rollback_names_the_first_module_whose_value_is_not_finite(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 16}, eval={"every": 16})

    def fault(parts: Parts) -> None:
        bad_T, here = next(iter(parts.batches_from(12, ()))).micro[0]["tokens"][0].clone(), {"bad": False}
        parts.model.register_forward_pre_hook(
            lambda module, given: here.update(bad=torch.equal(given[0][0], bad_T)) or None
        )
        parts.model.blocks[1].register_forward_hook(lambda module, given, out: out * math.nan if here["bad"] else out)

    _, ended = run(config, fault)
    (rollback,) = events(config, "rollback")
    assert ended.reason == "done" and 12 in rollback["skipped"]
    assert re.search(r"the loss is nan; first not finite: \S*blocks\.1: forward", rollback["reason"])


def test_natural_gradients_are_rolled_back_to_where_there_were_no_factors(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 8}, kfac={"update_freq": 2}, eval={"every": 8})
    trainer, ended = run(config, at_positions({3}, nan_gradient, times=9))
    (rollback,) = events(config, "rollback")
    assert (rollback["to"], ended.reason, trainer.step) == (0, "done", 8)


@one_worker
def test_a_batch_whose_loss_is_eight_times_as_high_does_no_harm(tmp_path: Path, clean: float) -> None:
    def fault(parts: Parts) -> None:
        stepper = parts.stepper
        assert isinstance(stepper, PlainStepper)
        plain = stepper._backward

        def backward(batch: Any, coefficient: float) -> torch.Tensor:
            bad = batch.position in (30, 31)
            return plain(batch, 8 * coefficient if bad else coefficient) * (8 if bad else 1)

        stepper._backward = backward  # type: ignore[method-assign]

    config = small(tmp_path / "run", run={"steps": STEPS})
    trainer, ended = run(config, fault)
    assert ended.reason == "done"
    (rollback,) = events(config, "rollback")
    assert {30, 31} <= set(rollback["skipped"])
    assert "nats above its median" in rollback["reason"]
    assert abs(last_loss(config) - clean) < 0.15


def test_an_overflow_in_half_precision_skips_the_step_and_the_schedule_waits(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 30}, **HALF)

    def overflow(stepper: PlainStepper) -> None:
        p = next(p for p in stepper.module.parameters() if p.grad is not None)
        assert p.grad is not None
        p.grad.view(-1)[0] = math.inf

    trainer, ended = run(config, at_positions({12, 20}, overflow))
    assert ended.reason == "done"
    assert trainer.step == 30
    skipped = trainer.progress.attempt - 30
    assert skipped >= 2  # these, and whatever the scaler's first scale costs
    assert trainer.progress.position == trainer.progress.attempt
    rates = {line["step"]: line["lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "lr" in line}
    assert rates[30] == 0.0
    assert not events(config, "rollback")


@pytest.mark.full
def test_a_scale_that_falls_and_falls_is_rolled_back(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 40}, **HALF)

    def overflow(stepper: PlainStepper) -> None:
        for p in stepper.module.parameters():
            if p.grad is not None:
                p.grad.fill_(math.inf)

    trainer, ended = run(config, at_positions({30, 31, 32}, overflow))
    assert ended.reason == "done"
    (rollback,) = events(config, "rollback")
    assert "the loss scale fell 3 times" in rollback["reason"]


class Killed(Exception):
    """In place of SIGKILL: nothing is saved on the way out."""


def kill_at(attempt: int) -> Callable[[Parts], None]:
    """End a run before an attempt of this process."""

    def fault(parts: Parts) -> None:
        plain, left = parts.stepper.take, [attempt]

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return plain(batch, rate, flag)

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    return fault


@pytest.mark.full
@pytest.mark.parametrize("attempt", [14, *(pytest.param(n, marks=pytest.mark.full) for n in (11, 12, 13, 31, 33, 37))])
@pytest.mark.parametrize(
    "positions", [{10, 11}, pytest.param({30, 31, 32}, marks=pytest.mark.full)], ids=["skips", "falls"]
)
def test_a_run_with_overflows_resumes_bitwise(positions: set[int], attempt: int, tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": {"steps": 40}, "checkpoint": {"snapshot_every": 5}, **HALF}

    def overflow(stepper: PlainStepper) -> None:
        for p in stepper.module.parameters():
            if p.grad is not None:
                p.grad.fill_(math.inf)

    fault = at_positions(positions, overflow, times=9)
    run(small(tmp_path / "whole", **told), fault)
    config = small(tmp_path / "killed", **told)

    def both(parts: Parts) -> None:
        fault(parts)
        kill_at(attempt)(parts)

    with pytest.raises(Killed):
        run(config, both)
    run(config, fault)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
    lines = [line for line in read_lines(tmp_path / "killed" / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["attempt"] == 39 + len(positions)
    assert lines[-1]["scale"] == (2.0**14 if len(positions) == 2 else 2.0**16)  # a rollback restores the scale, too


def test_a_run_that_cannot_be_helped_stops_and_names_the_module(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": STEPS}, checkpoint={"snapshot_every": 5})
    runs: list[Trainer] = []

    def spoil(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * math.nan if runs and runs[0].step >= 27 else None

    with RunFolder(config) as folder:
        parts = build(config, ONE)
        parts.model.get_submodule("blocks.1.fc").register_forward_hook(spoil)
        runs.append(Trainer(parts, folder))
        ended = runs[0].run()
    assert ended.reason == "stopped"
    assert "model.blocks.1.fc" in ended.report
    assert ended.report.count("rolled back") == 3
    assert len(events(config, "rollback")) == 3
    assert len(events(config, "stopped")) == 1
    newest = CheckpointStore(folder.checkpoints, 2).newest()
    assert newest is not None
    assert all(bool(t.isfinite().all()) for t in newest.tensors().values() if t.is_floating_point())


@one_worker
def test_a_full_disk_loses_a_save_and_nothing_else(
    tmp_path: Path, clean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path / "run", run={"steps": STEPS})
    plain, calls = checkpoint.write_tensors, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    _, ended = run(config)
    assert ended.reason == "done"
    failed = events(config, "checkpoint_failed")
    assert len(failed) == 2
    assert "No space left" in failed[0]["error"]
    assert last_loss(config) == clean
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 2).newest()
    assert newest is not None
    assert newest.step == STEPS


@pytest.mark.parametrize(
    "sections", [{}, pytest.param({"privacy": PRIVATE}, marks=pytest.mark.full)], ids=["plain", "private"]
)
def test_a_data_worker_that_dies_is_replaced(tmp_path: Path, sections: Any) -> None:
    told: dict[str, Any] = {"run": {"steps": 24}, "eval": {"every": 100}, **sections}
    run(small(tmp_path / "whole", **told))
    config = small(tmp_path / "run", data={"workers": 1}, **told)
    before = set(multiprocessing.active_children())
    killed: list[int] = []

    def fault(parts: Parts) -> None:
        stepper = parts.stepper
        plain = stepper.take

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            if batch.position == 20 and not killed:
                (worker,) = set(multiprocessing.active_children()) - before
                assert worker.pid is not None
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
                worker.join(PATIENCE)
            return plain(batch, rate, flag)

        stepper.take = take  # type: ignore[method-assign, assignment]

    _, ended = run(config, fault)
    assert killed
    assert ended.reason == "done"
    (event,) = events(config, "data_worker_died")
    assert "data.workers" in event["problem"]
    assert differences(tmp_path / "whole", tmp_path / "run") == []  # the same batches
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_and_a_resume_completes_it(sent: signal.Signals, tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 100_000}, eval={"every": 10_000})
    path = tmp_path / "run.toml"
    path.write_text(config.toml())
    with subprocess.Popen([sys.executable, "-m", "gramian", "train", str(path)], stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        process.send_signal(sent)
        assert process.wait(PATIENCE) == 0
    (event,) = events(config, "interrupted")
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 2).newest()
    assert newest is not None
    assert newest.step == event["step"] < 100_000


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.xdist_group("processes")
def test_a_rank_that_is_killed_under_torchrun_is_restarted_and_the_run_is_the_same(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 300}, eval={"every": 100})
    train(config, tmp_path / "whole", 2)
    path = tmp_path / "run.toml"
    path.write_text(config.toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=2"]
    with subprocess.Popen([*command, "--standalone", "-m", "gramian", "train", str(path)]) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and len(read_lines(metrics)) > 60):
            time.sleep(0.01)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(children[1]), signal.SIGKILL)
        assert process.wait(PATIENCE) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []
    assert events(config, "resumed")


# ---- bad input ----------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", *argv]) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    return told


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path / "run")
    (tmp_path / "run.toml").write_text(config.toml())
    with RunFolder(config):
        assert "run.folder" in refused(capsys, str(tmp_path / "run.toml"))


def test_a_folder_of_another_config_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "run", run={"steps": 10})
    run(config)
    (tmp_path / "run.toml").write_text(config.toml())
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    told = refused(capsys, str(tmp_path / "run.toml"), "optimizer.lr=0.002")
    assert "optimizer.lr is 0.003 there, 0.002 here" in told
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "override, named",
    [
        ("data.source=text", "data.files"),
        ('data.files=["/nowhere"]', "data.files"),
        ("run.steps=none", "run.steps"),
        ("model.width=33", "model.width"),
        ("run.device=cuda", "run.device"),
        ("data.tokenizer=/nowhere", "data.tokenizer"),
    ],
)
def test_wrong_values_are_one_line(
    override: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if override == "run.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    (tmp_path / "run.toml").write_text(small(tmp_path / "run").toml())
    assert named in refused(capsys, str(tmp_path / "run.toml"), override)


def test_unreadable_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00 not utf-8 \x80")
    (tmp_path / "run.toml").write_text(small(tmp_path / "run").toml())
    told = refused(
        capsys, str(tmp_path / "run.toml"), "data.source=text", f"data.files={json.dumps([str(tmp_path / 'a.txt')])}"
    )
    assert "a.txt" in told


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[x] can't allocate memory: 1 byte"),
        RuntimeError("[x] DefaultCPUAllocator: not enough memory: you tried to allocate 1 byte"),
    ],
    ids=["Python", "GPU", "host", "host, as CPUs of other kinds say it"],
)
def test_a_full_memory_is_one_line(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> Any:
        raise problem

    monkeypatch.setattr("gramian.train.build.run_parts.build", full)
    (tmp_path / "run.toml").write_text(small(tmp_path / "run").toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 1
    assert "out of memory" in capsys.readouterr().err


# ---- what is left behind --------------------------------------------------------------------------------------------------


def eightfold(positions: set[int]) -> Callable[[Parts], None]:
    """Losses eight times as high as they are."""

    def fault(parts: Parts) -> None:
        stepper = parts.stepper
        assert isinstance(stepper, PlainStepper)
        plain = stepper._backward
        stepper._backward = lambda batch, coefficient: (  # type: ignore[method-assign]
            plain(batch, coefficient) * (8 if batch.position in positions else 1)
        )

    return fault


@pytest.mark.full
@pytest.mark.parametrize("first", [30, pytest.param(33, marks=pytest.mark.full)])
def test_a_rollback_after_a_resume_goes_where_it_goes_without_one(first: int, tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": {"steps": 50}, "checkpoint": {"snapshot_every": 5, "every": 10}}
    fault = eightfold({first, first + 1})
    run(small(tmp_path / "whole", **told), fault)

    def killed(parts: Parts) -> None:
        fault(parts)
        kill_at(first + 1)(parts)

    config = small(tmp_path / "killed", **told)
    with pytest.raises(Killed):
        run(config, killed)
    run(config, fault)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
    (rollback,) = events(config, "rollback")
    assert rollback["to"] <= first - 1


def ask_to_leave(position: int) -> Callable[[Parts], None]:
    """SIGTERM while the batch of a position is computed; the step after it is the last."""

    def fault(parts: Parts) -> None:
        plain = parts.stepper.take

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            if batch.position == position:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(batch, rate, flag)

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    return fault


@pytest.mark.full
@pytest.mark.parametrize("asked", [29, *(pytest.param(asked, marks=pytest.mark.full) for asked in (30, 31, 32))])
def test_a_rollback_is_the_same_wherever_the_copy_it_goes_to_was_taken(asked: int, tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": {"steps": 50}, "checkpoint": {"snapshot_every": 5, "every": 10}}
    fault = eightfold({34, 35})
    run(small(tmp_path / "whole", **told), fault)
    config = small(tmp_path / "asked", **told)

    def both(parts: Parts) -> None:
        fault(parts)
        ask_to_leave(asked)(parts)

    _, ended = run(config, both)
    assert (ended.reason, ended.step) == ("interrupted", asked + 2)
    _, ended = run(config, fault)
    assert ended.reason == "done"
    assert len(events(config, "rollback")) == 1
    assert differences(tmp_path / "whole", tmp_path / "asked") == []


def test_steps_that_a_rollback_repeats_are_told_once(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": STEPS}, eval={"every": 16})
    trainer, _ = run(config, at_positions({33}, nan_gradient, times=9))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [*range(1, 35), *range(34, STEPS + 1)]
    assert trainer.progress.attempt == STEPS + 1
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert evaluated == [16, 32, 48, STEPS]


def test_a_rollback_keeps_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 50}, checkpoint={"keep": 1}, eval={"every": 50})
    seen: list[CheckpointStore] = []

    def fault(parts: Parts) -> None:
        eightfold({40, 41})(parts)
        plain = parts.stepper.take

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            if batch.position == 43:
                seen.append(CheckpointStore(tmp_path / "run" / "checkpoints", 1))
                assert seen[0].newest() is not None
            return plain(batch, rate, flag)

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    run(config, fault)
    assert seen
    assert len(events(config, "rollback")) == 1


def test_a_run_that_leaves_where_it_would_have_evaluated_does_so_when_it_is_resumed(tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": {"steps": 30}, "eval": {"every": 12}}
    run(small(tmp_path / "whole", **told))
    config = small(tmp_path / "asked", **told)
    _, ended = run(config, ask_to_leave(10))
    assert (ended.reason, ended.step) == ("interrupted", 12)
    run(config)
    assert differences(tmp_path / "whole", tmp_path / "asked") == []


def test_a_last_save_that_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "run", run={"steps": 12}, eval={"every": 100})
    plain = checkpoint.write_tensors

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if "00000012" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    _, ended = run(config)
    assert ended.reason == "stopped"
    assert "the last state was not saved" in ended.report


def test_other_data_than_a_run_was_trained_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 3000)
    (tmp_path / "b.txt").write_text("xyz " * 500)
    files = {"source": "text", "files": [str(tmp_path / "a.txt")], "validation_files": [str(tmp_path / "b.txt")]}
    config = small(tmp_path / "run", run={"steps": 12}, data=files)
    run(config)
    for name, field in (("a.txt", "data.files: the training"), ("b.txt", "data.validation_files: the validation")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before[:-2] + "d ")
        with pytest.raises(
            GramianError, match=f"^{field} data is not, or not known to be, that of .*; expected the same"
        ) as no:
            run(config)
        assert "\n" not in str(no.value)
        (tmp_path / name).write_text(before)
    run(config)


def test_a_document_more_that_validates_by_its_hash_is_refused(tmp_path: Path) -> None:
    """Training data is the same then: "best" would compare losses of two different sets."""
    lines = [f'{{"text": "{i} {"abc " * 60}"}}\n' for i in range(160)]
    path = tmp_path / "a.jsonl"
    config = small(tmp_path / "run", run={"steps": 12}, data={"source": "jsonl", "files": [str(path)]})
    path.write_text("".join(lines[:120]))
    run(config)
    training, _ = load_windows(config.data)
    for more in lines[120:]:
        path.write_text("".join([*lines[:120], more]))
        if load_windows(config.data)[0].digest == training.digest:
            break
    with pytest.raises(GramianError, match="^data.files: the validation data is not"):
        run(config)


def test_a_run_of_which_no_checkpoint_can_be_used_is_refused_and_left_alone(tmp_path: Path) -> None:
    config = small(tmp_path / "run", run={"steps": 12}, eval={"every": 100})
    run(config)
    for state in (tmp_path / "run").glob("checkpoints/*/state.safetensors"):
        state.write_bytes(b"cut off")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(GramianError, match="step-00000012: state.safetensors: has 7 bytes.* expected a checkpoint"):
        run(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_more_validation_windows_than_there_are_is_all_of_them(tmp_path: Path) -> None:
    parts = build(small(tmp_path / "run"), ONE)
    assert evaluate(parts, 10**12).tokens == int(parts.validation.counts.sum())


def test_a_run_that_never_began_leaves_its_folder_to_another_config(tmp_path: Path) -> None:
    with RunFolder(small(tmp_path / "run")):
        pass
    with RunFolder(small(tmp_path / "run", optimizer={"lr": 1e-4})):
        pass


@pytest.mark.full
@pytest.mark.parametrize(
    "planned", [{"target_epsilon": 8.0}, {"noise_multiplier": 2.0, "noise": "bandmf", "bands": 3}], ids=["ε", "bandmf"]
)
def test_a_rollback_of_a_private_run_makes_no_more_releases_than_planned(
    tmp_path: Path, planned: dict[str, Any]
) -> None:
    config = small(
        tmp_path / "run",
        run={"steps": 40},
        privacy={**planned, "insecure_reproducible": True, "accountant": "rdp", "decisions": "raw"},
    )

    def fault(parts: Parts) -> None:
        plain, done = parts.stepper.take, []

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            taken = plain(batch, rate, flag)
            if batch.position == 33 and not done:
                done.append(1)
                taken.values[0] = math.nan
            return taken

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    trainer, ended = run(config, fault)
    assert ended.reason == "privacy budget spent"
    assert len(events(config, "rollback")) == 1
    assert len(events(config, "privacy budget spent")) == 1
    assert trainer.step < 40
    last = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "epsilon" in line][-1]
    assert last["epsilon"] <= 8.0
    assert all(not event["covered_by_epsilon"] for event in events(config, "rollback"))


@pytest.mark.full
def test_numbers_and_words_of_a_private_run_are_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy = {**UNPROVEN, "decisions": "public_validation"}
    config = small(tmp_path / "run", run={"steps": 6}, eval={"every": 5}, privacy=privacy, precision={"kind": "fp16"})
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    free = {"step", "attempt", "lr", "grad_norm", "epsilon", "time", "not_covered_by_epsilon"}
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert set(line) - set(line["not_covered_by_epsilon"]) <= free
        assert line["time"].get("memory_gib", 1) > 0
    assert "(not covered by ε)" in capsys.readouterr().out


def test_what_happens_to_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path / "run", run={"steps": 25}, eval={"every": 100})
    run(config, ask_to_leave(11))
    (tmp_path / "run.toml").write_text(config.toml())
    newest = tmp_path / "run" / "checkpoints" / "step-00000013" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    shown = capsys.readouterr().out
    assert "step-00000013 is passed over: state.safetensors: has" in shown
    assert "resumed from step-00000010" in shown
    assert "of the time every 100 steps" in shown
    assert (
        f"done at step 25 of 25, best validation loss {last_loss(config):.4f} at step 25; {tmp_path / 'run'}" in shown
    )


@pytest.mark.full
def test_other_public_data_than_a_private_run_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text("abc " * 3000)
    config = small(
        tmp_path / "run",
        run={"steps": 12},
        privacy={"noise_multiplier": 1.0, "insecure_reproducible": True, "accountant": "rdp"},
        kfac={"update_freq": 4, "public_files": [str(tmp_path / "public.txt")]},
    )
    run(config)
    (tmp_path / "public.txt").write_text("abd " * 3000)
    with pytest.raises(GramianError, match="^kfac.public_files: the curvature data is not"):
        run(config)
