"""The Triton kernel of gram_squares.py: per-sample gradient norms by Gram matrices. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_tiles import load_tile, tensor_at


@triton.jit
def _triangle(index):
    """(row, column), row <= column, of element number `index` of an upper triangle, counted column by column."""
    column = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is of a rounded number: off by one at most.
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def tile_pair(index, tiles, GROUP: tl.constexpr):
    """(row, column) of tile number `index` of an upper triangle of `tiles` × `tiles` tiles, counted in bands of GROUP columns.

    Consecutive programs then share reads.
    """
    _, column = _triangle(index)
    first = (column // GROUP) * GROUP
    breadth = tl.minimum(tiles - first, GROUP)
    inside = index - first * (first + 1) // 2
    corner = inside - first * breadth
    row_in_corner, column_in_corner = _triangle(tl.maximum(corner, 0))
    row = tl.where(corner < 0, inside // breadth, first + row_in_corner)
    column = first + tl.where(corner < 0, inside % breadth, column_in_corner)
    return row, column


@triton.jit
def _add_gram(
    gram, table, place, sample, row, column, stride_b, stride_t, stride_n, samples, tokens, width,
    DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """gram + X[row : row + TILE] · X[column : column + TILE]ᵀ for one sample X [tokens, features]; returns [TILE, TILE]."""
    x = tensor_at(table, place, samples, tokens, width, stride_b, stride_t, DTYPE, ALIGNMENT, TILE, DEPTH, DESCRIPTOR)
    for k in range(0, width, DEPTH):
        x_row = load_tile(x, sample, row, k, stride_b, stride_t, stride_n, tokens, width, TILE, DEPTH, DESCRIPTOR)
        x_column = load_tile(x, sample, column, k, stride_b, stride_t, stride_n, tokens, width, TILE, DEPTH, DESCRIPTOR)
        gram = tl.dot(x_row, x_column.T, gram, input_precision="ieee")
    return gram


@triton.jit
def gram_squares(
    sums, table, samples, tokens, tiles, pairs,
    left_b, left_t, left_n, left_width, right_b, right_t, right_n, right_width,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One layer, sample and pair of token tiles: the sum of S_left ⊙ S_right over the pair, and its part on the diagonal.

    S_left = LLᵀ and S_right = RRᵀ are Gram matrices over T tokens, of L [T, M] and R [T, N], whose addresses are in `table`, by
    layer. Pairs off the diagonal count twice.
    """
    program = tl.program_id(0)
    sample = program // pairs % samples
    layer = program // (pairs * samples) * 2
    row_tile, column_tile = tile_pair(program % pairs, tiles, GROUP)
    row = row_tile * TILE
    column = column_tile * TILE

    s_right = tl.zeros((TILE, TILE), tl.float32)
    s_right = _add_gram(
        s_right, table, layer + 1, sample, row, column, right_b, right_t, right_n, samples, tokens, right_width,
        RIGHT, ALIGNMENT, TILE, DEPTH, DESCRIPTOR,
    )  # fmt: skip
    s_left = tl.zeros((TILE, TILE), tl.float32)
    s_left = _add_gram(
        s_left, table, layer, sample, row, column, left_b, left_t, left_n, samples, tokens, left_width,
        LEFT, ALIGNMENT, TILE, DEPTH, DESCRIPTOR,
    )  # fmt: skip

    product = s_right * s_left
    total = tl.sum(product)
    on_diagonal = 0.0
    if row_tile == column_tile:
        place = tl.arange(0, TILE)
        on_diagonal = tl.sum(tl.where(place[:, None] == place[None, :], product, 0.0))
    else:
        total = total * 2.0
    tl.store(sums + program, total)
    tl.store(sums + tl.num_programs(0) + program, on_diagonal)
