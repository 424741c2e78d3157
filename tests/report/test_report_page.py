"""The page of a report: panels, tables with the numbers of the files, labels, escaping, size, and what it loads."""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from gramian.cli import main
from gramian.report import report_file, write_report
from gramian.report.privacy_panels import privacy_panels
from gramian.report.report_file import MOST_POINTS
from gramian.report.run_data import read_run
from tests.report import run_folders
from tests.report.page_parts import Page, fields_of, marks_of
from tests.report.run_folders import eval_line, step_line, write_run

OF_EVENTS = {"event", "what", "mark", "ε", "step", "run"}
MADE_BY_TRANSFORMS = {"curve", "value", "label", "place"}


def page_of(folder: Path, *folders: Path) -> Page:
    return Page.read(write_report([folder, *folders], folder.parent / "page.html"))


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    teacher = run_folders.plain(base / "teacher")
    run_folders.curved(teacher / "curvature")
    return [teacher, run_folders.distilled(base / "goose", teacher), run_folders.private(base / "private")]


@pytest.fixture(scope="module")
def page(all_runs: list[Path]) -> Page:
    return page_of(*all_runs)


def test_every_kind_of_panel_is_there(page: Page) -> None:
    expected = {
        "Runs", "Loss", "Perplexity", "Bits per byte", "Terms of the loss", "Entropy at temperature T", "Temperature",
        "Agreement with the teacher", "Learning rate", "Gradient norm", "Share of clipped gradients", "Channels that fire",
        "Entropy of a channel", "ε over steps", "What ε covers", "Per-sample gradient norms before clipping, private",
        "Per-sample gradient norms after clipping, private", "Throughput", "Peak memory", "Waiting for data, and evaluation",
        "Events", "Eigenvalues of every layer, teacher", "Effective rank along the depth, teacher",
        "Condition number along the depth, teacher", "Capacity (effective dimension) along the depth, teacher",
        "Layers and metrics, teacher", "Spectral density, teacher", "Device memory, teacher", "Clipping, private",
        "Config, goose", "Record, private",
    }  # fmt: skip
    assert expected <= set(page.titles)


def test_every_chart_has_marks_a_label_and_a_table_with_its_fields(page: Page) -> None:
    charts = [panel for panel in page.panels if panel.spec is not None]
    assert len(charts) >= 20
    for panel in charts:
        assert panel.spec is not None and marks_of(panel.spec) and panel.label.startswith(panel.title)
        assert panel.rows and all(len(row) == len(panel.columns) for row in panel.rows), panel.title
        assert fields_of(panel.spec) - OF_EVENTS - MADE_BY_TRANSFORMS <= set(panel.columns), panel.title
        assert panel.spec["data"] == {"name": "table"} and panel.spec["width"] == "container"


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    page = page_of(run_folders.plain(tmp_path / "run"))
    sections = [text for level, text in page.headings if level == 2]
    assert "Loss" in sections
    assert not {"Distillation", "Privacy", "Spike health", "Curvature"} & set(sections)
    assert "Loss scale" not in page.titles and all(panel.rows for panel in page.panels)


