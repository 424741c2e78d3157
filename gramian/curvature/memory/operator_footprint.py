"""Bytes of the operators of one block that an optimizer makes of the factors once a refresh and keeps for every step.

Legend: n width of a side, r columns of a low-rank one, ⌈n⌉ the width that a side is padded to.

| operators | of | one side | bytes of a number e |
|---|---|---|---|
| "inverse" | `gramian.precondition` | e·⌈n⌉²; low rank with r ≤ ¾·n: 2·e·⌈n⌉·⌈r⌉ + s·⌈n⌉; diagonal: s·⌈n⌉ | see `_number` |
| "root" | `gramian.optim.KFAC` | e·n², diagonal: e·n, both without the bias | 2 on a GPU, else 4; float64: 8 |

with s = 8 where e is, else 4. Blocks that share an A have an operator each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from gramian.core.dtypes import HALF
from gramian.curvature.apply.ready_sides import STACKED, THIN, aligned
from gramian.curvature.memory.block_form import BlockForm
from gramian.curvature.memory.factor_shape import DOUBLE, FactorShape

SINGLE = 4
"""Bytes of a float32 number."""
MADE = {"inverse": 3, "root": 8}
"""{operators: bytes of workspace over those of the matrices that are inverted together}: systems, Cholesky factors, inverses of
these; a stack of matrices and what the iteration for their roots stores."""
UNUSED = "unused"
"""Factors that no step uses: those of the output layer, which `gramian.optim.KFAC` may not know before its first refresh."""
APPLIED = {"inverse": 3, "root": 6}
"""{operators: matrices like Y [o, m] that a step stores for the blocks of one shape, beside its result}."""
TOGETHER = 2**24
"""Largest number of entries of Gram matrices of several shapes in one step."""
RECORDED = 2**26
"""Largest number of entries of all weights whose steps are recorded as a CUDA graph, which keeps its intermediate results."""
GRAMS = 8
"""Matrices of the narrower side's width that a step with roots stores beside these."""


class OperatorBytes(NamedTuple):
    """Bytes of a block's operators: stored, while they are made, and while they are applied; zeros without operators."""

    A: int = 0
    """Bytes of the stored operator of A."""
    G: int = 0
    """Bytes of the stored operator of G."""
    made: int = 0
    """Bytes of both before they are stacked with those of other blocks."""
    inverting: int = 0
    """Bytes of workspace while they are made, if all blocks are made together."""
    at_a_time: int = 0
    """Largest number of bytes of workspace: more blocks than these are made one stack after the other."""
    replaced: int = 0
    """Bytes of the factors of the refresh before, which stay stored until the new operators are made."""
    result: int = 0
    """Bytes of the block's part of a step that stay stored until all blocks have theirs."""
    applying: int = 0
    """Bytes on top while the step is computed: for the blocks of one shape, and for those that step together with them."""
    gram: int = 0
    """Entries of the Gram matrix of a step with roots; blocks of one number of entries may step together."""
    on_gpu: int = 0
    """Entries of the weight of a step with roots on a GPU, which may be recorded."""

    @property
    def stored(self) -> int:
        """Bytes of the stored operators of both sides."""
        return self.A + self.G

    @classmethod
    def largest(cls, several: "list[OperatorBytes]") -> "OperatorBytes":
        """The maximum of each field."""
        return cls(*map(max, zip(*several, strict=True)))


def operator_bytes(form: BlockForm, A: FactorShape | None, G: FactorShape) -> OperatorBytes:
    """Bytes of the operators of a block with these factors; zeros if the block has none, as where its rows are sharded."""
    shapes = [shape for shape in (A, G) if shape is not None]
    if form.operators in ("", UNUSED) or any(shape.processes > 1 for shape in shapes):
        return OperatorBytes()
    return _roots(form, A, G) if form.operators == "root" else _inverses(form, A, G)


