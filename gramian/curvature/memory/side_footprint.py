"""Bytes of one side (A or G) of a block while tokens are collected and while its factor is built.

Legend: n width of the side, k tokens that are stored, a and w bytes of a number in activations and in sums.

| representation | collected | built, on top |
|---|---|---|
| dense | w·n² + w·n | 2·w·n² or more: the product of a pass, the bias, the copy that is stored |
| low rank | a·k·n (and 8·k for the keys of a subset) | pieces of the stored columns, rows in transit between processes |
| diagonal | 2·w·n | 4·w·n |
"""

from typing import NamedTuple

from gramian.core.dtypes import HALF
from gramian.curvature.blocks.representation import representation
from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.memory.block_form import BlockForm
from gramian.curvature.memory.factor_shape import DOUBLE, FactorShape, dense, diagonal, low_rank
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import piece_entries


class SideFootprint(NamedTuple):
    """The factor that one side of a block becomes, and the bytes until it is built."""

    shape: FactorShape
    collect: int
    """Bytes of stored tokens or sums while tokens arrive."""
    build: int
    """Bytes on top of `collect`, while tokens are added or the factor is built."""


def side_footprint(
    form: BlockForm,
    width: int,
    keep: StoragePolicy,
    tokens: int,
    together: int,
    bias: bool = False,
    exact: bool = False,
) -> SideFootprint:
    """Bytes of one side, Σ w x xᵀ over the `tokens` of all processes; `exact`: Σ w (diag p − p pᵀ) of a softmax head.

    `together`: number of tokens with the same random key (a module called several times), of which a subset stores all or
    none; `bias`: the last of the `width` inputs is the constant 1.
    """
    local = form.local(tokens)
    kept, mine = (_kept(count, keep, together) for count in (tokens, local))
    w, n = form.wide, width - bias
    kind = _joined_representation(form, width, keep, kept)
    if kind == "diagonal":
        return SideFootprint(diagonal(width, w), 2 * w * n, 4 * w * n)
    summed = w * width**2 if form.processes > 1 else 0  # the sum over processes, beside this process's product
    if keep.limit is None and mine > keep.rows_up_to:
        build = w * width**2 * (3 if bias or exact else 1) + _storing(form, width, width, w) + summed
        return SideFootprint(dense(width, form.storage), w * n**2 + w * n, max(2 * w * n**2, build))
    keys = 8 * mine if keep.limit is not None else 0
    if exact:
        return _softmax_rows(form, width, kept, mine, keys, summed, kind == "dense")
    a = form.activation
    collect = a * mine * n + keys
    chosen = a * mine * n if local > mine else 0  # the rows of a subset, beside those they are chosen from
    if kind == "dense":
        product = w * mine * width + 2 * w * piece_entries(mine, width) + w * width**2
        build = max(product, 2 * w * width**2 + _storing(form, width, width, w)) + summed
        return SideFootprint(dense(width, form.storage), collect, max(chosen, build))
    shape = low_rank(width, kept, form.storage, form.row_processes)
    build = max(chosen, _in_transit(form, shape, mine, w, a), _storing(form, shape.local_rows, kept, a))
    return SideFootprint(shape, collect, build)


def _softmax_rows(
    form: BlockForm, width: int, kept: int, mine: int, keys: int, summed: int, as_matrix: bool
) -> SideFootprint:
    """Bytes of an exact head's G: the softmax outputs of `mine` tokens are stored on this process, of `kept` on all together.

    `keys`: bytes of random keys; `summed`: bytes of a sum over processes; `as_matrix`: G is dense, else low rank.
    """
    w, rows = form.wide, mine * width
    collect = w * mine * (width + 1) + keys
    seen = 2 * w * rows + 4 * w * piece_entries(mine, width)  # logits, or chosen rows; their check for finite numbers
    seen += w * width * form.inputs if form.activation < w else 0  # the weight in the dtype of sums
    if as_matrix:
        build = max(seen, 2 * w * rows + 3 * w * width**2 + summed)
        return SideFootprint(dense(width, form.storage), collect, build)
    extra = DOUBLE * (width + kept)
    shape = FactorShape("diagonal minus low rank", width, kept, form.storage, extra, form.row_processes)
    stored = max(_storing(form, shape.local_rows, kept, w), shape.loaded(DOUBLE))
    return SideFootprint(shape, collect, max(seen, _in_transit(form, shape, mine, w, w), stored))


def _kept(tokens: int, keep: StoragePolicy, together: int) -> int:
    """Number of tokens stored of `tokens`; a subset stores all or none of each `together` tokens with the same key."""
    if keep.limit is None or tokens <= keep.limit:
        return tokens
    return max(keep.limit - keep.limit % together, together)


def _joined_representation(form: BlockForm, width: int, keep: StoragePolicy, kept: int) -> str:
    """The representation ("dense", "low rank" or "diagonal") of a side after the sums of all processes are joined."""
    kind = representation(keep, kept)
    as_matrix = form.processes > 1 and form.reduction == "dense" and width <= WIDEST_DENSE and not keep.why
    return "dense" if kind == "low rank" and as_matrix else kind


def _in_transit(form: BlockForm, shape: FactorShape, mine: int, built: int, sent: int) -> int:
    """Bytes of rows that processes exchange: as built, as sent (reordered), and as received; 0 for one process.

    `mine`: tokens of this process; `built` and `sent`: bytes of a number in rows as built and as sent.
    """
    if form.processes == 1:
        return 0
    return mine * shape.side * (built + sent) + sent * shape.local_rows * shape.columns


def _storing(form: BlockForm, side: int, columns: int, itemsize: int) -> int:
    """Bytes of a chunk while a matrix [side, columns] is rounded to its storage dtype and the error is measured in float64.

    `itemsize`: bytes of a number in the matrix before.
    """
    w = form.wide
    if form.storage in HALF:
        each = (itemsize if itemsize < w else 0) + 2 * w + (DOUBLE if w < DOUBLE else 0)
    else:
        each = 2 * w if form.storage.itemsize < w else w
    return each * piece_entries(columns, side)
