"""The Triton kernels of weighted_sum.py: weighted sum and norms of stored gradients. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def weighted_sum(out, kept, weights, samples, width, kept_b, kept_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One block of columns of Σ_b c_b g_b over all stored gradients g_b with weights c_b. A row of weight 0 is not read."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    start = kept + columns[None, :] * kept_n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for b in range(0, samples, ROWS):
        rows = b + tl.arange(0, ROWS)
        weight = tl.load(weights + rows, mask=rows < samples, other=0.0)
        mask = (weight != 0.0)[:, None] & inside[None, :]
        row = tl.load(start + rows.to(tl.int64)[:, None] * kept_b, mask=mask, other=0.0)
        total += weight[:, None] * row.to(tl.float32)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_squares(partials, kept, width, chunks, kept_b, kept_n, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of squares of one chunk of columns of one stored gradient."""
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    first = (program % chunks).to(tl.int64) * CHUNK
    start = kept + row * kept_b
    total = tl.zeros((COLUMNS,), tl.float32)
    for offset in range(0, CHUNK, COLUMNS):
        columns = first + offset + tl.arange(0, COLUMNS)
        value = tl.load(start + columns * kept_n, mask=columns < width, other=0.0).to(tl.float32)
        total += value * value
    tl.store(partials + program, tl.sum(total))
