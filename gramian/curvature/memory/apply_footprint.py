"""Bytes while a block's damped Fisher, raised to a power, multiplies a matrix Y [o, m]."""

from gramian.core.dtypes import HALF
from gramian.curvature.blocks.block import PARTS
from gramian.curvature.memory.block_form import BlockForm
from gramian.curvature.memory.factor_shape import DOUBLE, FactorShape
from gramian.linalg.wide import piece_entries


def apply_bytes(form: BlockForm, A: FactorShape | None, G: FactorShape) -> int:
    """Bytes while a block with these factors multiplies Y [o, m]: Y, its products, and the inverse of the factorised matrix."""
    o, m = form.outputs, form.inputs if form.kind == "kronecker" else 1
    double = any(shape is not None and shape.is_mixed for shape in (A, G))
    e = DOUBLE if double else form.algebra
    if form.decomposed and A is not None:
        return _jointly(form, A, G, e * o * m)
    image = (form.wide if form.storage in HALF else form.algebra) * o * m
    steps, before = [image], image  # a copy of Y in a wider dtype or with its bias
    for shape, width in ((G, m), (A, o)):
        if shape is None:
            continue
        if shape.kind == "diagonal":
            steps.append(before + image)
        else:
            steps.append(before + _one_side(form, shape, width, e, image))
        before = 2 * image
    return max(steps)


def _one_side(form: BlockForm, shape: FactorShape, width: int, e: int, image: int) -> int:
    """Bytes while one factor multiplies a matrix of `width` columns in numbers of `e` bytes; `image`: bytes of the result."""
    part = -(-width // PARTS) if form.budgeted else width  # columns at a time
    each = part if form.decomposed else piece_entries(part, shape.side) // shape.side
    result = image if each < width else 0
    inverse = 0 if form.decomposed else e * shape.small * (2 if 2 * each >= shape.columns else 1)  # or a solve's copy
    inner = 2 * e * shape.columns * each
    loaded = shape.loaded(e) if shape.has_columns or form.decomposed else 0
    full = e * shape.side * each * (3 if shape.is_mixed else 2)
    return result + max(inverse + inner, loaded + inner, inner // 2 + full if shape.has_columns else inner)


def _jointly(form: BlockForm, A: FactorShape, G: FactorShape, image: int) -> int:
    """Bytes of a product under joint damping, in the eigenbases of both sides; `image`: bytes of one matrix like Y.

    A G without eigenvectors (diagonal ± low rank) needs conjugate gradients: nine vectors for each eigenvector of A.
    """
    if G.is_mixed:
        return 9 * DOUBLE * G.side * min(A.columns, A.side) + 4 * DOUBLE * form.outputs * form.inputs
    inner = 4 * DOUBLE * G.columns * A.columns
    return 3 * image + max(inner, *(shape.loaded(form.algebra) for shape in (A, G)))
