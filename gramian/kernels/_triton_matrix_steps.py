"""The Triton kernels of matrix_steps.py. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def nesterov_averages(
    n, momenta, gradients, example, size, BETA, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one matrix: M ← M + (1 − β)(g − M), N = g + β(M − g).

    Matrix k, of `size` entries, has its momentum M and gradient g at the addresses momenta[k] and gradients[k], both of the
    dtype of `example`; N is row k of `n`.
    """
    matrix = tl.program_id(1).to(tl.int64)
    M = tl.load(momenta + matrix).to(example.dtype)
    g = tl.load(gradients + matrix).to(example.dtype)
    if ALIGNED:
        M, g = tl.multiple_of(M, 16), tl.multiple_of(g, 16)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(g + place, mask=place < size).to(tl.float32)
    momentum = tl.load(M + place, mask=place < size).to(tl.float32)
    momentum += (1.0 - BETA) * (gradient - momentum)
    tl.store(M + place, momentum, mask=place < size)
    tl.store(n + matrix * size + place, gradient + BETA * (momentum - gradient), mask=place < size)


@triton.jit
def scaled_steps(
    weights, example, u, scale, size, columns, scale_matrix, scale_row, scale_column, KEEP,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one matrix: W ← KEEP·W + scale·U, `scale` read with the strides given.

    Matrix k, of `size` entries in rows of `columns`, has its weight at the address weights[k], of the dtype of `example`; U is
    row k of `u`.
    """
    matrix = tl.program_id(1).to(tl.int64)
    W = tl.load(weights + matrix).to(example.dtype)
    if ALIGNED:
        W = tl.multiple_of(W, 16)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = matrix * scale_matrix + place // columns * scale_row + place % columns * scale_column
    step = tl.load(u + matrix * size + place, mask=place < size).to(tl.float32)
    step *= tl.load(scale + at, mask=place < size)
    weight = tl.load(W + place, mask=place < size).to(tl.float32)
    tl.store(W + place, KEEP * weight + step, mask=place < size)


@triton.jit
def scaled_stack(
    out, rest, x, scale, size, columns, scale_matrix, scale_row, scale_column, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one matrix of a stack: out = scale·x, `scale` read with the strides given.

    For two PARTS, `rest` gets what rounding took from `out`.
    """
    matrix = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = matrix * scale_matrix + place // columns * scale_row + place % columns * scale_column
    factor = tl.load(scale + at, mask=place < size)
    value = tl.load(x + matrix * size + place, mask=place < size).to(tl.float32)
    value *= factor
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + matrix * size + place, rounded, mask=place < size)
    if PARTS == 2:
        tl.store(rest + matrix * size + place, value - rounded.to(tl.float32), mask=place < size)
