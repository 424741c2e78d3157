"""`gramian verify distill`: green here, red when something is wrong."""

import dataclasses
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.parallel.process_grid import ProcessGrid
from gramian.verify import distill_matrix
from gramian.verify.checks import run_checks

ONE = ProcessGrid(0, 1, torch.device("cpu"), "one")


def test_it_is_green_and_says_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "distill"]) == 0
    told = capsys.readouterr().out
    assert "12 of 12 checks passed" in told and "caches = live teacher" in told


def failed(*names: str) -> set[str]:
    checks = [check for check in distill_matrix.plan(ONE) if any(name in check.title for name in names)]
    assert checks
    return {outcome.check.title for outcome in run_checks(checks) if not outcome.passed}


def _scaled(out: Any, factor: float) -> Any:
    return dataclasses.replace(out, loss=out.loss * factor)


@pytest.mark.parametrize(
    "name, put_back, seen",
    [
        ("distill_loss", lambda real: lambda *a, **k: _scaled(real(*a, **k), 1.001), "37 × 257: loss, float64"),
        ("distill_loss", lambda real: lambda *a, **k: real(*a, **{**k, "num_terms": None}), "37 × 257: parts add up"),
        ("scan", lambda real: lambda u, d: real(u, d.clamp(max=0.99)), "Goose: scan = sequential"),
        ("distill_loss", lambda real: lambda *a, **k: real(*a, **{**k, "ce_weight": 0.0}), "top-k: loss, float32"),
    ],
)
def test_a_bug_that_is_put_back_is_found(name: str, put_back: Any, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill_matrix, name, put_back(getattr(distill_matrix, name)))
    assert failed(seen) == {seen}


def test_options_of_other_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "distill", "--profile"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
