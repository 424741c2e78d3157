"""Bytes of one block of the Fisher from shapes alone: what `build`, `linalg` and `application` will hold, and when.

Legend: n side of a factor, r its columns, k tokens kept, o and m outputs and inputs of a block, a, w and s bytes of a number in
activations, in sums (4, or 8 for float64) and at rest.

| stage   | dense                          | low rank                    | diagonal |
|---------|--------------------------------|-----------------------------|----------|
| collect | w·n² + w·n                     | a·k·n (and 8·k for keys)    | 2·w·n    |
| rest    | s·n² (half: + 8·n for scales)  | s·n·r + 8·r                 | w·n      |
| use     | 2·8·n², Cholesky; 8·n², eigen  | 2·8·r², or 8·r²             | 0        |

The exact head is a diagonal (8·n) minus low rank. Small algebra counts as float64: whether float32 is enough is up to κ, which
shapes do not tell, so `use` is an upper bound for factors that are not stored in float64.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

import torch

from gramian.curvature.moments import Keep
from gramian.curvature.policy import representation
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.columns import BLOCK
from gramian.linalg.eigen import WORKSPACE
from gramian.linalg.stored import HALF

MANY = 2**62
"""Tokens, where any number of them may come."""
DOUBLE = 8


@dataclass(frozen=True)
class Shape:
    """A factor before it exists."""

    kind: Literal["dense", "low rank", "diagonal", "diagonal plus low rank", "diagonal minus low rank"]
    side: int
    columns: int
    """r; of a dense one or a diagonal its side."""
    storage: torch.dtype
    extra: int = 0
    """Bytes of scales and of a diagonal beside columns."""

    def __str__(self) -> str:
        """As a table shows it."""
        return f"{self.kind} {self.columns:,}" if "low rank" in self.kind else self.kind

    @property
    def rest(self) -> int:
        """Bytes at rest."""
        if self.kind == "diagonal":
            return self.side * self.storage.itemsize
        return self.side * self.columns * self.storage.itemsize + self.extra

    def using(self, decomposed: bool, itemsize: int) -> tuple[int, int, int]:
        """Bytes of its use: while all factors wait for their factorisations, afterwards, and of work one at a time."""
        if self.kind == "diagonal":
            return 0, 0, 0
        thin = self.kind != "dense"
        small = (DOUBLE if "diagonal" in self.kind or (thin and decomposed) else itemsize) * self.columns**2
        gram = DOUBLE * self.columns**2 if thin else 0
        loaded = 3 * DOUBLE * min(self.side * self.columns, BLOCK) if thin else 0
        if not decomposed:
            return max(2 * small, gram), small, gram + loaded if thin else small
        if "diagonal" in self.kind:  # shifted inverses, one at a time
            return 0, 0, 3 * small + loaded
        return small, small, (WORKSPACE + (2 if thin else 0)) * small + loaded


def dense(side: int, storage: torch.dtype, summed: bool = False) -> Shape:
    """A matrix; `summed`: an average of several, which is never in half precision."""
    storage = torch.float32 if summed and storage in HALF else storage
    return Shape("dense", side, side, storage, 8 * side if storage in HALF else 0)


def low_rank(side: int, columns: int, storage: torch.dtype) -> Shape:
    """Columns with their scales."""
    return Shape("low rank", side, columns, storage, 8 * columns)


def diagonal(side: int, wide: int) -> Shape:
    """Numbers in the dtype of sums."""
    return Shape("diagonal", side, side, torch.float64 if wide == DOUBLE else torch.float32)


def merged(left: Shape, right: Shape) -> Shape:
    """What `Factor.merge` makes of two."""
    if left.kind == right.kind == "diagonal":
        return left
    storage = (right if left.kind == "diagonal" else left).storage
    columns = sum(shape.columns for shape in (left, right) if "low rank" in shape.kind)
    whole = "dense" in (left.kind, right.kind) or left.side <= columns and left.side <= WIDEST_DENSE
    if whole:
        return dense(left.side, storage, summed=True)
    values = [shape for shape in (left, right) if "diagonal" in shape.kind]
    if not values:
        return low_rank(left.side, columns, storage)
    minus = any("minus" in shape.kind for shape in values)
    width = DOUBLE if minus else values[0].storage.itemsize
    kind: Literal["diagonal plus low rank", "diagonal minus low rank"] = (
        "diagonal minus low rank" if minus else "diagonal plus low rank"
    )
    return Shape(kind, left.side, columns, storage, 8 * columns + width * left.side)


@dataclass(frozen=True)
class Form:
    """What the bytes of a block follow from, beside what it keeps."""

    kind: str
    """As of its `Spec`."""
    inputs: int
    outputs: int
    bias: bool
    linear: bool
    """Whether a layer multiplies by the weight."""
    table: bool
    """Whether a layer looks it up."""
    transposed: bool
    """Whether the lookup is by outputs: a table tied to a head."""
    exact: bool
    """Whether G is the head's own Fisher."""
    shared: bool
    """Whether A is another block's."""
    activation: int
    """a."""
    wide: int
    """w."""
    storage: torch.dtype
    algebra: int
    """Bytes of a number in small systems."""
    averaged: int
    """Columns that an average over refreshes keeps; 0: there is none."""
    decomposed: bool
    """Whether its use needs eigenvectors."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a block."""

    collect: int = 0
    build: int = 0
    """On top, while tokens are added or a factor is made: of one block at a time."""
    rest_A: int = 0
    rest_G: int = 0
    settled_A: int = 0
    """At rest once averages over refreshes have grown."""
    settled_G: int = 0
    use_A: int = 0
    use_G: int = 0
    held_A: int = 0
    held_G: int = 0
    work: int = 0
    apply: int = 0
    """While a vector is multiplied: of one block at a time."""

    @property
    def rest(self) -> int:
        """Of both sides."""
        return self.rest_A + self.rest_G


