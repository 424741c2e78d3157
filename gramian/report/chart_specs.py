"""Vega-Lite specifications of the page's charts: curves over steps, curves of any kind, and heat maps.

A chart reads its rows from the data set "table", the panel's table, and events from the data set "events". Colours are CSS
variables, so that a page follows the theme without being drawn again. The parameter "hidden" has the runs that are hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramian.report.panel import RUN, LegendEntry, Spec

COLOURS = 8
"""Number of colours `--c0` … of the style sheet, those of Okabe and Ito; further runs and curves begin again."""
HEIGHT = 240
HOVERED = 240
"""About how many points of a chart have a tooltip."""
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
LOG_AXIS: Spec = {
    "labelOverlap": "greedy",
    "gridOpacity": {
        "condition": {"test": "abs(log(datum.value)/LN10 - round(log(datum.value)/LN10)) < 1e-6", "value": 1},
        "value": 0,
    },
}
"""Style of a logarithmic axis: grid lines at powers of ten alone."""
NOT_HIDDEN = f"indexof(hidden, datum.{RUN}) < 0"
TAKEN_BACK = "taken back"
"""Column that is "yes" for a step that a rollback took back."""


@dataclass(frozen=True)
class Reference:
    """A horizontal line of a chart, such as a clip norm or the loss of a teacher."""

    run: str
    label: str
    value: float


def colour(index: int) -> str:
    """CSS colour number `index` of runs and curves."""
    return f"var(--c{index % COLOURS})"


def step_legend(fields: Sequence[str], runs: Sequence[str]) -> tuple[LegendEntry, ...]:
    """Legend of `curves_over_steps`: a colour per field or, with several runs, dashes; empty for a single field."""
    if len(fields) < 2:
        return ()
    if len(runs) == 1:
        return tuple(LegendEntry(name, colour(i)) for i, name in enumerate(fields))
    return tuple(LegendEntry(name, "var(--ink)", DASHES[i % len(DASHES)]) for i, name in enumerate(fields))


def curves_over_steps(
    fields: Sequence[str],
    runs: Sequence[str],
    rows: int,
    last: int,
    *,
    title: str,
    log: bool = False,
    percent: bool = False,
    references: Sequence[Reference] = (),
    taken_back: bool = False,
) -> Spec:
    """Curves of one or more fields over the step, with the events of the runs as rules and marks.

    With one run, colours tell the fields apart; with several, colours tell runs and dashes tell fields.

    Args:
        fields: columns of the table to draw.
        runs: names of all runs of the page.
        rows: number of rows of the table, which decides how many points get a tooltip.
        last: last step of the axis.
        title: title of the y axis.
        log: whether the y axis is logarithmic; values that are not positive are then left out.
        percent: whether values are fractions, shown as per cent.
        references: horizontal lines.
        taken_back: whether the table has the column "taken back", whose points are drawn as small circles.
    """
    several = len(runs) > 1
    axis = {"title": title, **({"format": "%"} if percent else {}), **(LOG_AXIS if log else {})}
    scale = {"type": "log"} if log else {"zero": False}
    y = {"field": "value", "type": "quantitative", "axis": axis, "scale": scale}
    kept = [{"filter": f"datum['{TAKEN_BACK}'] != 'yes'"}] if taken_back else []
    shown = [
        {"fold": list(fields), "as": ["curve", "value"]},
        {"filter": "isValid(datum.value)" + (" && datum.value > 0" if log else "")},
    ]
    every = max(1, -(-rows * len(fields) // HOVERED))
    tooltip = [
        *([{"field": RUN}] if several else []),
        {"field": "step", "type": "quantitative", "format": ",d"},
        {"field": "curve", "title": "curve"},
        {"field": "value", "type": "quantitative", "format": ".2%" if percent else ".5~g"},
    ]
    layers: list[Spec] = [
        *_event_layers(several),
        {
            "transform": [*kept, *shown],
            "mark": {"type": "line", "strokeWidth": 1.6, "clip": True},
            "encoding": {"y": y, **_series(fields, runs)},
        },
    ]
    if taken_back:
        back = [{"filter": f"datum['{TAKEN_BACK}'] == 'yes'"}]
        mark = {"type": "point", "size": 14, "opacity": 0.6, "stroke": "var(--muted)"}
        layers.append({"transform": [*back, *shown], "mark": mark, "encoding": {"y": y, "tooltip": tooltip}})
    if references:
        layers += _reference_layers(references, several, y)
    layers.append(
        {
            "transform": [*shown, {"window": [{"op": "row_number", "as": "place"}]}, _nth(every)],
            "mark": {"type": "point", "opacity": 0, "size": 90, "filled": True, "tooltip": True},
            "encoding": {"y": y, "tooltip": tooltip},
        }
    )
    spec: Spec = {
        "width": "container",
        "height": HEIGHT,
        "data": {"name": "table"},
        "encoding": {"x": _step_axis(last)},
    }
    if several:
        spec["params"] = [{"name": "hidden", "value": []}]
        for layer in layers:
            layer["transform"] = [{"filter": NOT_HIDDEN}, *layer.get("transform", [])]
    return {**spec, "layer": layers}


def curves(x: str, y: str, group: str, groups: Sequence[str], *, log: str = "", points: bool = False) -> Spec:
    """Curves of column `y` over column `x`, one for each value of column `group`, with a tooltip at every point.

    Args:
        x: column of the horizontal axis.
        y: column of the vertical axis.
        group: column that tells the curves apart.
        groups: its values, in the order of their colours.
        log: the logarithmic axes: "", "x", "y" or "xy".
        points: whether points are drawn, too.
    """
    axes: dict[str, Spec] = {}
    for name, column in (("x", x), ("y", y)):
        style = LOG_AXIS | {"format": ".0e"} if name in log else {}
        scale = {"type": "log"} if name in log else {"zero": False}
        axes[name] = {"field": column, "type": "quantitative", "scale": scale, "axis": style}
    tooltip: list[Spec] = [
        {"field": group},
        *({"field": name, "type": "quantitative", "format": ".4~g"} for name in (x, y)),
    ]
    mark = {"type": "line", "strokeWidth": 1.6, **({"point": {"size": 28}} if points else {})}
    layers = [
        {"mark": mark, "encoding": {"y": axes["y"], "color": _nominal(group, groups), "detail": {"field": group}}},
        {
            "mark": {"type": "point", "opacity": 0, "size": 90, "filled": True, "tooltip": True},
            "encoding": {"y": axes["y"], "tooltip": tooltip},
        },
    ]
    encoding = {"x": axes["x"]}
    return {
        "width": "container", "height": HEIGHT, "data": {"name": "table"}, "encoding": encoding, "layer": layers,
    }  # fmt: skip


def shaded(spec: Spec, column: str) -> Spec:
    """Colour the curves of `curves` by a column of whole numbers, on the map cividis, in place of a colour per group."""
    spec["layer"][0]["encoding"]["color"] = {
        "field": column,
        "type": "quantitative",
        "scale": {"scheme": {"name": "cividis", "extent": [0.25, 0.85]}},
        "legend": {"orient": "top", "gradientLength": 120, "tickMinStep": 1, "format": "d"},
    }
    return spec


def whole_numbers(spec: Spec, low: int, high: int) -> Spec:
    """Label the x axis of `curves` by whole numbers from `low` to `high`, smaller ones "before" and larger ones "after"."""
    label = f"datum.value < {low} ? 'before' : datum.value > {high} ? 'after' : datum.label"
    spec["encoding"]["x"]["axis"] = {"format": "d", "tickMinStep": 1, "labelExpr": label, "labelFlush": 8}
    return spec


def norm_heat_map(value: str, clip_norm: float, lowest: float, highest: float) -> Spec:
    """Heat map of a histogram over steps, whose y axis goes from the norm `lowest` to `highest`.

    The table has the columns "from step", "to step", "norm from", "norm to" and the share `value`.
    """
    norms = {"type": "log", "nice": False, "domain": [lowest, highest]}
    y = {"field": "norm from", "type": "quantitative", "scale": norms, "title": "gradient norm", "axis": LOG_AXIS}
    columns = ("from step", "to step", "norm from", "norm to")
    steps = {"nice": False, "zero": False}
    legend = {"orient": "top", "format": "%", "gradientLength": 160, "title": "share of samples"}
    layers: list[Spec] = [
        {
            "transform": [{"filter": f"datum['{value}'] > 0"}],
            "mark": {"type": "rect", "tooltip": True},
            "encoding": {
                "x": {"field": "from step", "type": "quantitative", "title": "step", "scale": steps},
                "x2": {"field": "to step"},
                "y": y,
                "y2": {"field": "norm to"},
                "color": {
                    "field": value,
                    "type": "quantitative",
                    "scale": {"scheme": "cividis", "domainMin": 0},
                    "legend": legend,
                },
                "tooltip": [
                    *({"field": name, "type": "quantitative", "format": ".4~g"} for name in columns),
                    {"field": value, "type": "quantitative", "format": ".2%"},
                ],
            },
        },
        {
            "data": {"values": [{"value": clip_norm, "label": f"clip norm {clip_norm:g}"}]},
            "mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2, "stroke": "var(--bad)", "tooltip": True},
            "encoding": {"y": {"field": "value", "type": "quantitative"}, "tooltip": {"field": "label"}},
        },
    ]
    return {"width": "container", "height": HEIGHT, "data": {"name": "table"}, "layer": layers}


def layer_heat_map(metrics: Sequence[str], layers: int) -> Spec:
    """Heat map of layers × metrics: columns "layer", "metric", "value" and "position" (0 to 1 among the layers)."""
    above = {"orient": "top", "labelAngle": -90, "labelAlign": "left", "grid": False}
    beside = {"grid": False, "labelLimit": 130}
    number = {"field": "value", "type": "quantitative", "format": ".4~g"}
    return {
        "width": "container",
        "height": 17 * layers + 40,
        "data": {"name": "table"},
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {"field": "metric", "type": "nominal", "sort": list(metrics), "title": None, "axis": above},
            "y": {"field": "layer", "type": "nominal", "sort": None, "title": None, "axis": beside},
            "color": {
                "field": "position",
                "type": "quantitative",
                "scale": {"scheme": "cividis", "domain": [0, 1]},
                "legend": {
                    "orient": "bottom",
                    "title": "among the layers (log)",
                    "gradientLength": 160,
                },
            },
            "tooltip": [{"field": "layer"}, {"field": "metric"}, number],
        },
    }


# ---- parts of a chart ------------------------------------------------------------------------------------------------


def _step_axis(last: int) -> Spec:
    axis = {"title": "step", "format": "~s", "labelOverlap": "greedy", "labelSeparation": 8, "tickCount": 6}
    return {
        "field": "step",
        "type": "quantitative",
        "axis": axis,
        "scale": {"domain": [0, max(1, last)], "nice": False},
    }


def _nominal(field: str, values: Sequence[str]) -> Spec:
    """Colour by a column with these values; the page has the legend."""
    scale = {"domain": list(values), "range": [colour(i) for i in range(len(values))]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


def _series(fields: Sequence[str], runs: Sequence[str]) -> Mapping[str, Any]:
    """Encodings of colour and dash that tell fields and runs apart."""
    if len(runs) == 1:
        return {"color": _nominal("curve", fields)}
    scale = {"domain": list(fields), "range": [list(DASHES[i % len(DASHES)]) for i in range(len(fields))]}
    dash = {"field": "curve", "type": "nominal", "scale": scale, "legend": None}
    return {"color": _nominal(RUN, runs), "strokeDash": dash}


def _nth(every: int) -> Spec:
    """Keep one row in `every`, so that a chart does not have thousands of hidden points for its tooltips."""
    return {"filter": f"datum.place % {every} == {1 % every}"}


def _event_layers(several: bool) -> list[Spec]:
    """Events: rules over the height of the chart for what went wrong or was advised, small triangles below for the rest."""
    tooltip = [*([{"field": RUN}] if several else []), *({"field": name} for name in ("step", "event", "what", "ε"))]
    bad, advised = "datum.mark == 'fault'", "datum.mark == 'advice'"
    stroke = {"condition": {"test": bad, "value": "var(--bad)"}, "value": "var(--warn)"}
    triangle = {"type": "point", "shape": "triangle-up", "size": 26, "filled": True, "fill": "var(--muted)"}
    return [
        {
            "data": {"name": "events"},
            "transform": [{"filter": f"{bad} || {advised}"}],
            "mark": {"type": "rule", "strokeDash": [3, 3], "strokeWidth": 1.5, "tooltip": True},
            "encoding": {"stroke": stroke, "tooltip": tooltip},
        },
        {
            "data": {"name": "events"},
            "transform": [{"filter": "datum.mark == 'note'"}],
            "mark": {**triangle, "tooltip": True},
            "encoding": {"y": {"value": HEIGHT - 4}, "tooltip": tooltip},
        },
    ]


def _reference_layers(references: Sequence[Reference], several: bool, y: Spec) -> list[Spec]:
    """Dashed horizontal lines with their labels, on a halo in the colour of the panel."""
    values = [{RUN: one.run, "curve": one.label, "value": one.value} for one in references]
    tooltip = [*([{"field": RUN}] if several else []), {"field": "curve"}, {"field": "value", "type": "quantitative"}]
    rule = {"type": "rule", "strokeDash": [8, 4], "strokeWidth": 1.2, "stroke": "var(--ink)", "tooltip": True}
    text = {"type": "text", "align": "right", "dx": -4, "dy": -8, "fill": "var(--ink)", "fontSize": 11}
    halo = {**text, "stroke": "var(--panel)", "strokeWidth": 4, "strokeJoin": "round"}
    label = {"x": {"value": "width"}, "y": y, "text": {"field": "curve"}}
    return [
        {"data": {"values": values}, "mark": rule, "encoding": {"x": None, "y": y, "tooltip": tooltip}},
        {"data": {"values": values}, "mark": halo, "encoding": label},
        {"data": {"values": values}, "mark": text, "encoding": label},
    ]
