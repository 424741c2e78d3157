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
    weights, example, u, scale, size, columns, scale_matrix, scale_row, scale_column, rates,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one matrix: W ← keep·W + rate·scale·U, `scale` read with the strides given, `rates` = (rate, keep).

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
    step *= tl.load(rates).to(tl.float32) * tl.load(scale + at, mask=place < size)
    weight = tl.load(W + place, mask=place < size).to(tl.float32)
    tl.store(W + place, tl.load(rates + 1).to(tl.float32) * weight + step, mask=place < size)


@triton.jit
def scaled_stack(
    out, rest, x, over, scale, size, columns, scale_matrix, scale_row, scale_column, FACTOR, LEAST,
    SCALED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one matrix of a stack: out = FACTOR·x/max(over, LEAST), if SCALED times `scale` at the strides given.

    Matrix k, of `size` entries in rows of `columns`, has one number over[k]. For two PARTS, `rest` gets what rounding took
    from `out`.
    """
    matrix = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix * size + place, mask=place < size).to(tl.float32)
    factor = FACTOR / tl.maximum(tl.load(over + matrix), LEAST)
    if SCALED:
        at = matrix * scale_matrix + place // columns * scale_row + place % columns * scale_column
        value *= factor * tl.load(scale + at, mask=place < size).to(tl.float32)
    else:
        value *= factor
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + matrix * size + place, rounded, mask=place < size)
    if PARTS == 2:
        tl.store(rest + matrix * size + place, value - rounded.to(tl.float32), mask=place < size)


@triton.jit
def direction_scales(
    d, norms, D, sizes, least, columns, FACTOR, LEAST, DIAGONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All columns of one matrix: d = FACTOR·min(1, size/least)·D/max(‖norms·D‖, LEAST), with D = 1 if not DIAGONAL."""
    matrix = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        value = tl.load(norms + matrix * columns + place, mask=place < columns, other=0.0)
        if DIAGONAL:
            value *= tl.load(D + matrix * columns + place, mask=place < columns, other=0.0).to(tl.float32)
        squares += value * value
    length = tl.minimum(tl.load(sizes + matrix) / tl.load(least + matrix), 1.0)
    scale = FACTOR * length / tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), LEAST)
    for begin in range(0, columns, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        value = tl.zeros([BLOCK], dtype=tl.float32) + scale
        if DIAGONAL:
            value *= tl.load(D + matrix * columns + place, mask=place < columns, other=0.0).to(tl.float32)
        tl.store(d + matrix * columns + place, value, mask=place < columns)
