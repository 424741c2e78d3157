"""The picture of a profile of private steps, as SVG: time, memory and shares of the phases over the sequence length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gramian.verify.clipping_profile import PHASES, ClippingProfile, Step, TimingSpread
from gramian.verify.clipping_scaling import shares

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


@dataclass(frozen=True)
class Line:
    """One curve: a name, a colour, (T, value) and, where there are any, (low, high) of each point."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float]] = ()


def draw(profiles: Sequence[ClippingProfile], title: str) -> str:
    """The picture.

    Args:
        profiles: by ascending length, at least one.
        title: what ran where.
    """
    times = [
        _times("plain step", PLAIN, profiles, lambda p: p.plain.total),
        _times("private step", PRIVATE, profiles, lambda p: p.private.total),
        _times("norms", COLOURS["norm"], profiles, lambda p: p.phases["norm"]),
    ]
    memory = [
        _memory("plain step", PLAIN, profiles, lambda p: p.plain),
        _memory("private step", PRIVATE, profiles, lambda p: p.private),
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


def _times(
    name: str, colour: str, profiles: Sequence[ClippingProfile], of: Callable[[ClippingProfile], TimingSpread]
) -> Line:
    spreads = [of(p) for p in profiles]
    return Line(
        name,
        colour,
        [(p.length, 1e3 * s.median) for p, s in zip(profiles, spreads, strict=True)],
        [(1e3 * s.low, 1e3 * s.high) for s in spreads],
    )


def _memory(name: str, colour: str, profiles: Sequence[ClippingProfile], of: Callable[[ClippingProfile], Step]) -> Line:
    return Line(name, colour, [(p.length, (of(p).memory.above or 0) / 1e6) for p in profiles])


def _curves(left: float, right: float, heading: str, lines: Sequence[Line]) -> Iterator[str]:
    """Logarithmic axes, dashed guides of slope 1 and 2 from the private step's first point."""
    lines = [
        Line(line.name, line.colour, [(t, v) for t, v in line.points if v > 0], line.ranges)
        for line in lines
        if any(v > 0 for _, v in line.points)
    ]
    yield _text(left, 52, heading, weight="bold")
    if not lines:
        yield _text(left, 72, "not known on this system", colour=FAINT)
        return
    lengths = sorted({t for line in lines for t, _ in line.points})
    values = [v for line in lines for _, v in line.points]
    values += [bound for line in lines for pair in line.ranges for bound in pair if bound > 0]
    low, high = min(values) / 1.25, max(values) * 1.25
    x_low, x_high = lengths[0] / 1.15, lengths[-1] * 1.15

    def x(t: float) -> float:
        return left + (right - left) * math.log(t / x_low) / math.log(x_high / x_low)

    def y(v: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * math.log(v / low) / math.log(high / low)

    for value in _ticks(low, high):
        yield f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#eceef1"/>'
        yield _text(left - 7, y(value) + 4, f"{value:g}", anchor="end", colour=FAINT, size=11)
    for t in lengths:
        yield f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}" stroke="{FAINT}"/>'
        yield _text(x(t), BOTTOM + 18, f"{t:,.0f}", anchor="middle", colour=FAINT, size=11)
    yield f'<line x1="{left}" x2="{right}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="{FAINT}"/>'
    yield _text((left + right) / 2, BOTTOM + 38, "tokens per sequence", anchor="middle", colour=FAINT, size=11)
    base = next((line for line in lines if line.name == "private step"), lines[0])
    yield from _guides(base.points[0], lengths[-1], high, x, y)
    yield from _legend(left, lines)
    for line in lines:
        path = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in line.points)
        yield f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.2"/>'
        for (t, _), (bottom, top) in zip(line.points, line.ranges, strict=False):
            if bottom > 0:
                yield (
                    f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{y(bottom):.1f}" y2="{y(top):.1f}" '
                    f'stroke="{line.colour}" stroke-width="1.2"/>'
                )
        for t, v in line.points:
            yield f'<circle cx="{x(t):.1f}" cy="{y(v):.1f}" r="3.4" fill="{line.colour}"/>'


def _guides(start: tuple[float, float], last: float, high: float, x: Scale, y: Scale) -> Iterator[str]:
    t, value = start
    for power, label in ((1, "O(T)"), (2, "O(T²)")):
        end = min(last, t * (high / value) ** (1 / power))
        if end <= t * 1.01:
            continue
        at = value * (end / t) ** power
        x1, y1, x2, y2 = x(t), y(value), x(end), y(at)
        yield (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GUIDE}" stroke-width="1.4" '
            'stroke-dasharray="5 4"/>'
        )
        yield _text(x2 + 4, y2 + 4, label, colour=FAINT, size=11)


def _legend(left: float, lines: Sequence[Line]) -> Iterator[str]:
    at = left
    for line in lines:
        yield f'<line x1="{at:.0f}" x2="{at + 16:.0f}" y1="67" y2="67" stroke="{line.colour}" stroke-width="2.6"/>'
        yield _text(at + 21, 71, line.name, size=11)
        at += 34 + 6.2 * len(line.name)


def _bars(left: float, right: float, profiles: Sequence[ClippingProfile]) -> Iterator[str]:
    """A bar per length, cut into the phases' shares."""
    yield _text(left, 52, "share of the private step", weight="bold")
    named = [phase for phase in PHASES if any(p.phases[phase].median > 0 for p in profiles)]
    for number, phase in enumerate(named):
        at, line = left + (0, 72, 186)[number % 3], 63 + 16 * (number // 3)
        yield f'<rect x="{at}" y="{line}" width="10" height="10" fill="{COLOURS[phase]}"/>'
        yield _text(at + 14, line + 9, phase, size=11)
    top = 63 + 16 * -(-len(named) // 3) + 8
    row = (BOTTOM - top) / len(profiles)
    height = min(30.0, 0.62 * row)
    for number, profile in enumerate(profiles):
        at, middle = float(left), top + row * (number + 0.5)
        yield _text(left - 7, middle + 4, f"{profile.length:,}", anchor="end", colour=FAINT, size=11)
        for phase, share in shares({name: s.median for name, s in profile.phases.items()}).items():
            width = share * (right - left)
            yield (
                f'<rect x="{at:.1f}" y="{middle - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[phase]}"/>'
            )
            if width > 30:
                ink = TEXT if phase in ("forward", "step") else "#ffffff"
                yield _text(at + width / 2, middle + 4, f"{share:.0%}", anchor="middle", colour=ink, size=11)
            at += width


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 × 10ⁿ within the range; powers of ten alone where that would be crowded."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 3e3 else (1,)
    return [step * 10.0**n for n in exponents for step in steps if low <= step * 10.0**n <= high]


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = TEXT, size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
