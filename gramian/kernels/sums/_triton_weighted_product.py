"""The Triton kernel of weighted_product.py: weighted sums of per-sample gradients. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import grouped, load_tile


@triton.jit
def weighted_product(
    out, left, right, weights, tokens, steps_per_sample, steps, steps_per_part, row_tiles, column_tiles,
    out_part, out_row, left_b, left_t, left_n, left_width, right_b, right_t, right_n, right_width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_b c_b L_bᵀR_b, c_b the weight of sample b, over one part of the steps; a step is DEPTH tokens of a sample.

    L_b is [T, M], R_b [T, N] for T tokens. One loop runs over the tokens of all samples, so that loads of the next sample
    overlap with the computation of the current one.
    """
    row_tile, column_tile = grouped(tl.program_id(0), row_tiles, column_tiles, GROUP)
    part = tl.program_id(1)
    row = row_tile * ROWS
    column = column_tile * COLUMNS
    first = part * steps_per_part
    last = tl.minimum(first + steps_per_part, steps) - 1

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(first, last + 1):
        sample = step // steps_per_sample
        inside = step % steps_per_sample
        t = inside * DEPTH
        left_tile = load_tile(left, sample, t, row, left_b, left_t, left_n, tokens, left_width, DEPTH, ROWS, DESCRIPTOR)
        right_tile = load_tile(
            right, sample, t, column, right_b, right_t, right_n, tokens, right_width, DEPTH, COLUMNS, DESCRIPTOR
        )
        product = tl.dot(left_tile.T, right_tile, product, input_precision="ieee")
        if (inside == steps_per_sample - 1) | (step == last):
            weight = tl.load(weights + sample)
            total += tl.where(weight == 0.0, 0.0, weight * product)
            product = tl.zeros((ROWS, COLUMNS), tl.float32)

    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    places = out + part.to(tl.int64) * out_part + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    inside_matrix = (rows < left_width)[:, None] & (columns < right_width)[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside_matrix)
