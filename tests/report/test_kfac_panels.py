"""The page of a run with K-FAC: λ, κ and clips of every layer over the steps, a table of the layers; damaged lines."""

import json
from pathlib import Path

import pytest

from gramian.report import write_report
from gramian.report.kfac_panels import MOST_CURVES, MOST_ROWS
from tests.report import run_folders
from tests.report.page_parts import Page

TITLES = [
    "Clip and trust region",
    "Seconds of a refresh",
    "Damping λ_A of every layer",
    "Damping λ_G of every layer",
    "Condition number κ_A of every layer, damped",
    "Condition number κ_G of every layer, damped",
    "Layers at step 51",
]


def page_of(*folders: Path) -> Page:
    return Page.read(write_report(folders, folders[0].parent / "page.html"))


def test_curves_and_table_have_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    page = page_of(run_folders.natural(tmp_path / "run"))
    assert [title for title in page.titles if title in TITLES] == TITLES
    panel = page["Damping λ_G of every layer"]
    assert panel.numbers("step") == [step for step in range(1, 60, 10) for _ in range(3)]
    assert panel.numbers("λ_G") == pytest.approx([0.01 * step for step in range(1, 60, 10) for _ in range(3)])
    assert panel.column("layer")[:3] == ["0.fc", "1.fc", "2.fc"]
    assert page["Condition number κ_A of every layer, damped"].numbers("κ_A")[:3] == [100, 200, 300]
    assert page["Clip and trust region"].numbers("eigenvalues clipped") == [0.25] * 6
    assert page["Clip and trust region"].numbers("factor of the trust region") == pytest.approx(
        [1 / step for step in range(1, 61)], rel=1e-5
    )
    assert page["Seconds of a refresh"].numbers("seconds") == pytest.approx([0.01, 0.11, 0.21, 0.31, 0.41, 0.51])
    assert page["Share of A's eigenvalues that the clip raises"].numbers("clipped A") == [0.5] * 18
    assert "Share of G's eigenvalues that the clip raises" not in page.titles  # all are zero
    table = page["Layers at step 51"]
    assert table.column("layer") == [f"model.blocks.{i}.fc" for i in range(3)] and table.numbers("T") == [64] * 3
    assert table.column("κ_G") == ["≤ 5"] * 3 and table.column("clipped A") == ["50.00%"] * 3


def test_a_deep_run_shows_the_layers_with_the_largest_condition_numbers(tmp_path: Path) -> None:
    page = page_of(run_folders.natural(tmp_path / "deep", layers=300), run_folders.natural(tmp_path / "run"))
    panel = page["Condition number κ_A of every layer, damped, deep"]
    assert set(panel.column("layer")) == {f"{i}.fc" for i in range(300 - MOST_CURVES, 300)}
    assert len(panel.rows) <= MOST_ROWS and len(page["Layers at step 51, deep"].rows) == 300


def test_a_run_without_factors_and_damaged_lines_have_no_panel(tmp_path: Path) -> None:
    plain, damaged = run_folders.plain(tmp_path / "plain"), run_folders.natural(tmp_path / "damaged")
    assert not {*page_of(plain).titles} & {*TITLES}
    lines = [json.loads(line) for line in (damaged / "metrics.jsonl").read_text().splitlines()]
    damage = (3, {}, {"layers": 1}, None, {"layers": {"a": 1}})
    for line, broken in zip([one for one in lines if "kfac" in one][:-1], damage, strict=True):
        line["kfac"] = broken
    last = next(line for line in reversed(lines) if "kfac" in line)
    last["kfac"]["layers"]["model.blocks.1.fc"] = {"T": "x", "lambda_A": None, "kappa_A": "<b>", "bounds": 7}
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(damaged)
    assert page["Damping λ_A of every layer"].column("layer") == ["0.fc", "2.fc"]
    assert len(page["Layers at step 51"].rows) == 3
