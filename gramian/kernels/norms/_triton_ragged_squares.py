"""The Triton kernels of ragged_squares.py: norms of products over segments of rows. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import grouped, load_rows


@triton.jit
def _add_gram(gram, x, rows, others, stride_t, stride_n, width, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """gram + X[rows] · X[others]ᵀ for rows of x [R, width]; −1 is a row of zeros. Returns [TILE, TILE]."""
    for k in range(0, width, DEPTH):
        one = load_rows(x, rows, k, stride_t, stride_n, width, DEPTH)
        other = load_rows(x, others, k, stride_t, stride_n, width, DEPTH)
        gram = tl.dot(one, other.T, gram, input_precision="ieee")
    return gram


@triton.jit
def ragged_gram_squares(
    sums, diagonals, left, right, order, offsets, segment_of, first_of, segments,
    left_t, left_n, left_width, right_t, right_n, right_width, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of TILE rows of a segment: the sum of S_left ⊙ S_right over it and the tiles before it, and its diagonal's part.

    S_left = LLᵀ and S_right = RRᵀ are Gram matrices over the segment's rows. Tiles off the diagonal count twice.
    """
    program = tl.program_id(0)
    segment = tl.load(segment_of + program)
    if segment < segments:
        begin = tl.load(offsets + segment)
        end = tl.load(offsets + segment + 1)
        tile = (program - tl.load(first_of + segment)).to(tl.int32)
        inside = tl.arange(0, TILE)
        places = begin + tile * TILE + inside
        rows = tl.load(order + places, mask=places < end, other=-1)
        total = 0.0
        diagonal = 0.0
        for before in range(0, tile + 1):
            others_at = begin + before * TILE + inside
            others = tl.load(order + others_at, mask=others_at < end, other=-1)
            gram = tl.zeros((TILE, TILE), tl.float32)
            gram = _add_gram(gram, left, rows, others, left_t, left_n, left_width, TILE, DEPTH)
            product = tl.zeros((TILE, TILE), tl.float32)
            product = _add_gram(product, right, rows, others, right_t, right_n, right_width, TILE, DEPTH) * gram
            if before == tile:
                total += tl.sum(product)
                diagonal += tl.sum(tl.where(inside[:, None] == inside[None, :], product, 0.0))
            else:
                total += 2.0 * tl.sum(product)
        tl.store(sums + program, total)
        tl.store(diagonals + program, diagonal)


@triton.jit
def ragged_direct_squares(
    sums, left, right, order, offsets, row_tiles, column_tiles,
    left_t, left_n, left_width, right_t, right_n, right_width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one tile of one segment's product LᵀR; one float per program."""
    program = tl.program_id(0)
    tiles = row_tiles * column_tiles
    segment = program // tiles
    row_tile, column_tile = grouped(program % tiles, row_tiles, column_tiles, GROUP)
    begin = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)

    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(begin, end, DEPTH):
        places = t + tl.arange(0, DEPTH)
        rows = tl.load(order + places, mask=places < end, other=-1)
        left_tile = load_rows(left, rows, row_tile * ROWS, left_t, left_n, left_width, ROWS)
        right_tile = load_rows(right, rows, column_tile * COLUMNS, right_t, right_n, right_width, COLUMNS)
        product = tl.dot(left_tile.T, right_tile, product, input_precision="ieee")
    tl.store(sums + program, tl.sum(product * product))
