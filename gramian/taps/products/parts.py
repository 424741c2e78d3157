"""Parts of a parameter that are matrices of their own, and their names.

"w[3]" is w[3] of a bank of matrices [E, r, c]; "w[8:16]" is its rows 8 to 15. Both are ranges of the first axis, so a part is a
view. The parts of a parameter do not overlap, and together are all of it.
"""

import re
from collections.abc import Callable
from functools import cache

from torch import Tensor

Range = int | slice
SMALL = 128
"""Largest number of elements of a parameter, or of one matrix of a stack, that gets its exact Fisher block."""
PART = re.compile(r"(.+)\[(\d+)(?::(\d+))?\]")


def part_name(parameter: str, rows: Range) -> str:
    """The name of a range of the first axis of a parameter: "w[3]" for 3, "w[8:16]" for slice(8, 16)."""
    return f"{parameter}[{rows}]" if isinstance(rows, int) else f"{parameter}[{rows.start}:{rows.stop}]"


def even_parts(parameter: str, rows: int, count: int) -> list[str]:
    """Names of `count` parts of equal size of a parameter with this number of rows; its own name for one part."""
    each = rows // count
    return [part_name(parameter, slice(i * each, (i + 1) * each)) if count > 1 else parameter for i in range(count)]


@cache
def part_of(name: str) -> tuple[str, Range | None]:
    """(parameter, range of its first axis) from the name of a part; the range is None if the name is a whole parameter's."""
    found = PART.fullmatch(name)
    if found is None:
        return name, None
    first, stop = int(found[2]), found[3]
    return found[1], first if stop is None else slice(first, int(stop))


def owner(name: str) -> str:
    """The parameter that a part belongs to; a whole parameter's own name."""
    return part_of(name)[0]


def view(t: Tensor, name: str) -> Tensor:
    """The view of a parameter's tensor that is the part of this name; `t` itself if the name is a whole parameter's."""
    rows = part_of(name)[1]
    return t if rows is None else t[rows]


def part_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The shape of the part of this name of a parameter of this shape."""
    rows = part_of(name)[1]
    if rows is None:
        return shape
    return shape[1:] if isinstance(rows, int) else (rows.stop - rows.start, *shape[1:])


def renamed(name: str, rename: Callable[[str], str]) -> str:
    """The name of the same part of the parameter that `rename` gives for this one."""
    parameter, rows = part_of(name)
    return rename(parameter) if rows is None else part_name(rename(parameter), rows)
