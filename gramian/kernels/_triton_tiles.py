"""Triton functions for the matrix kernels: load a tile, and order tiles for reuse of reads. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def tensor_at(
    table, place, samples, tokens, width, stride_b, stride_t,
    DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """What `load_tile` reads: the tensor [samples, tokens, width] whose address is in `table`.

    DESCRIPTOR: a TMA descriptor of it for tiles [TOKENS, COLUMNS], else its pointer.
    """
    pointer = tl.load(table + place).to(tl.pointer_type(DTYPE))
    if DESCRIPTOR:
        found = tl.make_tensor_descriptor(
            pointer, [samples, tokens, width], [stride_b, stride_t, 1], [1, TOKENS, COLUMNS]
        )
    else:
        found = tl.multiple_of(pointer, ALIGNMENT)
    return found


@triton.jit
def load_tile(
    x, sample, token, column, stride_b, stride_t, stride_n, tokens, width,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Load the tile [TOKENS, COLUMNS] that begins at (token, column) of one sample of a tensor [B, T, N]; zero beyond edges.

    DESCRIPTOR: x is a TMA descriptor, else a pointer with the strides `stride_b`, `stride_t`, `stride_n`.
    """
    if DESCRIPTOR:
        tile = x.load([sample, token, column]).reshape(TOKENS, COLUMNS)
    else:
        rows = token + tl.arange(0, TOKENS)
        columns = column + tl.arange(0, COLUMNS)
        start = x + sample.to(tl.int64) * stride_b
        places = start + rows.to(tl.int64)[:, None] * stride_t + columns.to(tl.int64)[None, :] * stride_n
        tile = tl.load(places, mask=(rows < tokens)[:, None] & (columns < width)[None, :], other=0.0)
    return tile


@triton.jit
def grouped(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of tile number `index`, counted in bands of GROUP tile rows, so that consecutive programs share reads."""
    per_band = GROUP * column_tiles
    first = (index // per_band) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = index % per_band
    return first + inside % height, inside // height


@triton.jit
def load_rows(x, rows, column, stride_t, stride_n, width, COLUMNS: tl.constexpr):
    """Load COLUMNS entries from `column` on of the given rows of x [R, width]: [rows, COLUMNS]; row −1 and edges are zero."""
    columns = column + tl.arange(0, COLUMNS)
    places = x + rows.to(tl.int64)[:, None] * stride_t + columns.to(tl.int64)[None, :] * stride_n
    return tl.load(places, mask=(rows >= 0)[:, None] & (columns < width)[None, :], other=0.0)
