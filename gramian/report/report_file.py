"""Write the report of one or more runs: one self-contained HTML page of at most 2 MB."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from gramian.core.durable_files import replace_file
from gramian.core.errors import GramianError
from gramian.report.curvature_panels import curvature_panels
from gramian.report.event_table import event_panel
from gramian.report.fact_tables import fact_panels, summary_panel
from gramian.report.kfac_panels import kfac_panels
from gramian.report.page import page_html
from gramian.report.plan_tables import plan_panels
from gramian.report.privacy_panels import privacy_panels
from gramian.report.run_data import RunData, read_runs
from gramian.report.training_panels import speed_panels, training_panels
from gramian.train.state.run_folder import JsonLines

FILE = "report.html"
MOST_BYTES = 2_000_000
"""Largest page; curves are thinned further until it fits."""
MOST_POINTS = 1000
"""Largest number of rows of one run in the table of a curve."""
LEAST_POINTS = 30


def write_report(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Read run folders and write their report, as in `write_report(["runs/a", "runs/b"], "report.html")`; returns its path.

    The file has mode 0600 if one of the runs is private: it shows numbers that ε does not cover.

    Raises:
        GramianError: if a folder holds no run, or the page cannot be written.
    """
    runs = read_runs([Path(folder) for folder in folders])
    content = report_page(runs).encode("utf-8", "replace")
    path = Path(out)
    try:
        replace_file(path, content, private=any(run.is_private for run in runs))
    except (OSError, ValueError) as problem:  # ValueError: of a name with a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"argument --out: {path}: {why}; expected a file that can be written") from None
    return path


def report_page(runs: Sequence[RunData]) -> str:
    """The page of these runs as text; its curves have so many points that it has at most `MOST_BYTES` bytes."""
    title = f"{runs[0].name}: report" if len(runs) == 1 else f"{len(runs)} runs: report"
    problems = [line for run in runs for line in run.problems]
    fixed = [*curvature_panels(runs), *plan_panels(runs), *fact_panels(runs)]
    events, points = event_panel(runs), MOST_POINTS
    while True:
        panels = [
            summary_panel(runs),
            *training_panels(runs, points),
            *privacy_panels(runs, points),
            *kfac_panels(runs, points),
            *speed_panels(runs, points),
            *([events] if events else []),
            *fixed,
        ]
        page = page_html(title, [run.name for run in runs], [panel for panel in panels if panel.table.rows], problems)
        if len(page.encode("utf-8", "replace")) <= MOST_BYTES or points <= LEAST_POINTS:
            return page
        points //= 2


def write_run_report(folder: Path, *, private: bool) -> str | None:
    """Write `report.html` into the folder of a run that has ended, however it ended; never raises an `Exception`.

    A folder without metrics gets no report. A failure is an event "report_failed" in the run's events.jsonl.

    Args:
        folder: the run folder.
        private: whether the run is private, so that a new events.jsonl would have mode 0600.

    Returns:
        One line about the failure; None if the report was written, or there was nothing to report.
    """
    try:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            write_report([folder], folder / FILE)
        return None
    except Exception as problem:
        line = f"the report was not written: {type(problem).__name__}: {problem}".partition("\n")[0]
    with contextlib.suppress(Exception):
        events = JsonLines(folder / "events.jsonl", private=private)
        try:
            events.write(
                {"clock": round(time.time(), 3), "event": "report_failed", "error": line, "process": os.getpid()}
            )
        finally:
            events.close()
    return line