def test_the_table_of_the_loss_has_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    folder = run_folders.plain(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = page_of(folder)["Loss"]
    for column, name in (("training", "loss"), ("validation", "validation_loss")):
        expected = sorted((line["step"], float(f"{line[name]:.6g}")) for line in lines if name in line)
        rows = [row for row in found.rows if row[found.columns.index(column)]]
        steps = [int(row[found.columns.index("step")]) for row in rows]
        assert sorted(zip(steps, found.numbers(column), strict=True)) == expected
    bits = page_of(folder)["Bits per byte"].numbers("training")
    assert bits == pytest.approx([x / 2 for x in found.numbers("training")], rel=1e-5)


def test_steps_that_a_rollback_took_back_say_so(tmp_path: Path) -> None:
    found = page_of(run_folders.plain(tmp_path / "run"))["Loss"]
    back = [
        int(row[found.columns.index("step")]) for row in found.rows if row[found.columns.index("taken back")] == "yes"
    ]
    assert back == [31, 32, 33, 34, 35]


def test_events_are_on_the_curves_and_in_their_table(tmp_path: Path) -> None:
    page = page_of(run_folders.plain(tmp_path / "run"))
    table = page["Events"]
    assert list(zip(table.column("step"), table.column("event"), table.column("mark"), strict=True)) == [
        ("20", "checkpoint written", "note"), ("35", "rollback", "fault"), ("50", "advice", "advice"), ("60", "done", "note"),
    ]  # fmt: skip
    assert "back to step 30" in table.column("what")[1] and "loss spike" in table.column("what")[1]
    spec = page["Loss"].spec
    assert spec is not None
    assert [layer["mark"]["type"] for layer in spec["layer"] if layer.get("data") == {"name": "events"}] == [
        "rule",
        "point",
    ]


def test_clip_norm_teacher_and_target_are_reference_lines(page: Page) -> None:
    def references(title: str) -> dict[str, float]:
        spec = page[title].spec
        assert spec is not None
        rules = [layer["data"]["values"] for layer in spec["layer"] if "values" in layer.get("data", {})]
        return {f"{one['run']} {one['curve']}": one["value"] for one in rules[0]}

    assert references("Gradient norm") == {"teacher clip norm": 1.0, "goose clip norm": 1.0}
    assert references("ε over steps") == {"private target ε": 8.0}
    best = 2.1 + 3 * math.exp(-3)
    assert references("Loss") == {"goose teacher": pytest.approx(best)}
    assert references("Perplexity") == {"goose teacher": pytest.approx(math.exp(best))}
    assert references("Bits per byte") == {"goose teacher": pytest.approx(best / 2)}


# ---- privacy ---------------------------------------------------------------------------------------------------------


def test_what_epsilon_does_not_cover_is_labelled(tmp_path: Path) -> None:
    page = page_of(run_folders.private(tmp_path / "run"))
    labelled = {panel.title for panel in page.panels if panel.badge}
    assert all(panel.badge == "not covered by ε" for panel in page.panels if panel.badge)
    hidden = {
        "Runs",
        "Loss",
        "Perplexity",
        "Bits per byte",
        "Share of clipped gradients",
        "Throughput",
        "Peak memory",
        "Waiting for data, and evaluation",
        "Clipping",
        "Events",
    }
    norms = {f"Per-sample gradient norms {when} clipping" for when in ("before", "after")}
    assert labelled == hidden | norms
    assert page["Events"].column("ε") == ["not covered by ε"]
    assert page["ε over steps"].numbers("ε") == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("reasons", ([], ["the loss scaler left out steps"]))
def test_the_page_says_whether_epsilon_is_valid(tmp_path: Path, reasons: list[str]) -> None:
    folder = run_folders.private(tmp_path / "run")
    record = json.loads((folder / "record.json").read_text())
    record["privacy"] |= {"epsilon": "not valid" if reasons else "as accounted", "epsilon_not_valid_because": reasons}
    (folder / "record.json").write_text(json.dumps(record))
    text = write_report([folder], tmp_path / "page.html").read_text()
    assert ("ε is valid as accounted" in text) == (not reasons)
    assert ("ε is not valid: the loss scaler left out steps" in text) == bool(reasons)


def test_norms_before_and_after_clipping_have_all_samples(tmp_path: Path) -> None:
    page = page_of(run_folders.private(tmp_path / "run"))
    samples = sum(run_folders.COUNTS) * 30
    before, after = (page[f"Per-sample gradient norms {when} clipping"] for when in ("before", "after"))
    assert sum(before.numbers("samples before clipping")) == sum(after.numbers("samples after clipping")) == samples
    assert max(before.numbers("norm to")) == pytest.approx(2.0)
    assert max(after.numbers("norm to")) == pytest.approx(1.0), "no sample is above the clip norm"
    assert page["Share of clipped gradients"].numbers("clipped samples") == pytest.approx([0.7] * 30)


@pytest.mark.parametrize("kind", ("plain", "private"))
def test_only_its_owner_reads_the_page_of_a_private_run(tmp_path: Path, kind: str) -> None:
    folder = getattr(run_folders, kind)(tmp_path / "run")
    (tmp_path / "page.html").write_text("an earlier page that everyone reads")
    mode = stat.S_IMODE(write_report([folder], tmp_path / "page.html").stat().st_mode)
    assert mode == 0o600 if kind == "private" else mode & 0o044


def test_secrets_are_never_on_the_page(tmp_path: Path) -> None:
    folder = run_folders.private(
        tmp_path / "run", tracker={"api_key": "abc-123", "address": "https://me:hunter2@host/x"}
    )
    (folder / "releases.json").write_text('{"begun": 987654321}')
    text = write_report([folder], tmp_path / "page.html").read_text()
    assert not [secret for secret in ("abc-123", "hunter2", "987654321") if secret in text]
    assert "(hidden)" in text


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_several_runs_share_charts_and_have_a_button_each(page: Page) -> None:
    assert [button["data-run"] for button in page.buttons if button.get("class") == "run"] == [
        "teacher",
        "goose",
        "private",
    ]
    assert all(button["aria-pressed"] == "true" for button in page.buttons if button.get("class") == "run")
    loss = page["Loss"]
    assert set(loss.column("run")) == {"teacher", "goose", "private"}
    assert loss.spec is not None and loss.spec["params"] == [{"name": "hidden", "value": []}]
    line = next(layer for layer in loss.spec["layer"] if layer["mark"]["type"] == "line")
    assert line["encoding"]["color"]["scale"]["domain"] == ["teacher", "goose", "private"]
    assert len(set(line["encoding"]["color"]["scale"]["range"])) == 3


def test_the_summary_has_a_row_for_each_run(page: Page) -> None:
    table = page["Runs"]
    assert table.column("run") == ["teacher", "goose", "private"]
    assert table.column("steps") == ["60", "30", "60"] and table.column("ε") == ["", "", "6"]
    assert table.numbers("best validation loss")[0] == pytest.approx(2.1 + 3 * math.exp(-3), rel=1e-5)


def test_runs_of_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    one, other = run_folders.plain(tmp_path / "a" / "run"), run_folders.plain(tmp_path / "b" / "run")
    assert page_of(one, other)["Runs"].column("run") == ["run", "run (2)"]


# ---- the page itself -------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_and_nothing_may_be(all_runs: list[Path], page: Page) -> None:
    assert [target for target in page.loaded if not target.startswith("#")] == []
    text = (all_runs[0].parent / "page.html").read_text()
    assert "default-src 'none'" in text and "sourceMappingURL" not in text and "@import" not in text


def test_headings_are_in_order_and_the_page_has_a_title(page: Page) -> None:
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    assert page.title == "3 runs: report"


EVIL = '<img src=x onerror=alert(1)></script><script>alert("2")</script>\u2028&'


def test_text_of_files_is_escaped_everywhere(tmp_path: Path) -> None:
    name = "<b>&run\"'"
    lines = [step_line(1, 0), eval_line(1, 0)]
    events = [{"step": 1, "event": "advice", "text": EVIL}, {"step": 1, "event": EVIL, "clock": "never"}]
    folder = write_run(tmp_path / name, lines, events, {**run_folders.RECORD, EVIL: EVIL}, run={"note": EVIL})
    other = write_run(tmp_path / "other", lines)
    text = write_report([folder, other], tmp_path / "page.html").read_text()
    page = Page(text)
    assert EVIL not in text and "<b>&run" not in text and not page.loaded[0].startswith("x")
    assert text.count("<script") == text.count("</script>"), "no text of a file opens or ends a script"
    assert text.count("<script>") == 4
    assert set(page["Events"].column("what")) == {EVIL, ""}
    assert name in page["Runs"].column("run")


def test_long_runs_are_thinned_and_keep_their_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = [step_line(step, step - 1) for step in range(1, 4_001)]
    for place, line in enumerate(lines):
        line["loss"] += math.sin(place * place)
    lines[3_333]["loss"], lines[2_222]["loss"] = 99.0, 0.001
    folder = write_run(tmp_path / "long", lines)
    for most_bytes, least, most in ((2_000_000, 700, MOST_POINTS), (980_000, 100, 500)):
        monkeypatch.setattr(report_file, "MOST_BYTES", most_bytes)
        path = write_report([folder], tmp_path / "page.html")
        found = Page.read(path)["Loss"]
        assert path.stat().st_size <= most_bytes and least < len(found.rows) <= most
        assert max(found.numbers("training")) == 99.0 and min(found.numbers("training")) == 0.001
        assert found.column("step")[0] == "1" and found.column("step")[-1] == "4000"


def test_the_library_is_small_and_brings_its_licences() -> None:
    assets = Path(write_report.__code__.co_filename).parent / "assets"
    scripts = sorted(assets.glob("*.min.js"))
    assert sum(path.stat().st_size for path in scripts) < 900_000
    for path in scripts:
        assert "Redistribution" in (assets / path.name.replace(".min.js", ".LICENSE")).read_text()
    own = (assets / "report.js").read_text()
    assert own.count("\n") < 90 and not re.search(r"fetch\(|XMLHttpRequest|https?://", own)


def test_the_command_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_folders.plain(tmp_path / "a"), run_folders.curved(tmp_path / "b")]
    assert main(["report", "a"]) == 0 and (folders[0] / "report.html").is_file()
    assert main(["report", "a", "b"]) == 0 and "report.html" in capsys.readouterr().out
    assert "Eigenvalues of every layer, b" in Page.read(tmp_path / "report.html").titles
    assert main(["report", "a", "--out", "c.html"]) == 0 and (tmp_path / "c.html").is_file()