@dataclass(frozen=True)
class Outline:
    """A block with its factors."""

    A: Shape | None
    G: Shape
    footprint: Footprint


@lru_cache(maxsize=4096)
def outline(form: Form, keeps: tuple[Keep, Keep, Keep], tokens: int, table_tokens: int) -> Outline:
    """The factors of a block and their bytes.

    Args:
        form: of the block.
        keeps: what is kept of A, of G and of a table's gradients.
        tokens: T that the weight multiplies.
        table_tokens: T that look it up.
    """
    if form.kind != "kronecker":
        return _outside(form)
    keep_A, keep_G, keep_table = keeps
    collect, build, sides = 0, [0], {}
    if form.linear:
        if not form.shared:
            sides["A"] = _side(form, form.inputs, keep_A, tokens, form.bias)
        sides["G"] = (_softmax if form.exact else _side)(form, form.outputs, keep_G, tokens, False)
    if form.table:
        width, rows = (form.inputs, form.outputs) if form.transposed else (form.outputs, form.inputs)
        sides["table"] = _side(form, width, keep_table, table_tokens, False)
        sides["counts"] = (diagonal(rows, form.wide), rows * form.wide, 2 * rows * form.wide)
    collect = sum(held for _, held, _ in sides.values())
    build += [work for *_, work in sides.values()]
    shapes = {name: shape for name, (shape, *_) in sides.items()}
    if form.linear and form.table:
        apart = sum(shape.rest for shape in shapes.values())
        A = merged(shapes["A"], shapes["table"]) if "A" in shapes else None
        G = merged(shapes["G"], shapes["counts"])
        whole = [shape.side**2 * form.wide for shape in (A, G) if shape is not None and shape.kind == "dense"]
        build.append(apart + 3 * max(whole, default=0))
    elif form.linear:
        A, G = shapes.get("A"), shapes["G"]
    else:
        A, G = shapes["counts"], shapes["table"]
        A, G = (G, A) if form.transposed else (A, G)
    return Outline(A, G, _footprint(form, A, G, keeps, collect, max(build)))


def bound(form: Form, keeps: tuple[Keep, Keep, Keep]) -> Footprint:
    """The most that any number of tokens can take, field by field."""
    counts = {MANY}
    for keep in keeps:
        counts |= {count for count in (keep.rows_up_to, keep.limit) if count}
    found = [outline(form, keeps, count, count).footprint for count in counts]
    return Footprint(*(max(getattr(one, field.name) for one in found) for field in fields(Footprint)))


# ---- one side --------------------------------------------------------------------------------------------------------

_Side = tuple[Shape, int, int]
"""What it becomes, bytes while tokens arrive, and bytes on top of both while it is made."""


def _side(form: Form, width: int, keep: Keep, tokens: int, bias: bool) -> _Side:
    """Σ w x xᵀ, with a last input of 1 if there is a bias."""
    a, w, n = form.activation, form.wide, width - bias
    kept = tokens if keep.limit is None else min(tokens, keep.limit)
    what = representation(keep, kept)
    if what == "diagonal":
        return diagonal(width, w), 2 * w * n, 4 * w * n
    if what == "dense" and keep.limit is None:
        made = w * width**2 * (3 if bias else 1) + _storing(form, width**2, w)
        return dense(width, form.storage), w * n**2 + w * n, max(2 * w * n**2, made)
    rows, held = kept * width, a * kept * n + (8 * kept if keep.limit is not None else 0)
    if what == "dense":
        copies = a * rows * bias + (2 * w * rows if a < w else 0)
        return dense(width, form.storage), held, copies + 2 * w * width**2 + _storing(form, width**2, w)
    return low_rank(width, kept, form.storage), held, 2 * w * rows + _storing(form, rows, a)


