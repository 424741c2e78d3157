"""Panels of a result of `gramian curvature`: spectra, metrics along the depth, a heat map of layers, spectral density."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gramian.analysis.layer_places import Place, place, short_roles
from gramian.report.chart_specs import colour, curves, layer_heat_map, shaded, whole_numbers
from gramian.report.panel import LegendEntry, Panel, PanelTable, Spec
from gramian.report.run_data import RunData, number

SECTION = "Curvature"
DEPTH = {
    "entropy_rank": "Effective rank along the depth",
    "condition_number": "Condition number along the depth",
    "effective_dimension": "Capacity (effective dimension) along the depth",
    "trace": "Trace along the depth",
}
"""{metric of a layer: title of its panel}."""
HEAT = {
    "trace": "trace",
    "max_eigenvalue": "largest eigenvalue",
    "entropy_rank": "effective rank",
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "effective_dimension": "effective dimension",
    "condition_number": "condition number",
}
"""{metric of a layer: its name in the heat map}."""
OUTSIDE = "outside the blocks"
MOST_LAYERS = 64
"""Largest number of layers in a panel: those with the largest trace."""
MOST_ROWS = 2400
"""About the largest number of rows of the table of spectra."""


def curvature_panels(runs: Sequence[RunData]) -> list[Panel]:
    """The panels of every run that has a result of `gramian curvature`."""
    found = []
    for run in runs:
        if run.curvature is not None:
            found += _panels(run, run.curvature, f", {run.name}" if len(runs) > 1 else "")
    return found


def _panels(run: RunData, result: Mapping[str, Any], name: str) -> list[Panel]:
    kfac = result["kfac"]
    metrics = _layers(kfac)
    blocks = [where.block for _, where in _places([*metrics]).values() if where.block is not None]
    low, high = min(blocks, default=0), max(blocks, default=0)
    found = []

    def add(
        title: str, rows: Sequence[Mapping[str, Any]], spec: Spec, groups: Sequence[str] = (), note: str = ""
    ) -> None:
        if rows:
            legend = tuple(LegendEntry(group, colour(i)) for i, group in enumerate(groups)) if len(groups) > 1 else ()
            private = (run.name,) if run.is_private else ()
            table = PanelTable(tuple(rows[0]), rows)
            found.append(Panel(SECTION, title + name, table, spec, legend, note, private, run.name))

    spectra = _spectra(kfac, metrics)
    layers = _distinct(spectra, "layer")
    spec, deep = curves("rank", "eigenvalue", "layer", layers, log="xy"), high > low
    note = (
        _about(result) + " Colour: block; layers outside the blocks have the number before the first or after the last."
    )
    if deep:
        add("Eigenvalues of every layer", spectra, shaded(spec, "block"), (), note)
    else:
        add("Eigenvalues of every layer", spectra, spec, layers, _about(result))
    for key, title in DEPTH.items():
        rows = _along_depth(metrics, key)
        roles = _distinct(rows, "role")
        spec = curves(
            "block", HEAT[key], "role", roles, log="y" if key in ("condition_number", "trace") else "", points=True
        )
        add(title, rows, whole_numbers(spec, low, high), roles)
    add("Layers and metrics", _heat(metrics), layer_heat_map([*HEAT.values()], len(metrics)))
    rows = _density(result)
    groups = _distinct(rows, "estimate")
    spec = curves("eigenvalue", "per decade", "estimate", groups, log="x")
    add("Spectral density", rows, spec, groups, "Number of eigenvalues per decade, of all layers together.")
    return found


def _distinct(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """The values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def _about(result: Mapping[str, Any]) -> str:
    data, settings = result.get("data"), result.get("settings")
    if not isinstance(data, Mapping) or not isinstance(settings, Mapping):
        return ""
    kind = "EK-FAC" if settings.get("ekfac") else "K-FAC"
    complete = "" if result.get("complete") else " The analysis is not complete."
    return f"{kind} from {data.get('tokens')} tokens, labels: {settings.get('fisher')}.{complete}"


