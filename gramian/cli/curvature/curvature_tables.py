"""What `gramian curvature` prints of its result: a table of the layers, one of the whole model, and lines about both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gramian.cli.terminal import make_table

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_ROWS = 64
"""Maximum number of layers in the printed table: those with the largest share of the trace."""


def result_tables(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Tables and lines of a result of `analyse` for the terminal: the layers, the whole model, loss, coverage and caveats."""
    yield _layer_table(result)
    yield _model_table(result)
    kfac, data = result["kfac"], result["data"]
    exact = " but that of the exact head" if result["settings"]["fisher"] == "true" else ""
    limit = f"no side of a layer{exact} has a rank above the {data['tokens']:,} tokens read"
    yield f"loss {kfac['loss']:.4g} nats a term; {limit}"
    coverage = kfac["metrics"]["model"]["coverage"]
    yield (
        f"of the parameters {coverage['kronecker']:.2%} in Kronecker blocks, {coverage['block']:.2%} in exact blocks, "
        f"{coverage['diagonal']:.2%} in diagonals, {coverage['none']:.2%} in none"
    )
    yield from result["notes"]


def _layer_table(result: Mapping[str, Any]) -> RenderableType:
    """Table of the layers: a row per layer with Kronecker factors, in the model's order, and one for all other parameters.

    Of more than `MOST_ROWS` layers those with the smallest traces are in the last row too.
    """
    from gramian.analysis.layer_places import kind, kronecker_layers, short_names

    record, metrics = result["kfac"]["record"]["layers"], result["kfac"]["metrics"]
    total = metrics["model"]["trace"] or math.inf
    names = kronecker_layers(result)
    shown = sorted(names, key=lambda name: -metrics["layers"][name]["trace"])[:MOST_ROWS]
    table = make_table()
    table.add_column("layer", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for head in ("out × in", "trace", "share", "λ_max", "eff. rank", "condition"):
        table.add_column(head, justify="right", no_wrap=True)
    short = short_names(names)
    for name in names:
        if name in shown:
            layer, found = record[name], metrics["layers"][name]
            size = f"{layer['out_dim']:,} × {layer['in_dim']:,}"
            table.add_row(
                short[name],
                kind(layer),
                size,
                f"{found['trace']:.3g}",
                f"{found['trace'] / total:.1%}",
                f"{found['max_eigenvalue']:.3g}",
                f"{found['entropy_rank']:,.0f}",
                f"{found['condition_number']:.2g}",
            )
    rest = [name for name in record if name not in shown]
    if rest:
        kinds = ", ".join(dict.fromkeys(kind(record[name]) for name in rest))
        trace = sum(metrics["layers"][name]["trace"] for name in rest)
        top = max(metrics["layers"][name]["max_eigenvalue"] for name in rest)
        size = f"{sum(record[name]['out_dim'] * record[name]['in_dim'] for name in rest):,}"
        table.add_section()
        table.add_row(f"{len(rest)} other blocks", kinds, size, f"{trace:.3g}", f"{trace / total:.1%}", f"{top:.3g}")
    return table


def _model_table(result: Mapping[str, Any]) -> RenderableType:
    """Table of the model's totals, such as trace and largest eigenvalue: K-FAC beside the Gauss-Newton matrix."""
    from gramian.analysis.layer_places import estimate_name

    model, ggn = result["kfac"]["metrics"]["model"], result.get("ggn")
    table = make_table("whole model", f">{estimate_name(result)}", *[">Gauss-Newton"] * bool(ggn))
    damped = f", λ = {model['damping']:g}"
    rows = [
        ("trace", "trace", ggn and _plus_minus(ggn["trace"])),
        ("largest eigenvalue", "max_eigenvalue", ggn and _largest(ggn["extremes"])),
        ("participation ratio", "participation_ratio", ggn and _number(ggn["participation_ratio"])),
        (f"effective dimension{damped}", "effective_dimension", ggn and _plus_minus(ggn["effective_dimension"])),
        ("effective rank", "entropy_rank", ""),
        (f"condition number{damped}", "condition_number", ""),
    ]
    if "pac_bayes" in model:
        rows.append((f"√(trace/n), n = {_number(result['settings']['samples'])}; no bound", "pac_bayes", ""))
    for name, key, exact in rows:
        table.add_row(name, _number(model[key]), *[exact] * bool(ggn))
    if "hessian" in result:
        ends = result["hessian"]["extremes"]
        table.add_row("Hessian, both ends", f"{ends['smallest']:.4g} … {ends['largest']:.4g}")
    return table


def _plus_minus(estimate: Mapping[str, Any]) -> str:
    error = estimate["standard_error"]
    limit = "≤ " if estimate.get("bound") == "upper" else ""
    return f"{limit}{_number(estimate['value'])}" + ("" if error is None else f" ± {_number(error, 2)}")


def _number(value: float, digits: int = 4) -> str:
    """Format a number to `digits` significant digits, without a power of ten below a billion."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _largest(ends: Mapping[str, Any]) -> str:
    return f"{ends['largest']:.4g}" + ("" if ends["converged"] else " (not converged)")
