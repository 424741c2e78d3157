"""The Triton kernel of ragged_products.py: weighted products over segments of rows. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import grouped, load_rows


@triton.jit
def ragged_products(
    out, left, right, order, offsets, weights, batch, groups, row_tiles, column_tiles,
    left_t, left_n, left_width, right_t, right_n, right_width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_b c_b L_bgᵀR_bg of one group g, c_b the weight of sample b. Empty segments cost a step of a loop."""
    row_tile, column_tile = grouped(tl.program_id(0), row_tiles, column_tiles, GROUP)
    g = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for b in range(0, batch):
        begin = tl.load(offsets + b * groups + g)
        end = tl.load(offsets + b * groups + g + 1)
        weight = tl.load(weights + b)
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for t in range(begin, end, DEPTH):
            places = t + tl.arange(0, DEPTH)
            rows = tl.load(order + places, mask=places < end, other=-1)
            left_tile = load_rows(left, rows, row_tile * ROWS, left_t, left_n, left_width, ROWS)
            right_tile = load_rows(right, rows, column_tile * COLUMNS, right_t, right_n, right_width, COLUMNS)
            product = tl.dot(left_tile.T, right_tile, product, input_precision="ieee")
        total += tl.where(weight == 0.0, 0.0, weight * product)

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    places = out + (g.to(tl.int64) * left_width + rows[:, None]) * right_width + columns[None, :]
    tl.store(
        places, total.to(out.dtype.element_ty), mask=(rows < left_width)[:, None] & (columns < right_width)[None, :]
    )
