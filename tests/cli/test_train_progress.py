"""What `gramian train` prints into a log file: a line after each tenth of the run, and where the report is."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gramian.cli import main
from tests.cli.test_init import TINY, book
from tests.kit.waiting import PATIENCE

OPTIONS = [*TINY[1:], "run.steps=20", "schedule.warmup=0", "eval.every=100"]


def test_a_log_has_a_line_for_every_tenth_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    book(tmp_path)
    assert main(["init"]) == 0
    capsys.readouterr()
    assert main(["train", "run.toml", *OPTIONS]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("step ") and " of 20: loss " in line]
    assert [line.split()[1] for line in told] == [str(step) for step in range(2, 20, 2)]
    assert all(re.search(r"  lr \S+( .*)?  (\d+ s|\d+ minutes) left$", line) for line in told), told
    assert lines[-1] == "report: runs/run/report.html" and Path("runs/run/report.html").exists()


def test_a_run_with_curvature_prints_it_after_the_first_refresh_and_once_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    book(tmp_path)
    assert main(["init"]) == 0
    capsys.readouterr()
    more = ["kfac.update_freq=1", "kfac.kfac_policy=hybrid", "kfac.max_condition_number=1e4"]
    assert main(["train", "run.toml", *OPTIONS, *more]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "K-FAC: refresh" in line]
    assert [int(re.match(r"step (\d+): K-FAC: refresh \1, ", line)[1]) for line in told] == [1, *range(2, 21, 2)]  # type: ignore[index]
    assert all(
        "policy=hybrid" in line and "κ_max=1e+04" in line and re.search(r"clipped [\d.]+%", line) for line in told
    )


@pytest.mark.full
@pytest.mark.parametrize("ending", ["reader", "terminal"])
def test_a_run_outlives_its_reader_and_saves_when_its_terminal_closes(tmp_path: Path, ending: str) -> None:
    book(tmp_path)
    steps = "run.steps=20" if ending == "reader" else "run.steps=100000"
    commands = [sys.executable, "-m", "gramian"]
    assert subprocess.run([*commands, "init"], cwd=tmp_path, capture_output=True, check=False).returncode == 0
    options = [*OPTIONS, steps, "run.log_every=1", "checkpoint.snapshot_every=5"]
    run = subprocess.Popen(
        [*commands, "train", "run.toml", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
    )
    assert run.stdout is not None and run.stderr is not None
    if ending == "reader":
        run.stdout.close()
    else:
        run.stdout.readline()
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        begun = time.monotonic()
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() - begun < PATIENCE:
            time.sleep(0.05)
        run.send_signal(signal.SIGHUP)
    assert run.wait(timeout=PATIENCE) == 0, run.stderr.read()
    folder = tmp_path / "runs" / "run"
    assert any((folder / "checkpoints").iterdir()) and (folder / "report.html").exists()
    last = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert ("done" if ending == "reader" else "interrupted") in last
