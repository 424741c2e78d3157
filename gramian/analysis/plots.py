"""Pictures of an analysis: spectra of the layers, ranks and condition numbers by depth, density of the Gauss-Newton matrix.

Colours are those of Okabe and Ito and of the map "cividis", which colour-blind readers can distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.analysis.layer_places import Place, estimate_name, kronecker_layers, place, short_roles
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A7A7A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "legend.frameon": False,
    "figure.dpi": 120,
}
WIDTH = 10.0
"""Width of a picture in inches: 1200 pixels."""
MOST_ROLES = 8
"""Maximum number of panels or lines of a plot, one per role (a layer's name inside its transformer block)."""


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(result: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write the pictures of a result of `analyse` that has its "kfac" section into a folder; returns the written files.

    Raises:
        GramianError: if a file cannot be written.
    """
    import matplotlib

    pictures = {"spectra": _spectra, "depth": _depth} if kronecker_layers(result) else {}
    if "ggn" in result:
        pictures["density"] = _density
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, picture in pictures.items():
            path = Path(folder) / f"{name}.png"
            try:
                picture(result).savefig(path)
            except OSError as problem:
                why = f"cannot be written ({problem.strerror}); expected a folder with room"
                raise GramianError(f"{path}: {why}") from None
            paths.append(path)
    return paths


def _figure(rows: int, columns: int, height: float, result: Mapping[str, Any], title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    figure.supxlabel(_caption(result), fontsize=9, color="#5f6670", x=0.01, ha="left")
    return figure, axes


def _caption(result: Mapping[str, Any]) -> str:
    """The caption below every picture: model, data and settings of a result of `analyse`."""
    model, data, settings = result["model"], result["data"], result["settings"]
    name = Path(str(model["path"])).name if "path" in model else model.get("kind", "model")
    facts = [
        f"{name}, {model['parameters']:,} parameters, weights: {str(model.get('weights', 'given')).partition(', of ')[0]}",
        f"{data['tokens']:,} tokens, {data['terms']:,} loss terms, labels: {settings['fisher']}, seed {settings['seed']}",
    ]
    return "\n".join(["; ".join(facts), *result["notes"]])


def _groups(result: Mapping[str, Any]) -> dict[str, dict[str, Place]]:
    """{role: {layer name: place}} of the layers with Kronecker factors, for at most `MOST_ROLES` roles with the most layers.

    A role is a layer's name inside its transformer block, or "" for a layer outside the blocks.
    """
    found: dict[str, dict[str, Place]] = {}
    for name in kronecker_layers(result):
        where = place(name)
        found.setdefault(where.role if where.block is not None else "", {})[name] = where
    if len(found) > MOST_ROLES:
        largest = sorted(found, key=lambda role: -len(found[role]))[:MOST_ROLES]
        found = {role: layers for role, layers in found.items() if role in largest}
    return found


# ---- spectra of the layers -------------------------------------------------------------------------------------------


def _spectra(result: Mapping[str, Any]) -> Figure:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    groups, curves = _groups(result), result["kfac"]["spectra"]
    names = short_roles(role for role in groups if role)
    columns = min(len(groups), 4) if len(groups) > 6 else min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure, axes = _figure(
        rows, columns, 1.2 + 2.9 * rows, result, f"{estimate_name(result)} eigenvalues of every layer, largest first"
    )
    blocks = [where.block for layers in groups.values() for where in layers.values() if where.block is not None]
    scale = Normalize(min(blocks, default=0), max(max(blocks, default=1), min(blocks, default=0) + 1))
    shades = colormaps["cividis"]
    tops = [curves[name]["eigenvalues"][0] for layers in groups.values() for name in layers if curves[name]["ranks"]]
    high = 3 * max(tops, default=1.0)
    spare = list(axes.flat[len(groups) :])
    for axis in spare:
        axis.set_axis_off()
    for number, (role, layers) in enumerate(groups.items()):
        axis = axes.flat[number]
        axis.set_title(names.get(role, "outside the blocks"))
        for order, (name, where) in enumerate(layers.items()):
            style: dict[str, Any] = {"color": shades(scale(where.block or 0))}
            if not role:
                style = {"label": name.split(".")[-1], "color": COLOURS[order % len(COLOURS)]}
            ranks, values = curves[name]["ranks"], curves[name]["eigenvalues"]
            begin = [min(1.0, ranks[0])] if ranks else []  # a largest eigenvalue that repeats has the ranks from 1 on
            axis.plot([*begin, *ranks], [*values[:1], *values], linewidth=1.6, **style)
        axis.set(xscale="log", yscale="log")
        axis.set_ylim(high * 1e-11, high)
        if not role:
            lines, labels = axis.get_legend_handles_labels()
            free, at = (spare[0], "center left") if spare else (axis, "lower left")
            free.legend(
                lines, labels, fontsize=9, loc=at, title="outside the blocks" if spare else None, alignment="left"
            )
        if number % columns == 0:
            axis.set_ylabel("eigenvalue")
        if number + columns >= len(groups):
            axis.set_xlabel("rank of the eigenvalue")
    if blocks:
        bar = figure.colorbar(ScalarMappable(scale, shades), ax=axes, label="block", shrink=0.8, pad=0.01)
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()
    return figure


# ---- along the depth -------------------------------------------------------------------------------------------------


def _depth(result: Mapping[str, Any]) -> Figure:
    groups, metrics = _groups(result), result["kfac"]["metrics"]
    names = short_roles(role for role in groups if role)
    figure, axes = _figure(2, 1, 8.0, result, "Effective rank and condition number along the depth")
    inside = [where.block for layers in groups.values() for where in layers.values() if where.block is not None]
    last = max(inside, default=-1)
    outside: list[tuple[int, str]] = []
    damping = metrics["model"]["damping"]
    shown = {
        "entropy_rank": "effective rank (exp of the entropy)",
        "condition_number": f"condition number of F + {damping:g}·I",
    }
    for axis, (key, label) in zip(axes.flat, shown.items(), strict=True):
        outside = []
        for number, (role, layers) in enumerate(groups.items()):
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            if role:
                points = sorted((where.block or 0, metrics["layers"][name][key]) for name, where in layers.items())
                axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=names[role], linewidth=1.5)
                continue
            for name in layers:
                at = _outside_at(result, name, last, outside)
                outside.append((at, name.split(".")[-1]))
                axis.plot([at], [metrics["layers"][name][key]], color=colour, marker=marker, linestyle="none")
        drawn = [metrics["layers"][name][key] for layers in groups.values() for name in layers]
        if any(drawn):  # a logarithmic axis cannot show zeros
            axis.set_yscale("log")
        _plain_ticks(axis, drawn)
        axis.set_ylabel(label)
        ticks = [(b, str(b)) for b in _some(sorted(set(inside)))]
        ticks += [(at, name.replace("_", "\n")) for at, name in outside]
        axis.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axis.margins(x=0.04)
    axes.flat[-1].set_xlabel("block" + (", and layers outside the blocks" if outside else ""))
    if inside:
        columns = min(4, sum(bool(role) for role in groups))
        axes.flat[0].legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns, fontsize=10, borderaxespad=0)
    return figure


def _outside_at(result: Mapping[str, Any], name: str, last: int, outside: Sequence[tuple[int, str]]) -> int:
    """Position on the depth axis of a layer outside the transformer blocks: before or after them, as in the model.

    `last` is the last block's number, `outside` are the (position, name) of such layers placed so far.
    """
    order = list(result["kfac"]["record"]["layers"])
    first = next((i for i, other in enumerate(order) if place(other).block is not None), len(order))
    taken = [at for at, _ in outside]
    if order.index(name) < first and last >= 0:
        before = [each for each in kronecker_layers(result) if place(each).block is None and order.index(each) < first]
        return before.index(name) - len(before)
    return max([last, *taken]) + 1


# ---- the density -----------------------------------------------------------------------------------------------------


def _density(result: Mapping[str, Any]) -> Figure:
    ggn, kfac = result["ggn"], result["kfac"]
    figure, axes = _figure(1, 1, 5.6, result, "Density of the Gauss-Newton matrix")
    axis: Axes = axes.flat[0]
    found, error = ggn["density"], ggn["density"]["standard_error"]
    probes, steps = len(ggn["nodes"]), len(ggn["nodes"][0])
    low = [max(d - e, 1e-300) for d, e in zip(found["per_decade"], error, strict=True)]
    high = [d + e for d, e in zip(found["per_decade"], error, strict=True)]
    axis.fill_between(found["eigenvalues"], low, high, color=COLOURS[0], alpha=0.25, linewidth=0)
    axis.plot(
        found["eigenvalues"],
        found["per_decade"],
        color=COLOURS[0],
        linewidth=2.2,
        label=f"Gauss-Newton ({probes} probes × {steps} steps, ± standard error)",
    )
    other = kfac["density"]
    axis.plot(
        other["eigenvalues"],
        other["per_decade"],
        color=COLOURS[1],
        linewidth=1.8,
        linestyle="--",
        label=estimate_name(result),
    )
    tops = [value for value in ggn["extremes"]["eigenvalues"] if value > 0]
    axis.plot(
        tops,
        [0.012] * len(tops),
        color=COLOURS[6],
        marker="|",
        markersize=14,
        linestyle="none",
        transform=axis.get_xaxis_transform(),
        label=f"{len(tops)} largest of Gauss-Newton (Lanczos)",
        clip_on=False,
    )
    axis.set(xscale="log", yscale="log", xlabel="eigenvalue", ylabel="eigenvalues per decade")
    span = [v for v in (*found["eigenvalues"], *tops) if v > 0]
    top = max([*found["per_decade"], *other["per_decade"], 1.0])
    axis.set_ylim(0.1, 10 ** (math.ceil(math.log10(top)) + 0.3))
    if span:
        axis.set_xlim(min(span) / 30, max([*span, *other["eigenvalues"][-1:]]) * 1.5)
    axis.axvline(ggn["damping"], color=COLOURS[7], linewidth=1, linestyle=":", label=f"λ = {ggn['damping']:g}")
    axis.set_title(
        f"drawn: nodes above the resolution of {ggn['resolution']:.1e}, which stand for {ggn['above_resolution']:,.0f} of "
        f"{ggn['dim']:,} directions",
        fontsize=10,
        loc="left",
        color="#5f6670",
    )
    axis.legend(loc="upper right", fontsize=10)
    return figure


# ---- ticks -----------------------------------------------------------------------------------------------------------


def _some(blocks: Sequence[int]) -> Sequence[int]:
    """At most 16 of the given block numbers, evenly spaced, as labels of an axis."""
    return blocks[:: -(-len(blocks) // 16)] if blocks else blocks


def _plain_ticks(axis: Axes, values: Sequence[float]) -> None:
    """Label a logarithmic axis without powers of ten if the values span less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    some = [value for value in values if value and math.isfinite(value)]
    if some and max(some) < 100 * min(some):
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
