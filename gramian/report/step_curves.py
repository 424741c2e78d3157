"""Panels of curves over the steps: collect fields from the metrics of all runs, thin them, and draw them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gramian.report.chart_specs import TAKEN_BACK, Reference, curves_over_steps, step_legend
from gramian.report.panel import RUN, Panel, PanelTable
from gramian.report.run_data import Line, RunData, number
from gramian.report.thinning import thin

Getter = Callable[[Line], Any]
"""Function from a line of metrics.jsonl to the value of a curve; anything but a number: no value."""


def field(name: str) -> Getter:
    """Getter of a field at the top level of a line."""
    return lambda line: line.get(name)


def timed(name: str) -> Getter:
    """Getter of a field that depends on the clock, under "time"."""
    return nested("time", name)


def nested(outer: str, name: str) -> Getter:
    """Getter of a field inside of an object, such as "firing" of "spikes"."""

    def get(line: Line) -> Any:
        inside = line.get(outer)
        return inside.get(name) if isinstance(inside, Mapping) else None

    return get


def step_panel(
    runs: Sequence[RunData],
    most: int,
    section: str,
    title: str,
    getters: Mapping[str, Getter],
    *,
    axis: str,
    sources: Sequence[str] = (),
    note: str = "",
    log: bool = False,
    percent: bool = False,
    references: Sequence[Reference] = (),
) -> Panel | None:
    """A panel of curves over the steps; None if no run has any of the values.

    Args:
        runs: all runs of the page.
        most: largest number of rows for each run.
        section: heading of the panel's section.
        title: title of the panel.
        getters: {name of the curve: its values}.
        axis: title of the y axis.
        sources: names of the numbers of metrics.jsonl behind the curves; if a private run lists one of them as not covered
            by ε, the panel says so.
        note: sentences below the title.
        log: whether the y axis is logarithmic.
        percent: whether values are fractions, shown as per cent.
        references: horizontal lines.
    """
    rows: list[Mapping[str, Any]] = []
    taken_back = False
    for run in runs:
        found = rows_of(run, getters)
        taken_back = taken_back or any(TAKEN_BACK in row for row in found)
        rows += [{RUN: run.name, **row} for row in thin(found, list(getters), most)]
    shown = [name for name in getters if any(number(row.get(name)) is not None for row in rows)]
    if not shown:
        return None
    names = [run.name for run in runs]
    spec = curves_over_steps(
        shown,
        names,
        len(rows),
        last_step(runs),
        title=axis,
        log=log,
        percent=percent,
        references=references,
        taken_back=taken_back,
    )
    columns = (*([RUN] if len(runs) > 1 else []), "step", *shown, *([TAKEN_BACK] if taken_back else []))
    not_covered = tuple(run.name for run in runs if run.not_covered & set(sources))
    lines = [f"{one.label.capitalize()} of {one.run}: {one.value:.5g}." if len(runs) > 1 else "" for one in references]
    text = " ".join(part for part in (note, *lines) if part)
    legend = step_legend(shown, names)
    return Panel(section, title, PanelTable(columns, rows), spec, legend, text, not_covered)


def last_step(runs: Sequence[RunData]) -> int:
    """The last step that any run logged; all charts over steps have the same axis."""
    return max((line["step"] for run in runs for line in run.lines if isinstance(line["step"], int)), default=1)


def rows_of(run: RunData, getters: Mapping[str, Getter]) -> list[dict[str, Any]]:
    """One row per (step, attempt) with at least one value: those of a training step and of its evaluation are joined."""
    found: dict[tuple[int, Any], dict[str, Any]] = {}
    for place, line in enumerate(run.lines):
        values = {}
        for name, get in getters.items():
            value = get(line)
            if value is not None and (value := number(value)) is not None:
                values[name] = value
        step = line.get("step")
        if not values or not isinstance(step, int):
            continue
        attempt = line.get("attempt")
        row = found.setdefault((step, attempt if isinstance(attempt, int) else None), {"step": step})
        row.update(values)
        if place in run.taken_back:
            row[TAKEN_BACK] = "yes"
    return sorted(found.values(), key=lambda row: int(row["step"]))
