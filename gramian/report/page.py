"""The HTML page: sections of panels, the plotting library, style and script, all in one text that loads nothing."""

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from gramian.core.version import VERSION
from gramian.report.chart_specs import colour
from gramian.report.panel import RUN, LegendEntry, Panel, PanelTable, Spec

LIBRARY = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content security policy of the page: whatever is on it, a browser loads nothing and compiles no text of a chart."""
OPEN_TABLES = ("Summary",)
"""Sections whose tables are shown without a fold."""


def page_html(title: str, runs: Sequence[str], panels: Sequence[Panel], problems: Sequence[str]) -> str:
    """The page as text; everything that comes from files is escaped.

    Args:
        title: title of the page.
        runs: names of the runs; with more than one, buttons hide and show them.
        panels: in the order of the page; neighbours with one section are under one heading.
        problems: lines about files that could not be read.
    """
    sections: dict[str, list[Panel]] = {}
    for panel in panels:
        sections.setdefault(panel.section, []).append(panel)
    several = len(runs) > 1
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>{_asset('report.css')}</style></head>",
        '<body><a class="skip" href="#content">Skip to the charts</a>',
        f'<header><h1>{text(title)}</h1><button type="button" id="theme" aria-pressed="false">Dark</button></header>',
        *(_run_buttons(runs) if several else []),
        *_contents(sections),
        '<main id="content">',
        *(f'<p class="problem" role="note">{text(line)}</p>' for line in problems),
    ]
    number = 0
    for section, members in sections.items():
        parts.append(f'<section id="{_anchor(section)}"><h2>{text(section)}</h2><div class="panels">')
        for panel in members:
            parts += _panel(panel, f"panel-{number}", several)
            number += 1
        parts.append("</div></section>")
    parts.append(f"</main><footer>Written by gramian {VERSION}; this page loads nothing.</footer>")
    parts += [f"<script>{_asset(name)}</script>" for name in (*LIBRARY, "report.js")]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def text(value: object) -> str:
    """`value` as text of an HTML page, also inside an attribute."""
    return html.escape(str(value), quote=True)


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: no character begins a tag or ends the script."""
    found = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def cell(value: Any) -> str:
    """A number or text as the content of a cell: numbers with six significant digits, whole numbers exactly."""
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return text(value)


# ---- parts of the page -----------------------------------------------------------------------------------------------


@cache
def _asset(name: str) -> str:
    """A file of `assets/` as text, without the comment that names a source map, which a browser might look for."""
    content = files("gramian.report").joinpath("assets", name).read_text(encoding="utf-8")
    return re.sub(r"^//# sourceMappingURL=.*$", "", content, flags=re.MULTILINE)


def _anchor(section: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")


def _contents(sections: Iterable[str]) -> Iterator[str]:
    yield '<nav aria-label="Sections"><ul>'
    for section in sections:
        yield f'<li><a href="#{_anchor(section)}">{text(section)}</a></li>'
    yield "</ul></nav>"


def _run_buttons(runs: Sequence[str]) -> Iterator[str]:
    yield '<div class="runs" role="group" aria-label="Runs that are shown">'
    for place, name in enumerate(runs):
        swatch = f'<span class="swatch" style="background:{colour(place)}"></span>'
        yield f'<button type="button" class="run" aria-pressed="true" data-run="{text(name)}">{swatch}{text(name)}</button>'
    yield "</div>"


def _panel(panel: Panel, key: str, several: bool) -> Iterator[str]:
    run = f' data-run="{text(panel.run)}"' if panel.run is not None and several else ""
    wide = "" if panel.chart is not None else ' class="wide"'
    yield f'<article id="{key}"{wide}{run}><h3>{text(panel.title)}{_badge(panel, several)}</h3>'
    if panel.note:
        yield f'<p class="note">{text(panel.note)}</p>'
    label = f"{panel.title}: chart of the table below it"
    if panel.chart is not None:
        yield from _legend(panel.legend)
        spec: Spec = {"description": label, **panel.chart}
        yield f'<div class="chart" role="img" aria-label="{text(label)}" style="min-height:{panel.height}px"></div>'
        yield f'<script type="application/json" class="spec">{script_json(spec)}</script>'
    fold = panel.section not in OPEN_TABLES
    if fold:
        opened = " open" if panel.chart is None and len(panel.table.rows) <= 12 else ""
        yield f"<details{opened}><summary>Table, {len(panel.table.rows):,} rows</summary>"
    yield from _table(
        panel.table, panel.title, "summary" if not fold else "events" if panel.section == "Events" else ""
    )
    if fold:
        yield "</details>"
    yield "</article>"


def _legend(entries: Sequence[LegendEntry]) -> Iterator[str]:
    if entries:
        yield '<ul class="legend">'
        for one in entries:
            line = f'stroke="{one.colour}" stroke-width="3" stroke-dasharray="{" ".join(map(str, one.dash))}"'
            mark = f'<svg width="24" height="8" aria-hidden="true"><path d="M0 4h24" {line}/></svg>'
            yield f"<li>{mark}{text(one.name)}</li>"
        yield "</ul>"


def _badge(panel: Panel, several: bool) -> str:
    if not panel.not_covered:
        return ""
    whose = f" ({', '.join(panel.not_covered)})" if several and panel.run is None else ""
    return f' <span class="badge">not covered by ε{text(whose)}</span>'


def _table(table: PanelTable, title: str, kind: str) -> Iterator[str]:
    """A table in a region that scrolls; cells have no end tags, which HTML does not need and long tables would repeat."""
    numeric = {name for name in table.columns if _is_numeric(table.rows, name)}
    class_name = f' class="{kind}"' if kind else ""
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="Table of {text(title)}"><table{class_name}><thead><tr>'
    for name in table.columns:
        attribute = ' class="n"' if name in numeric else ""
        heading = f'<button type="button">{text(name)}</button>' if kind == "summary" else text(name)
        yield f'<th scope="col" data-field="{text(name)}"{attribute}>{heading}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(f"<td>{cell(row.get(name))}" for name in table.columns)
    yield "</tbody></table></div>"


def _is_numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [value for row in rows if (value := row.get(name)) is not None]
    return name != RUN and bool(values) and all(isinstance(value, int | float) for value in values)
