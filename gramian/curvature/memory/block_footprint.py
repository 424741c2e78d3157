"""Bytes of one block of the Fisher at each stage of a refresh, from shapes alone.

`outline` computes, from the form of a block, the storage policies of its tokens and their number, the shapes of its factors
and their bytes; `bound` the maximum of the bytes over any number of tokens. Stages: tokens are collected (`side_footprint`),
factors are built, stored and factorised (`factor_shape`), and multiplied with vectors (`apply_footprint`).

The matrices that are factorised count as float64. Whether float32 is exact enough depends on the condition number, which
shapes do not show, so the factorisation bytes of factors that are not stored in float64 are an upper bound.

EK-FAC in one pass stores every token of both sides to the end of a refresh (a·T·(o + m) bytes for T tokens in numbers of a
bytes); in two passes none. Both find the r and s eigenvectors of G and A, and store r·s eigenvalues of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from gramian.curvature.apply.ready_sides import THIN
from gramian.curvature.estimate.eigenbasis_sums import piece_of, workspace
from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.memory.apply_footprint import apply_bytes
from gramian.curvature.memory.block_form import MANY, BlockForm, BlockTokens
from gramian.curvature.memory.factor_shape import (
    DOUBLE,
    FactorisationBytes,
    FactorShape,
    dense,
    diagonal,
    largest_of,
    merged,
)
from gramian.curvature.memory.operator_footprint import UNUSED, OperatorBytes, operator_bytes, thinner
from gramian.curvature.memory.side_footprint import SideFootprint, side_footprint
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import piece_entries


class SidePolicies(NamedTuple):
    """The storage policies of a block's tokens: for A, for G and for the gradients of an embedding table."""

    A: StoragePolicy = StoragePolicy()
    G: StoragePolicy = StoragePolicy()
    table: StoragePolicy = StoragePolicy()


@dataclass(frozen=True)
class Footprint:
    """Bytes of one block at each stage of a refresh and its use."""

    collect: int = 0
    """Bytes of the stored tokens or their sums while tokens arrive."""
    build: int = 0
    """Bytes on top of `collect`, for one block at a time, while tokens are added or a factor is built."""
    joined: int = 0
    """Bytes on top of `collect` and `build` until the last factor is built: dense sums of inputs with the bias appended."""
    rest_A: int = 0
    """Bytes of the stored factor A; 0 if another block stores it."""
    rest_G: int = 0
    """Bytes of the stored factor G."""
    settled_A: int = 0
    """Bytes of the stored factor A once its average over refreshes has reached its full rank."""
    settled_G: int = 0
    """Bytes of the stored factor G once its average over refreshes has reached its full rank."""
    use_A: FactorisationBytes = FactorisationBytes()
    use_G: FactorisationBytes = FactorisationBytes()
    apply: int = 0
    """Bytes for one block at a time, while it multiplies a vector."""
    visiting: int = 0
    """Bytes on the layer's GPU while Gram matrices are formed of factors that are stored on the CPU."""
    fetched: int = 0
    """Bytes on the layer's GPU, on top of `apply` or `visiting`, of the chunks in transfer of factors stored on the CPU."""
    correcting: int = 0
    """Bytes on top of tokens, factors and eigenvectors, for one block at a time, while EK-FAC measures its eigenvalues."""
    gathered: int = 0
    """Bytes of the rows of other processes that each one has of low-rank sides while EK-FAC measures eigenvalues."""
    streamed: bool = False
    """True if EK-FAC measures eigenvalues in a second pass, when nothing of the first is stored but its factors."""
    operators: OperatorBytes = OperatorBytes()
    """Bytes of the operators that an optimizer makes of the factors."""

    @property
    def rest(self) -> int:
        """Bytes of the stored factors of both sides."""
        return self.rest_A + self.rest_G

    @property
    def works(self) -> tuple[int, int]:
        """(bytes of workspace while A is factorised or its norm is bounded, the same for G)."""
        return max(self.use_A.bounding, self.use_A.working), max(self.use_G.bounding, self.use_G.working)

    @classmethod
    def largest(cls, footprints: Sequence["Footprint"]) -> "Footprint":
        """The footprint with the maximum of each field over several footprints."""
        most: dict[str, Any] = {}
        for name in (one.name for one in fields(cls)):
            values = [getattr(footprint, name) for footprint in footprints]
            if name == "operators":
                most[name] = OperatorBytes.largest(values)
            else:
                most[name] = largest_of(values) if name in ("use_A", "use_G") else max(values)
        return cls(**most)


@dataclass(frozen=True)
class Outline:
    """The shapes of a block's factors and their bytes; A is None where the block is not a Kronecker product."""

    A: FactorShape | None
    G: FactorShape
    footprint: Footprint


