"""An update that breaks the weights shows in the next loss only: no state that it made is one to go back to, or to resume."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.train.build.run_parts import Parts
from gramian.train.config.config import Config
from gramian.train.loop.trainer import Trainer
from gramian.train.state.run_folder import JsonLines, read_lines
from gramian.train.state.run_log import perplexity
from tests.train.runs import events, run, small


def nan_weights(parts: Parts) -> None:
    next(iter(parts.module.parameters())).view(-1)[:] = math.nan


def large_weights(parts: Parts) -> None:
    for p in parts.module.parameters():
        p.mul_(30)


def spoilt_after(parts: Parts, position: int, spoil: Callable[[Parts], None], asked: list[bool] | None = None) -> None:
    """Spoil the weights right after the update of a batch, once; with `asked` the run is asked to leave at that step."""
    plain, left = parts.stepper.take, [position]

    def take(batch: Any, rate: float, flag: bool = False) -> Any:
        hit = batch.position in left
        taken = plain(batch, rate, flag or (hit and asked is not None))
        if hit:
            left.clear()
            with torch.no_grad():
                spoil(parts)
        return taken

    parts.stepper.take = take  # type: ignore[method-assign]


def finite(trainer: Trainer) -> bool:
    return all(bool(p.isfinite().all()) for p in trainer.parts.module.parameters())


def config_of(folder: Path, **sections: Any) -> Config:
    told = {
        "run": {"steps": 60},
        "eval": {"every": 50, "windows": 4},
        "checkpoint": {"snapshot_every": 5, "every": 30, "keep": 2},
    }
    return small(folder, **{**told, **sections})


CASES = [*((position, nan_weights) for position in (28, 29, 30, 49, 59)), *((n, large_weights) for n in (28, 29, 30))]
"""Finite weights that are bad at an evaluation show in a later loss, those after the last step in none."""


@pytest.mark.full
@pytest.mark.parametrize("position, spoil", CASES)
def test_a_bad_update_is_taken_back_wherever_it_falls(
    position: int, spoil: Callable[[Parts], None], tmp_path: Path
) -> None:
    """Before, at and behind a copy, a checkpoint and an evaluation; at the last step."""
    config = config_of(tmp_path / "run")
    trainer, ended = run(config, lambda parts: spoilt_after(parts, position, spoil))
    assert ended.reason == "done" and finite(trainer)
    (rollback,) = events(config, "rollback")
    assert rollback["to"] <= position and position in rollback["skipped"]
    assert trainer.best is not None and math.isfinite(trainer.best["loss"])


def test_a_bad_state_is_not_saved_when_the_run_is_asked_to_leave(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    _, ended = run(config, lambda parts: spoilt_after(parts, 17, nan_weights, [True]))
    assert ended.reason == "interrupted"
    assert [event["resumes_from"] for event in events(config, "last_state_not_finite")] == [15]
    trainer, ended = run(config)
    assert ended.reason == "done" and finite(trainer) and not events(config, "rollback")


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", guard={"on": False}, eval={"every": 10, "windows": 4})
    trainer, _ = run(config, lambda parts: spoilt_after(parts, 35, nan_weights))
    assert not finite(trainer)
    assert trainer.best is not None and trainer.best["step"] <= 30 and math.isfinite(trainer.best["loss"])
    assert perplexity(math.nan) != perplexity(math.inf) == math.inf
    lines = Path(config.run.folder, "metrics.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert [json.loads(line, parse_constant=refuse) for line in lines]
    assert any(line.get("validation_loss", 0) is None for line in read_lines(Path(config.run.folder, "metrics.jsonl")))


@pytest.mark.parametrize(
    "problem",
    [
        OSError(28, "No space left on device"),
        *(pytest.param(e, marks=pytest.mark.full) for e in (BrokenPipeError(), ValueError("closed"))),
    ],
    ids=repr,
)
def test_a_terminal_that_fails_does_not_end_the_run(problem: Exception, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")

    def shown(*told: Any) -> None:
        raise problem

    _, ended = run(config, on_event=shown, on_outcome=shown)
    assert ended.reason == "done"
    assert events(config, "checkpoint_written") and events(config, "done")


def test_lines_of_several_threads_are_whole(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl")
    threads = [
        threading.Thread(target=lambda who=who: [lines.write({"who": who, "n": n}) for n in range(2000)])  # type: ignore[misc]
        for who in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    found = read_lines(tmp_path / "lines.jsonl")
    assert sorted((line["who"], line["n"]) for line in found) == [(who, n) for who in range(3) for n in range(2000)]
