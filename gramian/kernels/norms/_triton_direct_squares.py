"""The Triton kernel of direct_squares.py: per-sample gradient norms, tile by tile. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import grouped, load_tile


@triton.jit
def direct_squares(
    sums, left, right, tokens, row_tiles, column_tiles, left_b, left_t, left_n, left_width,
    right_b, right_t, right_n, right_width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one tile of one sample's gradient LᵀR, L [T, M] and R [T, N] over T tokens; one float per program."""
    program = tl.program_id(0)
    tiles = row_tiles * column_tiles
    sample = program // tiles
    row_tile, column_tile = grouped(program % tiles, row_tiles, column_tiles, GROUP)
    row = row_tile * ROWS
    column = column_tile * COLUMNS

    gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(0, tokens, DEPTH):
        left_tile = load_tile(left, sample, t, row, left_b, left_t, left_n, tokens, left_width, DEPTH, ROWS, DESCRIPTOR)
        right_tile = load_tile(
            right, sample, t, column, right_b, right_t, right_n, tokens, right_width, DEPTH, COLUMNS, DESCRIPTOR
        )
        gradient = tl.dot(left_tile.T, right_tile, gradient, input_precision="ieee")
    tl.store(sums + program, tl.sum(gradient * gradient))
