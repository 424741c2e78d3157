"""Tables of facts: the summary of all runs, the resolved config, and the record of each run. Secrets are never shown."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gramian.report.panel import RUN, Panel, PanelTable
from gramian.report.privacy_panels import last_epsilon, validity
from gramian.report.run_data import RunData, number
from gramian.report.training_panels import best_evaluation

SECRET = re.compile(r"(^|_)(secret|password|passwd|credentials?|api_?key|key|auth)(_|$)", re.IGNORECASE)
"""Matches names of fields whose value is never shown."""
USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(hidden)"
ENDS = ("done", "privacy budget spent", "interrupted", "stopped")
"""Events that end a run."""
MOST_TEXT = 2000
"""Longest text of a value on the page, in characters."""


def summary_panel(runs: Sequence[RunData]) -> Panel:
    """The table on top of the page: a row for each run."""
    rows = [_summary(run) for run in runs if run.lines or run.config]
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] not in (None, "") for row in rows)]
    private = tuple(run.name for run in runs if "validation_loss" in run.not_covered)
    return Panel("Summary", "Runs", PanelTable(tuple(columns), rows), not_covered=private)


def fact_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Config and record of every run as tables of keys and values."""
    found = []
    for run in runs:
        name = f", {run.name}" if len(runs) > 1 else ""
        for title, facts in (("Config", run.config), ("Record", run.record)):
            rows = [{"key": key, "value": value} for key, value in flat(facts)]
            if rows:
                found.append(Panel("Config and record", title + name, PanelTable(("key", "value"), rows), run=run.name))
    return found


def flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as text) of nested mappings; values of fields that name a secret are replaced."""
    for key, value in facts.items():
        name = f"{before}{key}"
        if SECRET.search(str(key)):
            yield name, HIDDEN
        elif isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else _text(value)
            yield name, USER_IN_ADDRESS.sub(f"{HIDDEN}@", text)[:MOST_TEXT]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return "none" if value is None or value == {} else str(value)


def _summary(run: RunData) -> dict[str, Any]:
    best = best_evaluation(run) or {}
    steps = [line["step"] for line in run.lines if isinstance(line.get("step"), int)]
    times = [line["time"] for line in run.lines if isinstance(line.get("time"), Mapping)]
    speeds = [value for one in times if (value := number(one.get("tokens_per_second"))) is not None]
    memory = [value for one in times if (value := number(one.get("memory_gib"))) is not None]
    ends = [str(event["event"]) for event in run.events if event["event"] in ENDS]
    valid = validity(run).partition(":")[0] if run.is_private else ""
    return {
        RUN: run.name,
        "steps": max(steps, default=None),
        "of": number(run.option("run", "steps")),
        "parameters": number(run.record.get("parameters")),
        "best validation loss": number(best.get("validation_loss")),
        "at step": number(best.get("step")),
        "perplexity": number(best.get("validation_perplexity")),
        "ε": last_epsilon(run),
        "ε is": valid,
        "tokens per second": statistics.median(speeds) if speeds else None,
        "peak memory (GiB)": max(memory, default=None),
        "ended": ends[-1] if ends else "",
    }
