"""The report at the end of a run: written however the run ends, never its failure, and what private runs log for it."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.privacy.clipping.norm_histogram import BINS, FIELDS, RATIO, STEPS_PER_SIDE, histogram_metrics, norm_counts
from gramian.report import write_report
from gramian.report.report_file import write_run_report
from gramian.train.loop import trainer
from gramian.train.state.run_folder import read_lines
from tests.report.page_parts import Page
from tests.train.runs import UNPROVEN, small

SMALLER: dict[str, Any] = {
    "model": {"layers": 1, "width": 16},
    "data": {"length": 16},
    "eval": {"every": 2},
    "schedule": {"warmup": 0},
}


def train(folder: Path, **sections: Any) -> int:
    steps = {"run": {"steps": 4, "deterministic": False, **sections.pop("run", {})}}
    config = small(folder / "run", **{**SMALLER, **steps, **sections})
    (folder / "run.toml").write_text(config.toml())
    return main(["train", str(folder / "run.toml")])


def test_a_private_run_ends_with_a_page_of_its_numbers(tmp_path: Path) -> None:
    assert train(tmp_path, privacy={**UNPROVEN, "max_grad_norm": 0.7}) == 0
    run = tmp_path / "run"
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600
    page = Page.read(run / "report.html")
    assert {"Clipping", "ε over steps", "Per-sample gradient norms after clipping", "Device memory"} <= set(page.titles)
    steps = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    for line in steps:
        norms = line["sample_norms"]
        assert "sample_norms" in line["not_covered_by_epsilon"] and norms["clip_norm"] == 0.7
        assert 16 * (sum(norms["counts"]) + norms["nonfinite"]) == line["tokens"] - _tokens_before(steps, line)
    plans = [event for event in read_lines(run / "events.jsonl") if event["event"] == "plans"]
    assert len(plans) == 1 and plans[0]["covered_by_epsilon"] is False
    assert page["Clipping"].rows[-1][0] == "total"


def _tokens_before(steps: list[dict[str, Any]], line: dict[str, Any]) -> int:
    return max((other["tokens"] for other in steps if other["step"] < line["step"]), default=0)


def test_no_page_is_written_where_the_config_says_so(tmp_path: Path) -> None:
    assert train(tmp_path, run={"report": False, "steps": 1}) == 0
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_that_fails_has_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        if self.step == 3:
            raise MemoryError("full")
        return attempt(self)

    attempt = trainer.Trainer._next_batch
    monkeypatch.setattr(trainer.Trainer, "_next_batch", fail)
    assert train(tmp_path) == 1
    assert Page.read(tmp_path / "run" / "report.html")["Loss"].numbers("training")


def test_a_report_that_fails_is_a_line_and_an_event_and_not_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(runs: Any) -> str:
        raise ZeroDivisionError("no page\nat all")

    monkeypatch.setattr("gramian.report.report_file.report_page", fail)
    assert train(tmp_path, run={"steps": 1}) == 0
    error = capsys.readouterr().err
    assert error == "gramian: the report was not written: ZeroDivisionError: no page\n"
    event = read_lines(tmp_path / "run" / "events.jsonl")[-1]
    assert event["event"] == "report_failed" and "ZeroDivisionError" in event["error"]


def test_a_folder_without_metrics_has_nothing_to_report(tmp_path: Path) -> None:
    assert write_run_report(tmp_path, private=False) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    line = write_run_report(tmp_path, private=True)
    assert line is not None and "\n" not in line and callable(write_report)


def test_counts_of_norms_agree_with_a_loop(tmp_path: Path) -> None:
    limit = 0.7
    edges = [limit * RATIO**k for k in range(-STEPS_PER_SIDE, STEPS_PER_SIDE + 1)]
    values = [0.0, limit, limit * 1.0001, 1e-9, 1e9, float("inf"), float("nan"), 0.3, 0.31, 5.0]
    expected = [0] * (BINS + 1)
    for value in values:
        finite = value == value and value != float("inf")
        expected[sum(edge < value for edge in edges) if finite else BINS] += 1
    counts = norm_counts(torch.tensor(values, dtype=torch.float64), limit)
    assert counts.tolist() == expected
    found = histogram_metrics(dict(zip(FIELDS, counts.tolist(), strict=True)), limit)
    assert found["counts"] == expected[:-1] and found["nonfinite"] == 2
    assert sum(found["counts"][BINS // 2 :]) == sum(value > limit for value in values if value < 1e300)
    assert json.dumps(found)
