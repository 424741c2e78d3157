"""A killed and resumed run is the run that was not killed, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from gramian.cli import main
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.run_folder import read_lines
from gramian.verify.resume import Kill, check_resume, differences, random_kills, train
from tests.kit.matrix import FULL
from tests.train.runs import PRIVATE, UNPROVEN, small

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

SHORT: dict[str, dict[str, Any]] = {
    "run": {"steps": 12},
    "data": {"length": 16, "batch": 5, "micro_batch": 2},
    "checkpoint": {"snapshot_every": 2, "every": 4},
}
"""With few tokens sides are of low rank, and their rows spread over processes, one of which has a row of data more."""
BANDED = {"noise": "bandmf", "bands": 3}
RUNS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "plain": (1, {"model": {"dropout": 0.1}, "data": {"micro_batch": 3}}),
    "plain, two processes": (2, {}),
    "sharded, two processes": (2, {"parallel": {"strategy": "fsdp2"}}),
    "K-FAC": (1, {"kfac": {"update_freq": 4}}),
    "K-FAC, two processes": (2, {"kfac": {"update_freq": 3, "ema_decay": 0.5}, **SHORT}),
    "K-FAC, sharded, two processes": (2, {"kfac": {"update_freq": 3}, "parallel": {"strategy": "fsdp2"}, **SHORT}),
    "optimizer K-FAC": (1, {"optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 4, "max_tokens": 24}}),
    "optimizer K-FAC, two processes": (2, {"optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 3}, **SHORT}),
    "optimizer K-FAC, sharded, two processes": (
        2,
        {"optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 3}, "parallel": {"strategy": "fsdp2"}, **SHORT},
    ),
    "private, with curvature of public data": (
        1,
        {
            "privacy": PRIVATE,
            "kfac": {"update_freq": 4, "public_files": [str(Path(__file__))]},
            "data": {"micro_batch": 3},
        },
    ),
    "private, with curvature of public data, two processes": (
        2,
        {"privacy": PRIVATE, "kfac": {"update_freq": 3, "public_files": [str(Path(__file__))]}, **SHORT},
    ),
    "private, in the metric of public data": (
        1,
        {
            "privacy": {**PRIVATE, "metric": "kfac"},
            "kfac": {"update_freq": 4, "public_files": [str(Path(__file__))], "precondition": False},
            "data": {"micro_batch": 3},
        },
    ),
    "private, in the metric of public data, sharded, two processes": (
        2,
        {
            "privacy": {**PRIVATE, "metric": "kfac"},
            "kfac": {"update_freq": 3, "public_files": [str(Path(__file__))]},
            "parallel": {"strategy": "fsdp2"},
            **SHORT,
        },
    ),
    "private": (1, {"privacy": UNPROVEN}),
    "private, correlated noise": (1, {"privacy": {**UNPROVEN, **BANDED}}),
    "private, correlated noise without buffers": (1, {"privacy": {**UNPROVEN, "noise": "bisr", "bands": 4}}),
    "private, correlated noise, sharded, two processes": (
        2,
        {"privacy": {**UNPROVEN, **BANDED}, "parallel": {"strategy": "fsdp2"}},
    ),
    "private, two processes": (2, {"privacy": PRIVATE, "data": {"micro_batch": 3}}),
}


SAMPLED = ("private, correlated noise", "optimizer K-FAC")


@pytest.mark.parametrize("kind", RUNS if FULL else SAMPLED)
def test_a_run_that_was_killed_ends_bitwise_where_the_other_ends(kind: str, tmp_path: Path) -> None:
    processes, sections = RUNS[kind]
    config = small(**(sections if FULL or kind == "plain" else {**SHORT, **sections}))
    sampled = [Kill("save", 12)] if kind == "plain" else [Kill("step", config.run.steps * 6 // 10)]
    count = (
        20 if processes == 1 else 6
    )  # two runs each, of several processes with the libraries to load and rows to prove
    kills = random_kills(config.run.steps, count, seed=1) if FULL else sampled
    found = check_resume(config, tmp_path, kills, processes)
    assert {kill: told[:5] for kill, told in found.items() if told} == {}
    assert len(found) == len(kills)


@pytest.mark.full
def test_differences_are_seen(tmp_path: Path) -> None:
    train(small(), tmp_path / "one")
    train(small(optimizer={"lr": 2e-3}), tmp_path / "other")
    told = differences(tmp_path / "one", tmp_path / "other")
    assert "model.model.head.weight: differs" in told
    assert any(line.startswith("metrics.jsonl: line") for line in told)


def test_a_run_killed_twice_and_left_with_a_broken_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    config = small()
    train(config, tmp_path / "whole")
    assert not train(config, tmp_path / "run", kill=Kill("step", 15))
    assert not train(config, tmp_path / "run", kill=Kill("step", 34))
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 2).newest()
    assert newest is not None
    state = newest.folder / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-10] ^= 1
    state.write_bytes(content)
    assert train(config, tmp_path / "run")
    assert differences(tmp_path / "whole", tmp_path / "run") == []
    events = read_lines(tmp_path / "run" / "events.jsonl")
    skipped = [event for event in events if event["event"] == "checkpoint_skipped"]
    assert skipped
    assert skipped[0]["folder"] == newest.folder.name
    assert "state.safetensors" in skipped[0]["reason"]


@pytest.mark.full
def test_a_finished_run_that_is_started_again_changes_nothing(tmp_path: Path) -> None:
    config = small()
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    train(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.full
def test_the_command_proves_it_for_the_users_own_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(small(run={"steps": 5000}).toml())
    assert main(["verify", "resume", str(tmp_path / "run.toml")]) == 0
    told = capsys.readouterr().out
    assert "4 of 4 killed and resumed runs of 40 steps on 1 process ended bitwise" in told