def _softmax(form: Form, width: int, keep: Keep, tokens: int, bias: bool) -> _Side:
    """Σ w (diag p − p pᵀ) from probabilities."""
    w = form.wide
    kept = tokens if keep.limit is None else min(tokens, keep.limit)
    what = representation(keep, kept)
    if what == "diagonal":
        return diagonal(width, w), 2 * w * width, 4 * w * width
    if what == "dense" and keep.limit is None:
        made = 3 * w * width**2 + _storing(form, width**2, w)
        return dense(width, form.storage), w * width**2 + w * width, max(2 * w * width**2, made)
    rows, held = kept * width, w * kept * (width + 1) + (8 * kept if keep.limit is not None else 0)
    seen = 4 * w * rows
    if what == "dense":
        return dense(width, form.storage), held, max(seen, 2 * w * rows + 3 * w * width**2)
    extra = 8 * width + (4 * kept if form.storage in HALF else 0)
    shape = Shape("diagonal minus low rank", width, kept, form.storage, extra)
    return shape, held, max(seen, 2 * w * rows + _storing(form, rows, w))


def _storing(form: Form, entries: int, itemsize: int) -> int:
    """Bytes on top of the body while a matrix is rounded to its storage and the error of that is measured."""
    if form.storage in HALF:
        return (12 + (4 if itemsize < 4 else 0) if form.wide < DOUBLE else 16) * entries
    return 16 * entries if form.storage.itemsize < itemsize else 0


def _outside(form: Form) -> Outline:
    """A block that is no Kronecker product."""
    n, w = form.outputs, form.wide
    if form.kind == "block":
        shape, sums = dense(n, form.storage), w * n * n
        return Outline(None, shape, _footprint(form, None, shape, (Keep(),) * 3, sums, 2 * sums + 12 * n * n))
    shape = diagonal(n, w)
    return Outline(None, shape, _footprint(form, None, shape, (Keep(),) * 3, w * n, 2 * w * n))


# ---- a block ---------------------------------------------------------------------------------------------------------


def _footprint(
    form: Form, A: Shape | None, G: Shape, keeps: tuple[Keep, Keep, Keep], collect: int, build: int
) -> Footprint:
    found = {"A": [0, 0, 0, 0], "G": [0, 0, 0, 0]}
    work = [0]
    for side, shape, keep in (("A", A, keeps[0]), ("G", G, keeps[1])):
        if shape is not None:
            settled = [shape] if not form.averaged else [shape, *_settled(shape, keep, form.averaged)]
            uses = [one.using(form.decomposed, form.algebra) for one in settled]
            found[side] = [shape.rest, max(one.rest for one in settled), *(max(u[i] for u in uses) for i in (0, 1))]
            work += [use[2] for use in uses]
    (rest_A, settled_A, use_A, held_A), (rest_G, settled_G, use_G, held_G) = found["A"], found["G"]
    return Footprint(
        collect, build, rest_A, rest_G, settled_A, settled_G, use_A, use_G, held_A, held_G, max(work),
        _applying(form, A, G),
    )  # fmt: skip


def _settled(shape: Shape, keep: Keep, most_columns: int) -> list[Shape]:
    """What averages over refreshes grow to: most columns first, then, where it may be, a matrix."""
    if shape.kind == "diagonal":
        return []
    if shape.kind == "dense":
        return [dense(shape.side, shape.storage, summed=True)]
    bounded = bool(keep.why) and keep.limit is not None
    most = keep.limit if bounded and keep.limit is not None else most_columns
    scales = 8 * most + (DOUBLE * shape.side if "diagonal" in shape.kind else 0)
    grown = replace(shape, columns=most, extra=scales)
    if bounded or shape.side > WIDEST_DENSE:
        return [grown]
    return [replace(grown, columns=min(most, shape.side - 1)), dense(shape.side, shape.storage, summed=True)]


def _applying(form: Form, A: Shape | None, G: Shape) -> int:
    """Y and what becomes of it, products with columns, and the inverse of a small system that is formed on first use."""
    o, m = form.outputs, form.inputs if form.kind == "kronecker" else 1
    total = (10 if form.decomposed and "diagonal " in G.kind else 5) * DOUBLE * o * m
    for shape, others in ((A, o), (G, m)):
        if shape is not None and shape.kind != "diagonal":
            total += 2 * DOUBLE * shape.columns * others
            loaded = 2 * DOUBLE * min(shape.side * shape.columns, BLOCK)
            inverse = 2 * DOUBLE * shape.columns**2 if not form.decomposed and 2 * others >= shape.columns else 0
            total += max(loaded, inverse)
    return total
