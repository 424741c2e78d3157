"""Panels of K-FAC in a training run: λ, κ and clipped eigenvalues of every layer over the steps, and a table of the layers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gramian.analysis.layer_places import short_names
from gramian.report.chart_specs import COLOURS, DASHES, colour, curves
from gramian.report.panel import LegendEntry, Panel, PanelTable
from gramian.report.run_data import Line, RunData, number
from gramian.report.step_curves import field as top_level
from gramian.report.step_curves import nested, step_panel, timed

SECTION = "K-FAC"
CURVES = {
    "lambda_A": "Damping λ_A of every layer",
    "lambda_G": "Damping λ_G of every layer",
    "kappa_A": "Condition number κ_A of every layer, damped",
    "kappa_G": "Condition number κ_G of every layer, damped",
    "clip_A": "Share of A's eigenvalues that the clip raises",
    "clip_G": "Share of G's eigenvalues that the clip raises",
    "clip": "Share of the product's eigenvalues that the clip raises",
}
"""{number of a layer in metrics.jsonl: title of its panel}; panels of nothing but zeros are left out."""
SYMBOLS = {
    "lambda_A": "λ_A", "lambda_G": "λ_G", "kappa_A": "κ_A", "kappa_G": "κ_G", "clip_A": "clipped A", "clip_G": "clipped G",
    "clip": "clipped",
}  # fmt: skip
"""{number of a layer in metrics.jsonl: its column in the table}."""
MOST_CURVES = 24
"""Largest number of layers in a chart: those whose κ is largest at the last refresh; the table has all."""
MOST_ROWS = 1200
"""About the largest number of rows of a chart's table."""


def kfac_panels(runs: Sequence[RunData], points: int) -> list[Panel]:
    """Panels of all runs that have refreshed K-FAC's factors; `points`: largest number of rows of one run in a curve."""
    shares = {
        "eigenvalues clipped": nested("kfac", "clip_share"),
        "factor of the trust region": top_level("trust_region"),
    }
    note = "Of all eigenvalues those that the clip raises; and the factor by which kl_clip scales a step, 1: as it is."
    clips = step_panel(runs, points, SECTION, "Clip and trust region", shares, axis="share", note=note, percent=True)
    seconds = step_panel(
        runs, points, SECTION, "Seconds of a refresh", {"seconds": timed("refresh_seconds")}, axis="seconds",
        note="Making the factors, without the forward and backward that they are made from.",
    )  # fmt: skip
    found = [panel for panel in (clips, seconds) if panel is not None]
    for run in runs:
        refreshes = [line for index, line in enumerate(run.lines) if index not in run.taken_back and _layers(line)]
        if refreshes:
            found += _panels(run, refreshes, f", {run.name}" if len(runs) > 1 else "")
    return found


def _panels(run: RunData, refreshes: Sequence[Line], name: str) -> Iterator[Panel]:
    last = _layers(refreshes[-1])
    short = short_names([*last])
    largest = sorted(last, key=lambda layer: -max(_of(last[layer], "kappa_A"), _of(last[layer], "kappa_G")))
    shown = [layer for layer in last if layer in largest[:MOST_CURVES]]
    stride = max(1, math.ceil(len(refreshes) * len(shown) / MOST_ROWS))
    kept = [line for place, line in enumerate(reversed(refreshes)) if place % stride == 0][::-1]
    labels = [short[layer] for layer in shown]
    dashes = [DASHES[i // COLOURS % len(DASHES)] for i in range(len(labels))]
    legend = tuple(LegendEntry(label, colour(i), dashes[i]) for i, label in enumerate(labels))
    few = f" The {len(shown)} layers of {len(last)} whose κ is largest." if len(shown) < len(last) else ""
    for key, title in CURVES.items():
        share = key.startswith("clip")
        rows = [
            {"step": line["step"], "layer": short[layer], SYMBOLS[key]: value}
            for line in kept
            for layer in shown
            if (value := number(_layers(line).get(layer, {}).get(key))) is not None and (value > 0 or share)
        ]
        if any(row[SYMBOLS[key]] for row in rows):
            spec = curves("step", SYMBOLS[key], "layer", labels, log="" if share else "y", points=len(kept) < 40)
            scale = {"domain": labels, "range": [list(dash) for dash in dashes]}
            spec["layer"][0]["encoding"]["strokeDash"] = {"field": "layer", "scale": scale, "legend": None}
            table = PanelTable(("step", "layer", SYMBOLS[key]), rows)
            yield Panel(SECTION, title + name, table, spec, legend, _about(refreshes[-1]) + few, run=run.name)
    yield _table(run, refreshes[-1], name)


def _table(run: RunData, line: Line, name: str) -> Panel:
    """Every layer at the last refresh; a κ that is an upper bound begins with ≤."""
    rows = []
    for layer, facts in _layers(line).items():
        row: dict[str, Any] = {"layer": layer, "T": number(facts.get("T"))}
        bounds = facts.get("bounds") if isinstance(facts.get("bounds"), list) else []
        for key, symbol in SYMBOLS.items():
            value = number(facts.get(key))
            if value is not None and key.startswith("kappa") and key[-1] in (bounds or []):
                row[symbol] = f"≤ {value:.6g}"
            elif value is not None:
                row[symbol] = f"{value:.2%}" if key.startswith("clip") else value
        rows.append(row)
    columns = [name for name in ("layer", "T", *SYMBOLS.values()) if any(row.get(name) is not None for row in rows)]
    return Panel(SECTION, f"Layers at step {line['step']}{name}", PanelTable(tuple(columns), rows), run=run.name)


def _about(line: Line) -> str:
    kfac, limit = line["kfac"], number(line["kfac"].get("kappa_max"))
    clip = "no clip" if limit is None else f"κ_max = {limit:g}"
    return f"Policy {kfac.get('policy')}, damping {kfac.get('damping_mode')}, {clip}."


def _layers(line: Line) -> dict[str, Mapping[str, Any]]:
    """{layer: its numbers} of a line of metrics.jsonl; empty if the step has not refreshed the factors."""
    kfac = line.get("kfac")
    layers = kfac.get("layers") if isinstance(kfac, Mapping) and isinstance(line.get("step"), int) else None
    if not isinstance(layers, Mapping):
        return {}
    return {str(name): facts for name, facts in layers.items() if isinstance(facts, Mapping)}


def _of(facts: Mapping[str, Any], key: str) -> float:
    return number(facts.get(key)) or 0.0
