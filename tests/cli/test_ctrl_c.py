"""Ctrl-C at any moment from the package's first line on: at most one line, no traceback, and what is saved can be resumed.

Each process is started for real and gets SIGINT, as does its whole group from a terminal, so many seconds after it has its
handler. Earlier the signal meets Python alone, which prints a traceback of its own.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

import gramian
from gramian.cli import main
from tests.cli.fuzz_judge import world
from tests.cli.fuzzed import TINY
from tests.kit.matrix import FULL
from tests.kit.seeds import seed_of
from tests.kit.waiting import PATIENCE
from tests.train.conftest import untouched_process  # noqa: F401

pytestmark = [] if FULL else [pytest.mark.xdist_group("fuzz")]

STEPS = 120
START = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has another one
install = signal.signal
def first(number, handler):
    signal.signal = install
    install(number, handler)
    os.write(1, b"ready\\n")
signal.signal = first
{entry}
"""
ENTRIES = {
    "module": 'runpy.run_module("gramian", run_name="__main__", alter_sys=True)',
    "script": "from gramian.__main__ import run; sys.exit(run())",  # what an installer writes into bin/gramian
}
COMMANDS = {
    "help": ["--help"],
    "train": ["train", "run.toml"],
    "workers": ["train", "run.toml", "data.workers=2"],
    "private": ["train", "run.toml", "privacy.noise_multiplier=1.0", "privacy.accountant=rdp"],
    "doctor": ["doctor", "run.toml"],
    "cache": ["cache", "run.toml", "teacher.path=w/run", "teacher.source=hidden"],
    "curvature": ["curvature", "run.toml", "--out", "curvature"],
    "eval": ["eval", "w/run"],
    "export": ["export", "w/run", "out"],
    "report": ["report", "w/run", "--out", "page.html"],
    "plan": ["plan", "run.toml"],
    "profile": ["profile", "kfac", "--cpu", "--width", "32", "--layers", "2", "--seq-lengths", "16"],
    "verify": ["verify", "distill"],
    "resume": ["verify", "resume", "run.toml"],
    "demo": ["demo", "--out", "demo"],
    "refused": ["train", "run.toml", "run.steps=0"],
}
SHORT = [("help", 0.0), ("curvature", 0.3), ("train", 1.5)]


def drawn(count: int) -> list[tuple[str, float]]:
    """Commands in turn, half of them in their first two seconds, when they import."""
    draw = random.Random(seed_of("ctrl-c"))
    names = [[*COMMANDS][place % len(COMMANDS)] for place in range(count)]
    return [(name, round(draw.uniform(0, draw.choice([2, 12])), 3)) for name in names]


def interrupted(folder: Path, argv: list[str], delay: float, entry: str) -> tuple[int, str]:
    """Start a command, interrupt it after a delay; its exit code and standard error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gramian.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START.format(entry=ENTRIES[entry]), *argv]
    with (
        (folder / "stdout").open("wb") as out,
        (folder / "stderr").open("wb") as err,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
        ) as process,
    ):
        while process.poll() is None and not (folder / "stdout").stat().st_size:
            time.sleep(0.001)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait(PATIENCE)
    return status, (folder / "stderr").read_text()


@pytest.mark.parametrize("number", range(24 if FULL else len(SHORT)))
def test_ctrl_c_is_at_most_one_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, delay = (drawn(24) if FULL else SHORT)[number]
    (tmp_path / "w").symlink_to(world())
    tables = {**TINY, "run": {**TINY["run"], "steps": STEPS}, "eval": {"every": 50, "windows": 2}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps({**tables, "checkpoint": {"snapshot_every": 20, "every": 20}}))
    status, error = interrupted(tmp_path, COMMANDS[name], delay, [*ENTRIES][number % 2])
    said = (name, delay, status, error)
    if status in (1, 2):
        own = {"doctor": "overfit", "refused": "run.steps"}.get(name, "interrupted")  # what it ends with by itself
        assert error.count("\n") == 1 and ("interrupted" in error or own in error), said
    else:  # it has saved, or was done, and then nothing is left to interrupt
        assert status in (0, -signal.SIGINT) and error.count("\n") <= 1 and "Traceback" not in error, said
    if name in ("train", "workers"):
        monkeypatch.chdir(tmp_path)
        assert main(COMMANDS[name]) == 0
        assert f"{STEPS}" in (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()[-1]
