"""`gramian influence` as torchrun starts it: the scores of one process, one voice, and one build in a folder at a time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gramian.cli import main
from gramian.influence import BuildOptions, build_index
from tests.cli.test_curvature import TINY
from tests.cli.torchrun import on_processes
from tests.curvature.problems import assert_close
from tests.influence.corpora import built, corpus
from tests.kit.refusals import refused
from tests.kit.waiting import PATIENCE
from tests.train.runs import small

ON_TORCHRUN = [pytest.mark.full, pytest.mark.dist, pytest.mark.xdist_group("processes")]
HOLDS = """
import sys, time
from gramian.influence import BuildOptions, build_index
from tests.influence.corpora import corpus

def hold(stage, done, total):
    if stage == "gradients":
        print("begun", flush=True)
        time.sleep(1000)

build_index(corpus(), sys.argv[1], BuildOptions(batch=3, gradients="1MB"), hold)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config of a float64 model."""
    path = tmp_path / "tiny.toml"
    path.write_text(small(tmp_path / "run", **TINY, precision={"kind": "fp64"}).toml())
    return str(path)


def in_build(config: str, out: Path, *more: str) -> list[str]:
    options = ["--passages", "7", "--batch", "2", "--device", "cpu", "--out", str(out)]
    return ["influence", "build", config, *options, *more]


def in_query(index: Path, out: Path, *more: str) -> list[str]:
    asked = ["--prompt", "def ", "--top", "3", "--self", "--device", "cpu", "--out", str(out)]
    return ["influence", "query", str(index), *asked, *more]


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "influence.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("gramian: ")]


@pytest.mark.parametrize("size", [pytest.param(size, marks=ON_TORCHRUN) for size in (2, 3)])
def test_torchrun_prints_and_writes_once_what_one_process_does(tmp_path: Path, config: str, size: int) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(in_build(config, one, "--gradients", "1MB")) == 0
    assert main(in_query(one, tmp_path / "said-one")) == 0
    done = on_processes(in_build(config, many, "--gradients", "1MB"), size=size)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"7 passages of 8 tokens, shared by {size} processes") == 1
    assert done.stdout.count("compressed gradients of rank") == 1
    done = on_processes(in_query(many, tmp_path / "said-many"), size=size)
    assert done.returncode == 0 and done.stdout.count("written: ") == 1, done.stderr
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("said-one", "said-many")]
    assert files[0] == files[1]
    scores = [load_file(tmp_path / name / "scores.safetensors") for name in ("said-one", "said-many")]
    for name, expected in scores[0].items():
        assert_close(scores[1][name], expected, 1e-10)
    first, second = (result(tmp_path / name) for name in ("said-one", "said-many"))
    for query, other in zip(first["queries"], second["queries"], strict=True):
        assert query["completion"] == other["completion"]
        for side in ("likelier", "less_likely"):
            assert [one["passage"] for one in query[side]] == [one["passage"] for one in other[side]]
            assert [one["tokens"] for one in query[side]] == [one["tokens"] for one in other[side]]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_what_is_wrong_is_said_once_and_ends_all(tmp_path: Path, config: str) -> None:
    index = tmp_path / "index"
    done = on_processes(in_build(config, index, "--factors", "all"))
    assert len(said(done)) == 1 and "argument --factors: 'all'; expected one of kfac, ekfac" in said(done)[0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    done = on_processes(in_build(config, tmp_path / "full"))
    assert len(said(done)) == 1 and "argument --out: " in said(done)[0] and "is not empty" in said(done)[0]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    for function in ("corpus.from_config", "index_builder.set_relative_damping", "index_builder.sketch_of"):
        fail = "def fail(*a, **k):\n    raise MemoryError('none left')\n"
        module, name = function.split(".")
        before = f"import gramian.influence.{module} as m\n{fail}if rank == 1: m.{name} = fail"
        done = on_processes(in_build(config, index, "--gradients", "1MB"), before)
        assert done.returncode != 0 and len(said(done)) == 1, done.stderr
        assert "out of memory" in said(done)[0] or "process 1: MemoryError: none left" in said(done)[0]
        assert "gramian/cli" not in done.stderr, done.stderr  # no traceback
    assert on_processes(in_build(config, index, "--gradients", "1MB"), size=3).returncode == 0
    done = on_processes(in_query(index, tmp_path / "said"), "import gramian.influence.open_index as m\n"
        "def fail(*a): raise MemoryError('none left')\nif rank == 1: m.passage_losses = fail")  # fmt: skip
    assert len(said(done)) == 1 and not any((tmp_path / "said").glob("*")), done.stderr


def test_a_second_build_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    stages = []

    def again(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        with refused(f"out: {tmp_path / 'index'} is being built by another process; expected another folder"):
            built(tmp_path / "index")

    build_index(corpus(), tmp_path / "index", BuildOptions(factors="kfac", batch=7), again)
    assert stages == ["factors"]
    built(tmp_path / "index", factors="kfac")


def test_a_refused_build_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with refused("out: ", "is not empty"):
        built(tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["file"]
    with refused("out: ", "expected a folder that can be written"):
        built(tmp_path / "full" / "file")


@pytest.mark.full
def test_a_build_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    index = tmp_path / "index"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(index)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "begun\n"
            with refused("out: ", "is being built by another process; expected another folder, or that one to end"):
                built(index, gradients="1MB")
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait(PATIENCE)
    assert built(index, gradients="1MB").folder.facts["complete"]
