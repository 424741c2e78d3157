"""The Triton kernels of token_sums.py: per-sample gradients of biases and norm layers. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def token_sums(
    partials, g, tokens, width, chunks, chunk_tokens, g_b, g_t, g_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One sample, one chunk of tokens, one block of columns of g [B, T, N]: the sum over the chunk's tokens."""
    program = tl.program_id(0)
    sample = (program // chunks).to(tl.int64)
    first = (program % chunks) * chunk_tokens
    last = tl.minimum(first + chunk_tokens, tokens)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    start = g + sample * g_b + columns.to(tl.int64)[None, :] * g_n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(first, last, ROWS):
        rows = t + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & inside[None, :]
        total += tl.load(start + rows.to(tl.int64)[:, None] * g_t, mask=mask, other=0.0).to(tl.float32)
    tl.store(partials + program.to(tl.int64) * width + columns, tl.sum(total, 0), mask=inside)


@triton.jit
def normed_sums(
    products, sums, x, g, eps, tokens, width, chunks, chunk_tokens, x_b, x_t, x_n, g_b, g_t, g_n,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One sample and one chunk of tokens, all columns: Σ_t g ⊙ x̂ and Σ_t g, x̂ the normalised input of a norm layer."""
    program = tl.program_id(0)
    sample = (program // chunks).to(tl.int64)
    first = (program % chunks) * chunk_tokens
    last = tl.minimum(first + chunk_tokens, tokens)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    x_start = x + sample * x_b + columns.to(tl.int64)[None, :] * x_n
    g_start = g + sample * g_b + columns.to(tl.int64)[None, :] * g_n
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(first, last, ROWS):
        rows = t + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & inside[None, :]
        rows = rows.to(tl.int64)[:, None]
        g_tile = tl.load(g_start + rows * g_t, mask=mask, other=0.0).to(tl.float32)
        x_tile = tl.load(x_start + rows * x_t, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(x_tile, 1) / width
            x_tile = tl.where(mask, x_tile - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(x_tile * x_tile, 1) / width + eps)
        # Masked once more: with eps = 0 the rows beyond the last have no finite inverse.
        product += tl.where(mask, g_tile * x_tile * inverse[:, None], 0.0)
        total += g_tile
    places = program.to(tl.int64) * width + columns
    tl.store(products + places, tl.sum(product, 0), mask=inside)
    tl.store(sums + places, tl.sum(total, 0), mask=inside)
