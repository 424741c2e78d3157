"""How much of a test matrix runs: all of it with ``GRAMIAN_FULL=1``, else a sample that leaves no case out."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

WHOLE = 4
"""Matrices up to this size are not thinned, unless their cells start processes."""
SHARE = 0.1
"""Of a larger one, what is left of it at least."""
FEW = 2
"""What is left of a matrix whose every cell starts several processes: its axes are walked through without them."""

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


def thinned(cells: Sequence[Mapping[str, Any]], processes: bool = False) -> list[int]:
    """Which cells of a matrix to run: every value of every axis is in one of them, and so is a share of all.

    Args:
        cells: {axis: value} of each.
        processes: True if each runs on several processes.

    Returns:
        Their numbers, in order.
    """
    if len(cells) <= (FEW if processes else WHOLE):
        return list(range(len(cells)))
    if processes:
        return sorted(k * _stride(len(cells)) % len(cells) for k in range(FEW))
    stride, seen, chosen, others = _stride(len(cells)), set[Hashable](), [], []
    for k in range(len(cells)):
        i = k * stride % len(cells)
        values = {(axis, _told_apart_by(value)) for axis, value in cells[i].items()}
        (others if values <= seen else chosen).append(i)
        seen |= values
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
    while stride > 1 and not all(length % d or stride % d for d in range(2, stride + 1)):
        stride -= 1
    return stride
