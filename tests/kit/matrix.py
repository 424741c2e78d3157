"""How much of a test matrix runs: all of it with ``GRAMIAN_FULL=1``, else a sample that leaves no case out."""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

SHARE = 0.1
"""What is left of a matrix at least."""
FEW = 2
"""Matrices up to this size are not thinned. It is what is left of one whose every cell starts several processes: its axes are
walked through without them."""

FULL = os.environ.get("GRAMIAN_FULL") == "1"

Item = TypeVar("Item")


def sample(items: Sequence[Item], n: int, case: Callable[[Item], object] | None = None) -> list[Item]:
    """All items when FULL, else about ``n`` of them, the same ones every time and in their order.

    Args:
        items: the matrix.
        n: how many to take; more are taken where ``n`` is less than the number of cases.
        case: what names the case of an item, by default its first element, or the item itself if it has none. Every
            case keeps at least one item; a different one from case to case, so that the other axes of the matrix are
            walked through as well.
    """
    if FULL or n >= len(items):
        return list(items)
    groups: dict[object, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(_first(item) if case is None else case(item), []).append(i)
    # A stride that shares no factor with the group's size visits all of it before it comes back.
    order = [
        [group[(offset + k * _stride(len(group))) % len(group)] for k in range(len(group))]
        for offset, group in enumerate(groups.values())
    ]
    chosen = {turns[0] for turns in order}
    for k in range(1, max(map(len, order))):
        for turns in order:
            if len(chosen) < n and k < len(turns):
                chosen.add(turns[k])
    return [items[i] for i in sorted(chosen)]


def some(items: Iterable[Item], k: int, of: int = 2) -> list[Item]:
    """All items when FULL, else every `of`-th from the `k`-th on: tests over one table each take another share of it."""
    return list(items) if FULL else list(items)[k::of]


def examples(n: int) -> int:
    """How many examples a property is tried on: `n` when FULL, else a third of them, and not below four."""
    return n if FULL else min(n, max(4, n // 3))


def thinned(cells: Sequence[Mapping[str, Any]], processes: bool = False) -> list[int]:
    """Which cells of a matrix to run: as few as have every value of every axis among them, and a share of all at least.

    Args:
        cells: {axis: value} of each.
        processes: True if each runs on several processes.

    Returns:
        Their numbers, in order.
    """
    if len(cells) <= FEW:
        return list(range(len(cells)))
    if processes:
        return sorted(k * _stride(len(cells)) % len(cells) for k in range(FEW))
    values = [{(axis, _told_apart_by(value)) for axis, value in cell.items()} for cell in cells]
    stride, unseen, chosen = _stride(len(cells)), set[Hashable]().union(*values), []
    others = [k * stride % len(cells) for k in range(len(cells))]
    while unseen:
        # The cell with the most values that no chosen one has; of several, the first in the order of the stride.
        most = max(others, key=lambda i: len(values[i] & unseen))
        others.remove(most)
        chosen.append(most)
        unseen -= values[most]
    return sorted([*chosen, *others[: max(0, round(SHARE * len(cells)) - len(chosen))]])


def _told_apart_by(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _first(item: object) -> object:
    return item[0] if isinstance(item, tuple) else item


def _stride(length: int) -> int:
    stride = max(1, round(length * 0.618))
    while math.gcd(length, stride) > 1:
        stride -= 1
    return stride
