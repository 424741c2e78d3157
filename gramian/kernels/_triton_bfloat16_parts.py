"""The Triton kernel of bfloat16_parts.py. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def bfloat16_parts(
    out, x, rows, columns, stack_stride, row_stride, part_stride,
    FIRST_LOW: tl.constexpr, SECOND_LOW: tl.constexpr, THIRD_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row of one matrix of x [k, rows, columns]: three parts, each H or L, with x = H + L.

    The strides are those of `out`: from one matrix of the stack, one row, one part to the next.
    """
    matrix, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + (matrix * rows + row) * columns + column, mask=column < columns).to(tl.float32)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    at = out + matrix * stack_stride + row.to(tl.int64) * row_stride + column
    tl.store(at, low if FIRST_LOW else high, mask=column < columns)
    tl.store(at + part_stride, low if SECOND_LOW else high, mask=column < columns)
    tl.store(at + 2 * part_stride, low if THIRD_LOW else high, mask=column < columns)
