"""The plot of `gramian profile clipping` as SVG: time, memory and shares of a step's phases over the sequence length.

Written by hand, so that it needs no plotting library.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from gramian.verify.profiles.clipping_profile import PHASES, ClippingProfile, Step
from gramian.verify.profiles.clipping_scaling import shares
from gramian.verify.profiles.measurements import TimingSpread

WIDTH, HEIGHT = 1080, 400
TOP, BOTTOM = 84, 348
PLAIN, PRIVATE, GUIDE, TEXT, FAINT = "#8a8f98", "#0b6fa4", "#c4c8ce", "#24292f", "#6b7280"
COLOURS = {
    "forward": "#c9d3dd",
    "backward": "#8fa3b5",
    "norm": "#d1812a",
    "clip": "#0b6fa4",
    "communication": "#c0392b",
    "noise": "#6a4c93",
    "step": "#b9a98f",
}
Scale = Callable[[float], float]


class Point(NamedTuple):
    """A measured value at a sequence length t, and its quartiles."""

    t: float
    value: float
    low: float
    high: float


class Curve(NamedTuple):
    """A named line through measured points."""

    name: str
    colour: str
    points: list[Point]


def draw(profiles: Sequence[ClippingProfile], title: str) -> str:
    """Plot one or more profiles, given in ascending order of sequence length, with a title above; returns SVG text."""
    times = [
        _time_curve("plain step", PLAIN, {p.length: p.plain.total for p in profiles}),
        _time_curve("private step", PRIVATE, {p.length: p.private.total for p in profiles}),
        _time_curve("norms", COLOURS["norm"], {p.length: p.phases["norm"] for p in profiles}),
    ]
    memory = [
        _memory_curve("plain step", PLAIN, {p.length: p.plain for p in profiles}),
        _memory_curve("private step", PRIVATE, {p.length: p.private for p in profiles}),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(20, 26, title, size=14, weight="bold"),
        *_curves(58, 348, "milliseconds", times),
        *_curves(428, 718, "MB of a step, above its start", memory),
        *_bars(800, 1060, profiles),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _time_curve(name: str, colour: str, spreads: Mapping[int, TimingSpread]) -> Curve:
    return Curve(name, colour, [Point(t, 1e3 * s.median, 1e3 * s.low, 1e3 * s.high) for t, s in spreads.items()])


def _memory_curve(name: str, colour: str, steps: Mapping[int, Step]) -> Curve:
    megabytes = {t: (step.memory.above or 0) / 1e6 for t, step in steps.items()}
    return Curve(name, colour, [Point(t, value, value, value) for t, value in megabytes.items()])


def _curves(left: float, right: float, heading: str, curves: Sequence[Curve]) -> Iterator[str]:
    """SVG elements of curves on logarithmic axes, with dashed guides of slope 1 and 2 from the private step's first point."""
    curves = [Curve(c.name, c.colour, [p for p in c.points if p.value > 0]) for c in curves]
    curves = [curve for curve in curves if curve.points]
    yield _text(left, 52, heading, weight="bold")
    if not curves:
        yield _text(left, 72, "unknown on this system", colour=FAINT)
        return
    points = [point for curve in curves for point in curve.points]
    lengths = sorted({point.t for point in points})
    values = [value for point in points for value in point[1:] if value > 0]
    low, high = min(values) / 1.25, max(values) * 1.25
    x_low, x_high = lengths[0] / 1.15, lengths[-1] * 1.15

    def x(t: float) -> float:
        return left + (right - left) * math.log(t / x_low) / math.log(x_high / x_low)

    def y(v: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * math.log(v / low) / math.log(high / low)

    for value in _ticks(low, high):
        yield _line(left, y(value), right, y(value), "#eceef1")
        yield _text(left - 7, y(value) + 4, f"{value:g}", anchor="end", colour=FAINT, size=11)
    for t in lengths:
        yield _line(x(t), BOTTOM, x(t), BOTTOM + 4, FAINT)
        yield _text(x(t), BOTTOM + 18, f"{t:,.0f}", anchor="middle", colour=FAINT, size=11)
    yield _line(left, BOTTOM, right, BOTTOM, FAINT)
    yield _text((left + right) / 2, BOTTOM + 38, "tokens per sequence", anchor="middle", colour=FAINT, size=11)
    base = next((curve for curve in curves if curve.name == "private step"), curves[0])
    yield from _guides(base.points[0], lengths[-1], high, x, y)
    at = left
    for curve in curves:
        yield _line(at, 67, at + 16, 67, curve.colour, 2.6)
        yield _text(at + 21, 71, curve.name, size=11)
        at += 34 + 6.2 * len(curve.name)
    for curve in curves:
        path = " ".join(f"{x(p.t):.1f},{y(p.value):.1f}" for p in curve.points)
        yield f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="2.2"/>'
        for p in curve.points:
            if 0 < p.low < p.high:
                yield _line(x(p.t), y(p.low), x(p.t), y(p.high), curve.colour, 1.2)
            yield f'<circle cx="{x(p.t):.1f}" cy="{y(p.value):.1f}" r="3.4" fill="{curve.colour}"/>'


def _guides(start: Point, last: float, high: float, x: Scale, y: Scale) -> Iterator[str]:
    for power, label in ((1, "O(T)"), (2, "O(T²)")):
        end = min(last, start.t * (high / start.value) ** (1 / power))
        if end > start.t * 1.01:
            x2, y2 = x(end), y(start.value * (end / start.t) ** power)
            yield _line(x(start.t), y(start.value), x2, y2, GUIDE, 1.4, 'stroke-dasharray="5 4"')
            yield _text(x2 + 4, y2 + 4, label, colour=FAINT, size=11)


def _bars(left: float, right: float, profiles: Sequence[ClippingProfile]) -> Iterator[str]:
    """SVG elements of one bar per sequence length, divided by each phase's share of the private step's time."""
    yield _text(left, 52, "share of the private step", weight="bold")
    named = [phase for phase in PHASES if any(p.phases[phase].median > 0 for p in profiles)]
    for number, phase in enumerate(named):
        at, line = left + (0, 72, 186)[number % 3], 63 + 16 * (number // 3)
        yield _rectangle(at, line, 10, 10, COLOURS[phase])
        yield _text(at + 14, line + 9, phase, size=11)
    top = 63 + 16 * -(-len(named) // 3) + 8
    row = (BOTTOM - top) / len(profiles)
    height = min(30.0, 0.62 * row)
    for number, profile in enumerate(profiles):
        at, middle = float(left), top + row * (number + 0.5)
        yield _text(left - 7, middle + 4, f"{profile.length:,}", anchor="end", colour=FAINT, size=11)
        for phase, share in shares({name: s.median for name, s in profile.phases.items()}).items():
            width = share * (right - left)
            yield _rectangle(at, middle - height / 2, width, height, COLOURS[phase])
            if width > 30:
                ink = TEXT if phase in ("forward", "step") else "#ffffff"
                yield _text(at + width / 2, middle + 4, f"{share:.0%}", anchor="middle", colour=ink, size=11)
            at += width


def _ticks(low: float, high: float) -> list[float]:
    """Values 1, 2, 5 × 10ⁿ from `low` to `high` for an axis; powers of ten alone if those would be crowded."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 3e3 else (1,)
    return [step * 10.0**n for n in exponents for step in steps if low <= step * 10.0**n <= high]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" {more}/>'


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    colour: str = TEXT,
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">{escape(content)}</text>'
    )