@lru_cache(maxsize=4096)
def outline(form: BlockForm, keeps: SidePolicies, counts: BlockTokens) -> Outline:
    """The shapes of a block's factors and their bytes, for given storage policies and numbers of tokens."""
    if form.kind != "kronecker":
        return _not_kronecker(form)
    keep_A, keep_G, keep_table = keeps
    sides: dict[str, SideFootprint] = {}
    if form.linear:
        sides["A"] = side_footprint(form, form.inputs, keep_A, counts.inputs, counts.calls, bias=form.bias)
        sides["G"] = side_footprint(form, form.outputs, keep_G, counts.outputs, counts.calls, exact=form.exact)
    if form.table:
        width, rows = (form.inputs, form.outputs) if form.transposed else (form.outputs, form.inputs)
        sides["table"] = side_footprint(form, width, keep_table, counts.table, counts.lookups)
        sides["counts"] = SideFootprint(diagonal(rows, form.wide), rows * form.wide, 2 * rows * form.wide)
    own = [side for name, side in sides.items() if name != "A" or not form.shared]
    collect, build = sum(side.collect for side in own), max(side.build for side in own)
    collect += _ekfac_tokens(form, counts)
    shapes = {name: side.shape for name, side in sides.items()}
    A: FactorShape
    G: FactorShape
    if form.linear and form.table:
        A, G = merged(shapes["A"], shapes["table"]), merged(shapes["G"], shapes["counts"])
        separate = sum(shape.rest for shape in shapes.values())
        build = max(build, separate + max(_adding(form, shape) for shape in (A, G)))
        limits = (keep_table if keep_table.why else keep_A, keep_G)
    elif form.linear:
        A, G, limits = shapes["A"], shapes["G"], (keep_A, keep_G)
    else:
        A, G, limits = shapes["counts"], shapes["table"], (keep_table, keep_table)
        A, G = (G, A) if form.transposed else (A, G)
    found = Outline(A, G, _footprint(form, A, G, limits, collect, build))
    return _with_correction(form, found, counts) if form.corrected else found


def bound(form: BlockForm, keeps: SidePolicies) -> Footprint:
    """The maximum, over any number of tokens, of the bytes of a block at each stage."""
    counts = {MANY}
    for keep in keeps:
        counts |= {share * count for count in (keep.rows_up_to, keep.limit) if count for share in {1, form.processes}}
    if form.operators:  # the largest rank of two thin products
        counts |= {int(THIN * width) for width in form.widths}
    return Footprint.largest([outline(form, keeps, BlockTokens(n, n, n)).footprint for n in counts])


