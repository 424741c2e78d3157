"""The parts of a page: panels, each a chart with its table, in sections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Spec = dict[str, Any]
"""A chart as a Vega-Lite specification."""
RUN = "run"
"""Column with the name of the run."""


@dataclass(frozen=True)
class LegendEntry:
    """One line of a chart's legend: a name, and the colour (CSS) and dashes of its curve."""

    name: str
    colour: str
    dash: tuple[int, ...] = (1, 0)


@dataclass(frozen=True)
class PanelTable:
    """The numbers of a panel; the chart reads its data from this table, so that both are always the same."""

    columns: tuple[str, ...]
    """Headings, which are also the names of the fields."""
    rows: Sequence[Row]
    """{heading: number, text or None}; None and missing fields are empty cells."""


@dataclass(frozen=True)
class Panel:
    """One chart and the table behind it, or a table alone."""

    section: str
    """Heading of the section that the panel stands in."""
    title: str
    table: PanelTable
    chart: Spec | None = None
    """Chart of the table; its data set is named "table". None: the table itself is shown."""
    legend: tuple[LegendEntry, ...] = ()
    """Legend of the chart's curves, if there is more than one."""
    note: str = ""
    """One or two sentences below the title."""
    not_covered: tuple[str, ...] = field(default=())
    """Names of private runs whose ε does not cover the numbers of this panel."""
    run: str | None = None
    """The run that the panel is about, which hides it; None: all runs."""
    height: int = 240
    """Least height of the chart in pixels, reserved before it is drawn."""
