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

EK-FAC keeps every token of both sides to the end of a refresh, a·T·(o + m) on top of `collect`, finds its eigenvectors then,
and has r·s eigenvalues of its own at rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from gramian.curvature.blocks.representation import representation
from gramian.curvature.estimate.token_moments import Keep
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.factors.eigendecomposition import WORKSPACE
from gramian.linalg.factors.stored import HALF
from gramian.linalg.wide import piece_entries

EKFAC_CHUNK = 1 << 24
"""Entries of per-sample matrices that EK-FAC forms at once, where one sample has fewer."""
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
    spread: int = 1
    """Processes that share its rows."""

    def __str__(self) -> str:
        """As a table shows it."""
        return f"{self.kind} {self.columns:,}" if "low rank" in self.kind else self.kind

    @property
    def rest(self) -> int:
        """Bytes at rest."""
        if self.kind == "diagonal":
            return self.side * self.storage.itemsize
        return self.here * self.columns * self.storage.itemsize + self.extra

    @property
    def here(self) -> int:
        """Rows on one process: on the one with most."""
        return -(-self.side // self.spread)

    @property
    def fetched(self) -> int:
        """Bytes of the two blocks of U that are on a GPU at once, where U lies in host memory."""
        return 0 if self.kind in ("dense", "diagonal") else 2 * self.storage.itemsize * self._piece

    @property
    def visiting(self) -> int:
        """Bytes of the Gram of such a U on that GPU, and of a block of it, weighted."""
        return 0 if self.kind in ("dense", "diagonal") else DOUBLE * self.small + 2 * self.loaded(DOUBLE)

    @property
    def traced(self) -> int:
        """Bytes of a block of U in float64, while its trace is summed."""
        return 0 if self.kind in ("dense", "diagonal") else self.loaded(DOUBLE)

    @property
    def _piece(self) -> int:
        return piece_entries(self.here, self.columns)

    @property
    def small(self) -> int:
        """Entries of the matrix that is factorised."""
        return self.columns**2

    def loaded(self, itemsize: int) -> int:
        """Bytes of a block of U, or of M, in the dtype of products: widened and scaled, one copy."""
        if self.kind == "dense":
            return itemsize * self.small * int(self.storage.itemsize != itemsize)
        return itemsize * self._piece

    def solving(self, itemsize: int) -> "BlockUse":
        """Bytes of its Cholesky factorisation, small algebra in numbers of this size."""
        if self.kind == "diagonal":
            return BlockUse()
        if self.kind == "dense":
            copies = self.loaded(itemsize)
            bounding = self.loaded(4) + (DOUBLE * self.small if self.storage != torch.float64 else 0)
            held = itemsize * self.small
            return BlockUse(0, bounding, 2 * held, max(copies - held, 0), held)
        gram, loaded = DOUBLE * self.small, self.loaded(DOUBLE)
        weighted = 2 * loaded
        if "minus" in self.kind:  # its bound is that of the diagonal
            return BlockUse(0, 0, 2 * gram, weighted, gram)
        if "plus" in self.kind:  # the plain Gram is not what is factorised, and stays
            return BlockUse(gram, loaded, 3 * gram, weighted, 2 * gram)
        held = itemsize * self.small
        summed = gram if self.spread > 1 else 0  # those of all processes, beside that of this one
        return BlockUse(gram, max(loaded, summed), 2 * held, gram - held, held)

    def decomposing(self, itemsize: int) -> "BlockUse":
        """Bytes of its eigenvectors."""
        if self.kind == "diagonal":
            return BlockUse()
        if self.kind == "dense":
            held = itemsize * (self.small + self.side)
            return BlockUse(0, 0, held, (WORKSPACE - 1) * held + self.loaded(itemsize), held)
        gram, loaded = DOUBLE * (self.small + self.columns), self.loaded(DOUBLE)
        if "diagonal" in self.kind:  # no eigenvectors: shifted systems, one at a time
            kept = gram if "plus" in self.kind else 0
            return BlockUse(0, 0, kept, 3 * gram + 2 * loaded, kept)
        return BlockUse(0, 0, gram, max(WORKSPACE * gram, loaded), gram)


class BlockUse(NamedTuple):
    """Bytes of a factor's first use."""

    gram: int = 0
    """That all factors hold at once when their bounds are known."""
    bounding: int = 0
    """On top, of one at a time, while they become known."""
    together: int = 0
    """That all hold at once when their factorisations are launched and nobody has looked."""
    work: int = 0
    """On top, of one at a time, while they are."""
    held: int = 0
    """That stays."""


def dense(side: int, storage: torch.dtype, summed: bool = False) -> Shape:
    """A matrix; `summed`: an average of several, which is never in half precision."""
    storage = torch.float32 if summed and storage in HALF else storage
    return Shape("dense", side, side, storage, 8 * side if storage in HALF else 0)


def low_rank(side: int, columns: int, storage: torch.dtype, spread: int = 1) -> Shape:
    """Columns with their scales."""
    return Shape("low rank", side, columns, storage, 8 * columns, spread)


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
        return low_rank(left.side, columns, storage, max(left.spread, right.spread))
    minus = any("minus" in shape.kind for shape in values)
    width = DOUBLE if minus else values[0].storage.itemsize
    kind: Literal["diagonal plus low rank", "diagonal minus low rank"] = (
        "diagonal minus low rank" if minus else "diagonal plus low rank"
    )
    spread = max(left.spread, right.spread)
    return Shape(kind, left.side, columns, storage, 8 * columns + width * left.side, spread)


@dataclass(frozen=True)
class StoredForm:
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
    processes: int = 1
    """W that share the tokens."""
    reduction: str = ""
    """How they join rows: "gram", "gather" or "dense"."""
    corrected: bool = False
    """Whether EK-FAC measures eigenvalues of its own."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of A, of G and of a table's gradients."""
        return self.inputs, self.outputs, self.inputs if self.transposed else self.outputs


@dataclass(frozen=True)
class Footprint:
    """Bytes of a block."""

    collect: int = 0
    build: int = 0
    """On top, while tokens are added or a factor is made: of one block at a time."""
    joined: int = 0
    """On top of both until the last factor is made: products of inputs with their bias, which layers may share."""
    rest_A: int = 0
    rest_G: int = 0
    settled_A: int = 0
    """At rest once averages over refreshes have grown."""
    settled_G: int = 0
    use_A: BlockUse = BlockUse()
    use_G: BlockUse = BlockUse()
    apply: int = 0
    """While a vector is multiplied: of one block at a time."""
    visiting: int = 0
    """On the layer's GPU while Grams are made of factors kept elsewhere."""
    fetched: int = 0
    """On top there, where factors come from elsewhere: of the blocks on their way."""
    correcting: int = 0
    """On top of tokens, factors and eigenvectors while EK-FAC measures: of one block at a time."""

    @property
    def rest(self) -> int:
        """Of both sides."""
        return self.rest_A + self.rest_G

    @property
    def works(self) -> tuple[int, int]:
        """On top of what all factors hold, of either side."""
        return max(self.use_A.bounding, self.use_A.work), max(self.use_G.bounding, self.use_G.work)


@dataclass(frozen=True)
class Outline:
    """A block with its factors."""

    A: Shape | None
    G: Shape
    footprint: Footprint


class Counts(NamedTuple):
    """Tokens of a block, on all processes."""

    inputs: int
    """That enter A."""
    outputs: int
    """That enter G: as many, or, of an exact head whose inputs are means over samples, more."""
    table: int
    """That look the weight up."""
    calls: int = 1
    """Times that a sample meets the weight: its tokens at one position stay or go together where a subset is kept."""
    lookups: int = 1


@lru_cache(maxsize=4096)
def outline(form: StoredForm, keeps: tuple[Keep, Keep, Keep], counts: Counts) -> Outline:
    """The factors of a block and their bytes.

    Args:
        form: of the block.
        keeps: what is kept of A, of G and of a table's gradients.
        counts: of the tokens that it meets.
    """
    if form.kind != "kronecker":
        return _outside(form)
    keep_A, keep_G, keep_table = keeps
    sides = {}
    if form.linear:
        sides["A"] = _side(form, form.inputs, keep_A, counts.inputs, counts.calls, form.bias)
        make = _softmax if form.exact else _side
        sides["G"] = make(form, form.outputs, keep_G, counts.outputs, counts.calls, False)
    if form.table:
        width, rows = (form.inputs, form.outputs) if form.transposed else (form.outputs, form.inputs)
        sides["table"] = _side(form, width, keep_table, counts.table, counts.lookups, False)
        sides["counts"] = (diagonal(rows, form.wide), rows * form.wide, 2 * rows * form.wide)
    own = [side for name, side in sides.items() if name != "A" or not form.shared]
    collect, build = sum(held for _, held, _ in own), [work for *_, work in own]
    collect += _samples(form, counts)
    shapes = {name: shape for name, (shape, *_) in sides.items()}
    if form.linear and form.table:
        apart = sum(shape.rest for shape in shapes.values())
        A, G = merged(shapes["A"], shapes["table"]), merged(shapes["G"], shapes["counts"])
        build.append(apart + max(_summing_up(form, shape) for shape in (A, G)))
        limits = (keep_table if keep_table.why else keep_A, keep_G)
    elif form.linear:
        A, G, limits = shapes["A"], shapes["G"], (keep_A, keep_G)
    else:
        A, G, limits = shapes["counts"], shapes["table"], (keep_table, keep_table)
        A, G = (G, A) if form.transposed else (A, G)
    found = Outline(A, G, _footprint(form, A, G, limits, collect, max(build)))
    return _corrected(form, found, counts) if form.corrected else found


def bound(form: StoredForm, keeps: tuple[Keep, Keep, Keep]) -> Footprint:
    """The most that any number of tokens can take, field by field."""
    counts = {MANY}
    for keep in keeps:
        counts |= {share * count for count in (keep.rows_up_to, keep.limit) if count for share in {1, form.processes}}
    found = [outline(form, keeps, Counts(count, count, count)).footprint for count in counts]
    sides = [_largest([getattr(one, side) for one in found]) for side in ("use_A", "use_G")]
    numbers = (
        "collect",
        "build",
        "joined",
        "rest_A",
        "rest_G",
        "settled_A",
        "settled_G",
        "apply",
        "visiting",
        "fetched",
        "correcting",
    )
    most = {name: max(getattr(one, name) for one in found) for name in numbers}
    return Footprint(use_A=sides[0], use_G=sides[1], **most)


# ---- one side --------------------------------------------------------------------------------------------------------

_Side = tuple[Shape, int, int]
"""What it becomes, bytes while tokens arrive, and bytes on top of both while it is made."""


def _side(form: StoredForm, width: int, keep: Keep, tokens: int, together: int, bias: bool) -> _Side:
    """Σ w x xᵀ, with a last input of 1 if there is a bias."""
    a, w, n = form.activation, form.wide, width - bias
    local = -(-tokens // form.processes)
    kept, mine = (_kept(count, keep, together) for count in (tokens, local))
    what = _joined_form(form, width, keep, kept)
    if what == "diagonal":
        return diagonal(width, w), 2 * w * n, 4 * w * n
    if keep.limit is None and mine > keep.rows_up_to:
        made = w * width**2 * (3 if bias else 1) + _storing(form, width, width, w) + _summing(form, width)
        return dense(width, form.storage), w * n**2 + w * n, max(2 * w * n**2, made)
    held = a * mine * n + (8 * mine if keep.limit is not None else 0)
    chosen = a * mine * n if local > mine else 0  # rows that stay, beside those they are chosen from
    if what == "dense":
        written = w * mine * width + 2 * w * piece_entries(mine, width)
        made = max(written + w * width**2, 2 * w * width**2 + _storing(form, width, width, w)) + _summing(form, width)
        return dense(width, form.storage), held, max(chosen, made)
    shape = low_rank(width, kept, form.storage, _spread(form))
    return shape, held, max(chosen, _joining(form, shape, mine, w, a), _storing(form, shape.here, kept, a))


def _kept(tokens: int, keep: Keep, together: int) -> int:
    """How many of them stay, where so many go together."""
    if keep.limit is None or tokens <= keep.limit:
        return tokens
    return max(keep.limit - keep.limit % together, together)


def _joined_form(form: StoredForm, width: int, keep: Keep, kept: int) -> str:
    """The form of a side of all processes' tokens."""
    what = representation(keep, kept)
    as_matrix = form.processes > 1 and form.reduction == "dense" and width <= WIDEST_DENSE and not keep.why
    return "dense" if what == "low rank" and as_matrix else what


def _spread(form: StoredForm) -> int:
    return form.processes if form.reduction == "gram" else 1


def _summing(form: StoredForm, width: int) -> int:
    """Bytes of the sum over processes, beside this one's product."""
    return form.wide * width**2 if form.processes > 1 else 0


def _joining(form: StoredForm, shape: Shape, mine: int, written: int, sent: int) -> int:
    """Bytes of rows on their way: written down, laid out as they travel, and those of all processes."""
    if form.processes == 1:
        return 0
    return mine * shape.side * (written + sent) + sent * shape.here * shape.columns


def _softmax(form: StoredForm, width: int, keep: Keep, tokens: int, together: int, bias: bool) -> _Side:
    """Σ w (diag p − p pᵀ) from probabilities."""
    w = form.wide
    local = -(-tokens // form.processes)
    kept, mine = (_kept(count, keep, together) for count in (tokens, local))
    what = _joined_form(form, width, keep, kept)
    if what == "diagonal":
        return diagonal(width, w), 2 * w * width, 4 * w * width
    if keep.limit is None and mine > keep.rows_up_to:
        made = 3 * w * width**2 + _storing(form, width, width, w) + _summing(form, width)
        return dense(width, form.storage), w * width**2 + w * width, max(2 * w * width**2, made)
    rows, held = mine * width, w * mine * (width + 1) + (8 * mine if keep.limit is not None else 0)
    seen = 2 * w * rows + 4 * w * piece_entries(mine, width)  # logits, or rows that are chosen; what is checked
    seen += w * width * form.inputs if form.activation < w else 0  # the weight, widened
    if what == "dense":
        return dense(width, form.storage), held, max(seen, 2 * w * rows + 3 * w * width**2 + _summing(form, width))
    shape = Shape("diagonal minus low rank", width, kept, form.storage, DOUBLE * (width + kept), _spread(form))
    made = max(_joining(form, shape, mine, w, w), _storing(form, shape.here, kept, w), shape.loaded(DOUBLE))
    return shape, held, max(seen, made)


def _storing(form: StoredForm, side: int, columns: int, itemsize: int) -> int:
    """Bytes on top of the body while a matrix is stored and the error of that is measured: of a piece of its columns.

    It is put together, widened, rounded (and back), and its norm is summed in float64.
    """
    w = form.wide
    if form.storage in HALF:
        each = (itemsize if itemsize < w else 0) + 2 * w + (DOUBLE if w < DOUBLE else 0)
    else:
        each = 2 * w if form.storage.itemsize < w else w
    return each * piece_entries(columns, side)


def _outside(form: StoredForm) -> Outline:
    """A block that is no Kronecker product."""
    n, w = form.outputs, form.wide
    if form.kind == "block":
        shape, sums = dense(n, form.storage), w * n * n
        return Outline(None, shape, _footprint(form, None, shape, (Keep(), Keep()), sums, 2 * sums + 12 * n * n))
    shape = diagonal(n, w)
    return Outline(None, shape, _footprint(form, None, shape, (Keep(), Keep()), w * n, 2 * w * n))


# ---- a block ---------------------------------------------------------------------------------------------------------


def _footprint(
    form: StoredForm, A: Shape | None, G: Shape, limits: tuple[Keep, Keep], collect: int, build: int
) -> Footprint:
    """`limits`: what was kept of A and of G, which is what their averages keep."""
    grown: list[list[Shape]] = []
    rests, settled, uses = [], [], []
    for shape, keep in zip((A, G), limits, strict=True):
        forms = [] if shape is None else [shape, *(_settled(shape, keep, form.averaged) if form.averaged else ())]
        grown.append(forms)
        own = [] if shape is A and form.shared else forms
        build = max(build, *(one.traced for one in own), *(_averaging(form, one) for one in own[1:]), 0)
        rests.append(own[0].rest if own else 0)
        settled.append(max((one.rest for one in own), default=0))
        asked = [one.decomposing(form.algebra) if form.decomposed else one.solving(form.algebra) for one in own]
        uses.append(_largest(asked) if asked else BlockUse())
    shapes = [*grown[0], *grown[1]]
    return Footprint(
        collect,
        build,
        0 if form.shared else _joined(form, A),
        rests[0],
        rests[1],
        settled[0],
        settled[1],
        uses[0],
        uses[1],
        max(_applying(form, a, g) for a in (*grown[0], *[None] * (A is None)) for g in grown[1]),
        max(shape.visiting for shape in shapes),
        max(shape.fetched for shape in shapes),
    )


# ---- EK-FAC ----------------------------------------------------------------------------------------------------------


def _local(form: StoredForm, counts: Counts) -> tuple[int, int]:
    """Tokens of this process that meet the weight, and that look it up."""
    return -(-counts.outputs // form.processes), -(-counts.table // form.processes)


def _samples(form: StoredForm, counts: Counts) -> int:
    """Bytes of the tokens that are kept until eigenvalues are measured; an input that layers share is kept once."""
    if not form.corrected or counts.outputs >= MANY:
        return 0  # of any number of tokens nothing can be said
    met, looked = _local(form, counts)
    width = form.inputs - form.bias
    if form.exact:
        linear = form.wide * met * (width + form.outputs + 1)
    else:
        linear = form.activation * met * ((0 if form.shared else width) + form.outputs)
    return linear * form.linear + looked * (DOUBLE + form.activation * form.widths[2]) * form.table


def _corrected(form: StoredForm, found: Outline, counts: Counts) -> Outline:
    """With EK-FAC's eigenvalues at rest, and what is held while they are measured."""
    A, G, one = found.A, found.G, found.footprint
    assert A is not None
    if any("diagonal " in shape.kind and shape.side > WIDEST_DENSE for shape in (A, G)):
        return found
    written = [
        replace(shape, kind="dense", columns=shape.side) if "diagonal " in shape.kind else shape for shape in (A, G)
    ]
    ranks = [min(shape.columns, shape.side) for shape in written]
    w, entries = max(form.wide, found.G.storage.itemsize), ranks[0] * ranks[1]
    tokens = 0 if counts.outputs >= MANY else sum(_local(form, counts))
    rows = w * tokens * (form.inputs + form.outputs + sum(ranks))
    chunk = 2 * w * max(entries, min(EKFAC_CHUNK, entries * max(tokens, 1)))
    grams = 3 * w * min(tokens**2, max(EKFAC_CHUNK, tokens))
    uses = [one.use_A, one.use_G]
    for i, shape in enumerate((A, G)):
        if "diagonal " in shape.kind:
            uses[i] = written[i].decomposing(form.algebra)
    values = w * entries
    return replace(
        found,
        footprint=replace(
            one,
            rest_G=one.rest_G + values,
            settled_G=one.settled_G + values,
            use_A=uses[0],
            use_G=uses[1],
            correcting=rows + chunk + grams + values,
        ),
    )


def _joined(form: StoredForm, A: Shape | None) -> int:
    """Bytes of A's sums once a bias is part of them; without one they are the sums as they are."""
    return form.wide * A.small if A is not None and form.bias and A.kind == "dense" else 0


def _largest(uses: Sequence[BlockUse]) -> BlockUse:
    """Field by field."""
    return BlockUse(*(max(values) for values in zip(*uses, strict=True)))


def _settled(shape: Shape, keep: Keep, most_columns: int) -> list[Shape]:
    """What averages over refreshes grow to: most columns first, then, where it may be, a matrix."""
    if shape.kind == "diagonal":
        return []
    if shape.kind == "dense":
        return [dense(shape.side, shape.storage, summed=True)]
    allowed = keep.limit if keep.why else None
    thin = allowed is not None or shape.side > WIDEST_DENSE
    most = allowed or (most_columns if thin else min(most_columns, shape.side - 1))
    values = DOUBLE * shape.side if "diagonal" in shape.kind else 0
    grown = replace(shape, columns=most, extra=8 * most + values)
    return [grown] if thin else [grown, dense(shape.side, shape.storage, summed=True)]


def _averaging(form: StoredForm, grown: Shape) -> int:
    """Bytes on top of an average while it is made of what was there and what is new."""
    if grown.kind == "dense":
        return _summing_up(form, grown)
    return grown.rest + grown.traced  # the columns that stay of both, before they stand side by side


def _summing_up(form: StoredForm, shape: Shape) -> int:
    """Bytes on top of a sum of two matrices while it is made: one of them, written out, and a piece while they are measured."""
    if shape.kind != "dense":
        return 0
    return max(form.wide, shape.storage.itemsize) * shape.small + DOUBLE * piece_entries(shape.side, shape.side)


def _applying(form: StoredForm, A: Shape | None, G: Shape) -> int:
    """Y and what becomes of it, products with columns, and the inverse of a small system that is formed on first use."""
    o, m = form.outputs, form.inputs if form.kind == "kronecker" else 1
    double = any(shape is not None and "diagonal " in shape.kind for shape in (A, G))
    if form.decomposed and A is not None:
        return _applying_jointly(form, A, G, (DOUBLE if double else form.algebra) * o * m)
    whole = (form.wide if form.storage in HALF else form.algebra) * o * m
    steps, before = [whole], whole  # a copy of Y where it is widened or gets its bias
    for shape, others in ((G, m), (A, o)):
        if shape is None:
            continue
        if shape.kind == "diagonal":
            steps.append(before + whole)
        else:
            e = DOUBLE if double else form.algebra
            thin, r = shape.kind != "dense", shape.columns
            each = others if form.decomposed else piece_entries(others, shape.side) // shape.side  # columns at a time
            result = whole if each < others else 0
            inverse = 0 if form.decomposed else e * shape.small * (2 if 2 * each >= r else 1)  # or a copy for a solve
            inner, loaded = 2 * e * r * each, shape.loaded(e) if thin or form.decomposed else 0
            full = e * shape.side * each * (3 if "diagonal" in shape.kind else 2)
            made = max(inverse + inner, loaded + inner, (inner // 2 + full) if thin else inner)
            steps.append(before + result + made)
        before = 2 * whole
    return max(steps)


def _applying_jointly(form: StoredForm, A: Shape, G: Shape, whole: int) -> int:
    """In both bases; a head without eigenvectors by conjugate gradients, nine vectors for every one of A's."""
    if "diagonal " in G.kind:
        return 9 * DOUBLE * G.side * min(A.columns, A.side) + 4 * DOUBLE * form.outputs * form.inputs
    inner = 4 * DOUBLE * G.columns * A.columns
    loaded = max(shape.loaded(form.algebra) for shape in (A, G))
    return 3 * whole + max(inner, loaded)