def _layers(kfac: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{layer: {metric: value}} of the layers with the largest traces, in the model's order, without vectors such as biases."""
    metrics = kfac.get("metrics")
    layers = metrics.get("layers") if isinstance(metrics, Mapping) else None
    record = kfac.get("record")
    recorded = record.get("layers") if isinstance(record, Mapping) else None
    if not isinstance(layers, Mapping):
        return {}
    found = {}
    for name, values in layers.items():
        facts = recorded.get(name) if isinstance(recorded, Mapping) else None
        kronecker = not isinstance(facts, Mapping) or "K-FAC" in str(facts.get("approximation"))
        if isinstance(values, Mapping) and kronecker:
            found[str(name)] = {str(key): one for key, value in values.items() if (one := number(value)) is not None}
    largest = sorted(found, key=lambda name: -found[name].get("trace", 0.0))[:MOST_LAYERS]
    return {name: values for name, values in found.items() if name in largest}


def _places(names: Sequence[str]) -> dict[str, tuple[int, Place]]:
    """{layer: (block number, place)}; layers outside get the number before the first or after the last."""
    places = {name: place(name) for name in names}
    blocks = [where.block for where in places.values() if where.block is not None]
    low, high = min(blocks, default=0), max(blocks, default=0)
    found, seen = {}, False
    for name, where in places.items():
        seen = seen or where.block is not None
        found[name] = (where.block if where.block is not None else (high + 1 if seen else low - 1), where)
    return found


def _spectra(kfac: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    spectra = kfac.get("spectra")
    if not isinstance(spectra, Mapping):
        return []
    places, rows = _places([*metrics]), []
    stride = max(1, math.ceil(121 * len(metrics) / MOST_ROWS))
    for name in metrics:
        curve = spectra.get(name)
        if not isinstance(curve, Mapping) or not all(
            isinstance(curve.get(key), list) for key in ("ranks", "eigenvalues")
        ):
            continue
        pairs = list(zip(curve["ranks"], curve["eigenvalues"], strict=False))
        for at, (rank, value) in enumerate(pairs):
            fine = number(rank) is not None and number(value) is not None and rank > 0 and value > 0
            if fine and (at % stride == 0 or at == len(pairs) - 1):
                rows.append({"layer": name, "block": places[name][0], "rank": rank, "eigenvalue": value})
    return rows


def _along_depth(metrics: Mapping[str, Mapping[str, float]], key: str) -> list[dict[str, Any]]:
    places = _places([*metrics])
    roles = short_roles(where.role for _, where in places.values() if where.block is not None)
    rows = []
    for name, values in metrics.items():
        block, where = places[name]
        role = roles[where.role] if where.block is not None else OUTSIDE
        if key in values and (role != OUTSIDE or len(metrics) < MOST_LAYERS):
            label = name if role == OUTSIDE else role
            rows.append({"layer": name, "role": label, "block": block, HEAT[key]: values[key]})
    return rows


def _heat(metrics: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Rows of the heat map; "position" is that of the logarithm between the smallest and the largest of all layers."""
    rows = []
    for key, label in HEAT.items():
        found = {name: math.log(values[key]) for name, values in metrics.items() if values.get(key, 0.0) > 0}
        low, high = min(found.values(), default=0.0), max(found.values(), default=0.0)
        for name, value in found.items():
            position = (value - low) / (high - low) if high > low else 0.5
            rows.append({"layer": name, "metric": label, "value": metrics[name][key], "position": round(position, 4)})
    return rows


def _density(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for section, label in (("kfac", "K-FAC"), ("ggn", "Gauss-Newton")):
        part = result.get(section)
        density = part.get("density") if isinstance(part, Mapping) else None
        if not isinstance(density, Mapping) or not isinstance(density.get("eigenvalues"), list):
            continue
        for value, height in zip(density["eigenvalues"], density.get("per_decade") or [], strict=False):
            if number(value) is not None and value > 0 and number(height) is not None:
                rows.append({"estimate": label, "eigenvalue": value, "per decade": height})
    return rows
