"""The table of a run's events, from which every chart draws its rules and marks."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gramian.report.panel import RUN, Panel, PanelTable
from gramian.report.run_data import RunData

FAULTS = (
    "rollback", "stopped", "data_worker_died", "checkpoint_failed", "checkpoint_lost", "last_state_lost", "report_failed",
    "last_state_not_finite", "interrupted",
)  # fmt: skip
"""Events that are drawn as a rule in the colour of faults."""
ADVICE = ("advice", "unhealthy", "data_starved", "temperature_stuck", "features_off", "teacher_far", "fewer_snapshots")
"""Events that are drawn as a rule in the colour of warnings; all others are small triangles."""
TEXTS = ("text", "reason", "error", "problem", "problems", "report", "folder", "plan")
"""Fields of an event that say what happened."""
MOST = 400
"""Largest number of events of a run on the page; faults and advice come first, then the latest of the others."""


def event_panel(runs: Sequence[RunData]) -> Panel | None:
    """The events of all runs as a table; None if there are none."""
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        return None
    columns = (*([RUN] if len(runs) > 1 else []), "step", "event", "what", "mark", "clock (UTC)", "ε")
    columns = columns if any(row["ε"] for row in rows) else columns[:-1]
    note = "On the curves: red dashed lines are faults, orange ones advice, triangles at the bottom checkpoints and the rest."
    private = tuple(dict.fromkeys(row[RUN] for row in rows if row["ε"]))
    return Panel("Events", "Events", PanelTable(columns, rows), note=note, not_covered=private)


def _rows(run: RunData) -> list[dict[str, Any]]:
    shown = [event for event in run.events if event.get("event") != "plans"]
    if len(shown) > MOST:
        order = sorted(range(len(shown)), key=lambda place: (_mark(shown[place]) == "note", -place))[:MOST]
        shown = [shown[place] for place in sorted(order)]
    return [
        {
            RUN: run.name,
            "step": _step(event),
            "event": str(event["event"]).replace("_", " "),
            "what": _what(event),
            "mark": _mark(event),
            "clock (UTC)": _clock(event.get("clock")),
            "ε": "not covered by ε" if event.get("covered_by_epsilon") is False else "",
        }
        for event in shown
    ]


def _mark(event: Mapping[str, Any]) -> str:
    return "fault" if event["event"] in FAULTS else "advice" if event["event"] in ADVICE else "note"


def _step(event: Mapping[str, Any]) -> int | None:
    """The step at which an event happened; of a rollback that from which it went back."""
    step = event.get("from") if event["event"] == "rollback" else event.get("step")
    return step if isinstance(step, int) else None


def _what(event: Mapping[str, Any]) -> str:
    parts = []
    if event["event"] == "rollback":
        parts.append(f"back to step {event.get('to')}; batches left out: {event.get('skipped')}")
    if event["event"] == "checkpoint_written" and event.get("best"):
        parts.append("best so far")
    shares = event.get("share_of_time_by_interval")
    if isinstance(shares, Mapping):
        parts.append(
            ", ".join(f"{share:.1%} every {n} steps" for n, share in shares.items() if isinstance(share, float))
        )
    for name in TEXTS:
        value = event.get(name)
        if value:
            parts.append("; ".join(map(str, value)) if isinstance(value, list) else str(value))
    return "; ".join(parts)[:600]


def _clock(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(seconds)))
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