def _not_kronecker(form: BlockForm) -> Outline:
    """The `Outline` of a block that is not a Kronecker product: a small full matrix, or a diagonal."""
    n, w, nothing = form.outputs, form.wide, (StoragePolicy(), StoragePolicy())
    if form.rows > 1:
        stored = n * (n // form.rows)
        shape = diagonal(stored * (w + 8) // w, w)  # with eigenvectors
        return Outline(None, shape, _footprint(form, None, shape, nothing, w * stored, 3 * w * stored))
    if form.kind == "block":
        shape, sums = dense(n, form.storage), w * n * n
        return Outline(None, shape, _footprint(form, None, shape, nothing, sums, 2 * sums + 12 * n * n))
    shape = diagonal(n, w)
    return Outline(None, shape, _footprint(form, None, shape, nothing, w * n, 2 * w * n))


def _footprint(
    form: BlockForm,
    A: FactorShape | None,
    G: FactorShape,
    limits: tuple[StoragePolicy, StoragePolicy],
    collect: int,
    build: int,
) -> Footprint:
    """The bytes of a block at all stages; `limits`: storage policies of A and G, which bound their averages."""
    grown_A, grown_G = (
        [] if shape is None else [shape, *_averages(form, shape, keep)]
        for shape, keep in zip((A, G), limits, strict=True)
    )
    rests, settled, uses = [], [], []
    for own in ([] if form.shared else grown_A, grown_G):
        build = max(build, *(one.traced for one in own), *(_averaging(form, one) for one in own[1:]), 0)
        rests.append(own[0].rest if own else 0)
        settled.append(max((one.rest for one in own), default=0))
        used = largest_of(
            [one.decomposing(form.algebra) if form.decomposed else one.solving(form.algebra) for one in own]
        )
        # roots need no factorisation: norms are bounded for the record alone
        uses.append(FactorisationBytes(bounding=used.bounding) if form.operators in ("root", UNUSED) else used)
    pairs = [(a, g) for a in (grown_A if A is not None else [None]) for g in grown_G]
    applied = 0 if form.operators in ("root", UNUSED) else max(apply_bytes(form, a, g) for a, g in pairs)
    thin_A, thin_G = (thinner(grown) if grown else [None] for grown in (grown_A, grown_G))
    operators = [operator_bytes(form, a, g) for a in thin_A for g in thin_G if g is not None]
    with_bias = form.wide * A.small if A is not None and form.bias and A.kind == "dense" else 0
    return Footprint(
        collect,
        build,
        0 if form.shared else with_bias,
        rests[0],
        rests[1],
        settled[0],
        settled[1],
        uses[0],
        uses[1],
        apply=applied,
        visiting=max(shape.visiting for shape in (*grown_A, *grown_G)),
        fetched=max(shape.fetched for shape in (*grown_A, *grown_G)),
        operators=OperatorBytes.largest(operators),
    )


# ---- averages over refreshes -----------------------------------------------------------------------------------------


def _averages(form: BlockForm, shape: FactorShape, keep: StoragePolicy) -> list[FactorShape]:
    """The shapes to which the average of a factor over refreshes grows: with its largest number of columns, then dense.

    Dense only if the side is narrow enough and memory_budget sets no limit (`keep`); empty without averaging.
    """
    if shape.kind == "diagonal" or not form.averaged:
        return []
    matrix = dense(shape.side, shape.storage, summed=True)
    if shape.kind == "dense":
        return [matrix]
    allowed = keep.limit if keep.why else None
    thin = allowed is not None or shape.side > WIDEST_DENSE
    most = allowed or (form.averaged if thin else min(form.averaged, shape.side - 1))
    grown = replace(shape, columns=most, extra=8 * most + (DOUBLE * shape.side if shape.is_mixed else 0))
    return [grown] if thin else [grown, matrix]


def _averaging(form: BlockForm, grown: FactorShape) -> int:
    """Bytes on top of the averaged factor `grown` while the old average and the new factor are combined."""
    if grown.kind == "dense":
        return _adding(form, grown)
    return grown.rest + grown.traced  # the columns that are kept of both, before they are concatenated


def _adding(form: BlockForm, shape: FactorShape) -> int:
    """Bytes on top of the dense sum of two matrices: one of them as dense matrix, and a chunk to measure its rounding error."""
    if shape.kind != "dense":
        return 0
    return max(form.wide, shape.storage.itemsize) * shape.small + DOUBLE * piece_entries(shape.side, shape.side)


# ---- EK-FAC ----------------------------------------------------------------------------------------------------------


def _ekfac_tokens(form: BlockForm, counts: BlockTokens) -> int:
    """Bytes of the tokens that EK-FAC stores until it measures eigenvalues; an input that layers share counts once.

    0 without EK-FAC, in two passes, or if the number of tokens is not known.
    """
    if not form.corrected or form.streamed or counts.unlimited:
        return 0  # unknown for any number of tokens
    met, looked_up = form.local(counts.outputs), form.local(counts.table)
    width = form.inputs - form.bias
    if form.exact:
        linear = form.wide * met * (width + form.outputs + 1)
    else:
        linear = form.activation * met * ((0 if form.shared else width) + form.outputs)
    return linear * form.linear + looked_up * (DOUBLE + form.activation * form.widths[2]) * form.table


def _with_correction(form: BlockForm, found: Outline, counts: BlockTokens) -> Outline:
    """The outline `found` plus EK-FAC's stored eigenvalues and the bytes while they are measured.

    Unchanged if a side is too wide for eigenvectors, or both are diagonal.
    """
    A, G, one = found.A, found.G, found.footprint
    assert A is not None
    if A.kind == G.kind == "diagonal" or any(shape.is_mixed and shape.side > WIDEST_DENSE for shape in (A, G)):
        return found
    ranks, uses, gathered = [], [], 0
    for shape, use in ((A, one.use_A), (G, one.use_G)):
        if shape.is_mixed:
            shape = replace(shape, kind="dense", columns=shape.side)
            use = shape.decomposing(form.algebra)
        elif shape.processes > 1:
            gathered += replace(shape, processes=1).rest
        ranks.append(min(shape.columns, shape.side))
        uses.append(use)
    w, (s, r) = max(form.wide, G.storage.itemsize), ranks
    met, looked_up = form.local(counts.outputs) * form.linear, form.local(counts.table) * form.table
    if form.linear:  # the lookups of a tied table are tokens like others
        met, looked_up = met + looked_up, 0
    working = workspace(form.outputs, form.inputs, r, s, form.budgeted, met, looked_up)
    if form.exact:  # probabilities of a piece of tokens, and the basis with its squares
        piece = max(piece_of(form.outputs, form.inputs, r, s, form.budgeted), form.outputs)
        working += 4 * min(piece, met * form.outputs) + 2 * form.outputs * r + form.outputs * form.inputs
    values = w * r * s
    footprint = replace(
        one,
        rest_G=one.rest_G + values,
        settled_G=one.settled_G + values,
        use_A=uses[0],
        use_G=uses[1],
        correcting=w * working + (0 if form.streamed else gathered),
        gathered=gathered if form.streamed else 0,
        streamed=form.streamed,
    )
    return replace(found, footprint=footprint)