def applied_together(operators: Mapping[OperatorBytes, int]) -> int:
    """Most bytes on top while steps are computed, for {operators of a block: number of such blocks}.

    The blocks of one shape step at the same time. Small blocks with roots of several shapes do so too, if their Gram matrices
    have one size and no more than `TOGETHER` entries in all.
    """
    found = max((count * one.applying for one, count in operators.items()), default=0)
    for gram in {one.gram for one in operators} - {0}:
        room, several = TOGETHER // gram, 0
        for one in sorted((one for one in operators if one.gram == gram), key=lambda one: -one.applying):
            taken = min(operators[one], room)
            room, several = room - taken, several + taken * one.applying
        found = max(found, several)
    return found


def recorded(operators: Mapping[OperatorBytes, int]) -> int:
    """Bytes that a recording of all steps keeps between steps, for {operators of a block: number of such blocks}."""
    entries = sum(count * one.on_gpu for one, count in operators.items())
    return applied_together(operators) if 0 < entries <= RECORDED else 0


def thinner(shapes: list[FactorShape]) -> list[FactorShape]:
    """`shapes`, to which an average of a factor grows, with the low-rank one between whose operator takes most bytes."""
    first, last = shapes[0], shapes[-1]
    most = min(int(THIN * first.side), last.columns)
    return [*shapes, replace(first, columns=most)] if first.has_columns and first.columns < most else shapes


def _inverses(form: BlockForm, A: FactorShape | None, G: FactorShape) -> OperatorBytes:
    e = _number(form, A, G)
    computed = DOUBLE if e == DOUBLE else SINGLE
    sides = [0 if shape is None else _inverse(shape, e) for shape in (A, G)]
    made = sum(0 if shape is None else _inverse(shape, computed) for shape in (A, G))
    y = computed * aligned(form.outputs) * aligned(form.inputs if form.kind == "kronecker" else 1)
    return _operators("inverse", sides, made, computed, 0, result=y, y=y)


def _roots(form: BlockForm, A: FactorShape | None, G: FactorShape) -> OperatorBytes:
    if A is None:
        return OperatorBytes()
    inputs = form.inputs - form.bias
    e = 2 if form.on_gpu and form.weight < DOUBLE else max(form.weight, SINGLE)
    entries = [n if shape.kind == "diagonal" else n * n for shape, n in ((A, inputs), (G, form.outputs))]
    made = sum(n * shape.storage.itemsize for n, shape in zip(entries, (A, G), strict=True))
    number, old = max(form.weight, SINGLE), (0 if form.shared else A.rest) + G.rest
    computed = max(A.storage.itemsize, G.storage.itemsize)
    found = _operators("root", [e * n for n in entries], made, computed, old, y=number * form.outputs * inputs)
    gram = min(form.outputs, inputs) ** 2
    on_gpu = form.outputs * inputs if e == 2 else 0
    return found._replace(applying=found.applying + GRAMS * number * gram, gram=gram, on_gpu=on_gpu)


def _operators(
    kind: str,
    sides: list[int],
    made: int,
    computed: int,
    replaced: int,
    *,
    y: int,
    result: int = 0,
) -> OperatorBytes:
    at_a_time = MADE[kind] * max(computed * STACKED, made)
    return OperatorBytes(sides[0], sides[1], made, MADE[kind] * made, at_a_time, replaced, result, APPLIED[kind] * y)


def _inverse(shape: FactorShape, e: int) -> int:
    """Bytes of the inverse of one side in numbers of `e` bytes."""
    n, scale = aligned(shape.side), DOUBLE if e == DOUBLE else SINGLE
    if shape.kind == "diagonal":
        return scale * n
    if shape.has_columns and shape.columns <= THIN * shape.side:
        return scale * n + 2 * e * n * aligned(shape.columns)
    return e * n * n


def _number(form: BlockForm, A: FactorShape | None, G: FactorShape) -> int:
    """Bytes of a number in an inverse.

    Factors in half precision have float32 inverses, or on a GPU at most three bfloat16 numbers an entry (6 bytes). Others have
    the dtype of `form.algebra`: float64 if a large condition number may need it.
    """
    shapes = [shape for shape in (A, G) if shape is not None]
    wide = [shape for shape in shapes if shape.kind != "diagonal" and shape.storage not in HALF]
    if any(shape.storage == torch.float64 for shape in shapes) or (wide and form.algebra == DOUBLE):
        return DOUBLE
    return 6 if form.on_gpu and A is not None and not wide else SINGLE
