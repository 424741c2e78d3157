"""The Triton kernel of weighted_product.py: weighted sums of per-sample gradients. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import grouped, load_tile, tensor_at


@triton.jit
def weighted_products(
    table, order, weights, ratios, zeros, samples, tokens, steps_per_sample, steps, steps_per_part, row_tiles, column_tiles,
    left_b, left_t, left_n, left_width, right_b, right_t, right_n, right_width,
    DTYPE: tl.constexpr, OUT: tl.constexpr, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_b c_b L_bᵀR_b, c_b the weight of sample b, over one part of the steps; a step is DEPTH tokens of a sample.

    L_b is [T, M], R_b [T, N] for T tokens. `table` has the addresses of L, R and the result [parts, M, N], by layer. Samples
    come in `order`, by ascending |c|, and `total` holds the sum so far divided by the weight of the sample that is being added:
    it is multiplied by a ratio (of size ≤ 1) where a sample begins, and by the last weight at the end. So one accumulator does.
    The first samples, whose number is in `zeros`, have weight 0.
    """
    layer = 3 * (tl.program_id(0) // (row_tiles * column_tiles))
    left = tensor_at(
        table, layer, samples, tokens, left_width, left_b, left_t, DTYPE, ALIGNMENT, DEPTH, ROWS, DESCRIPTOR
    )
    right = tensor_at(
        table, layer + 1, samples, tokens, right_width, right_b, right_t, DTYPE, ALIGNMENT, DEPTH, COLUMNS, DESCRIPTOR
    )
    out = tl.multiple_of(tl.load(table + layer + 2).to(tl.pointer_type(OUT)), 16)
    index = tl.program_id(0) % (row_tiles * column_tiles)
    row_tile, column_tile = grouped(index, row_tiles, column_tiles, GROUP)
    part = tl.program_id(1)
    row = row_tile * ROWS
    column = column_tile * COLUMNS
    last = tl.minimum((part + 1) * steps_per_part, steps) - 1
    first = tl.minimum(tl.maximum(part * steps_per_part, tl.load(zeros).to(tl.int32) * steps_per_sample), last + 1)

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in range(first // steps_per_sample, last // steps_per_sample + 1):
        sample = tl.load(order + place).to(tl.int32)
        begin = tl.maximum(first - place * steps_per_sample, 0)
        end = tl.minimum(last + 1 - place * steps_per_sample, steps_per_sample)
        total *= tl.load(ratios + place)
        for inside in range(begin, end):
            t = inside * DEPTH
            left_tile = load_tile(
                left, sample, t, row, left_b, left_t, left_n, tokens, left_width, DEPTH, ROWS, DESCRIPTOR
            )
            right_tile = load_tile(
                right, sample, t, column, right_b, right_t, right_n, tokens, right_width, DEPTH, COLUMNS, DESCRIPTOR
            )
            total = tl.dot(left_tile.T, right_tile, total, input_precision="ieee")
    total *= tl.load(weights + last // steps_per_sample)

    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    start = part.to(tl.int64) * left_width * right_width
    places = out + start + rows.to(tl.int64)[:, None] * right_width + columns[None, :]
    inside_matrix = (rows < left_width)[:, None] & (columns < right_width)[None, :]
    tl.store(places, total.to(OUT), mask=inside_matrix)
