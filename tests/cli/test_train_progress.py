"""What `gramian train` prints into a log file: a line after each tenth of the run, and where the report is."""

import re
from pathlib import Path

import pytest

from gramian.cli import main
from tests.cli.test_init import TINY, book

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
