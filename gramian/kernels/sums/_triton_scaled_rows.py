"""The Triton kernel of scaled_rows.py: every sample times its weight. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def scaled_rows(out, x, weights, width, BLOCK: tl.constexpr):
    """One block of row b of x: c_b x_b with the weight c_b, multiplied in float32 and rounded once to the dtype of x."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weights + row)
    value = tl.load(x + row * width + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, (value.to(tl.float32) * weight).to(value.dtype), mask=inside)