def test_a_private_run_whose_draws_were_all_empty_has_a_page(tmp_path: Path) -> None:
    norms = {**run_folders.NORMS, "counts": [0] * len(run_folders.COUNTS)}
    lines = [step_line(step, step - 1, sample_norms=norms, not_covered_by_epsilon=["loss"]) for step in range(1, 4)]
    page = page_of(write_run(tmp_path / "run", lines, privacy={"noise_multiplier": 1.0}))
    assert "Loss" in page.titles and not any("norms" in title for title in page.titles)


@pytest.mark.parametrize(
    "receipt",
    [
        {
            "audit": {"findings": {"noise": {"passed": True, "says": "as accounted"}}},
            "public_key": "ab",
            "epsilon": 1.5,
        },
        {"audit": {"findings": [1]}, "ledger": {"head": "cd", "releases": None}, "weights": "none"},
        {"audit": {"findings": {"noise": 3}}, "epsilon": None, "ledger": []},
    ],
)
def test_a_receipt_is_a_table_and_a_damaged_one_no_error(receipt: dict[str, Any], tmp_path: Path) -> None:
    folder = run_folders.private(tmp_path / "run")
    (folder / "receipt.json").write_text(json.dumps(receipt))
    (panel, *_) = [*(p for p in privacy_panels([read_run(folder, "run")], 100) if p.title == "Audit and receipt"), None]
    rows = [] if panel is None else [(row["what"], row["result"], row["value"]) for row in panel.table.rows]
    wanted = [("noise", "ok", "as accounted"), ("ε for all of them", "signed", 1.5), ("public key", "signed", "ab")]
    assert rows == (wanted if "public_key" in receipt else [("hash of the ledger", "signed", "cd")] if rows else [])
