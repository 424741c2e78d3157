"""The Triton kernel of checksums.py: partial checksums of tensors. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def checksums(
    partials, pointers, sizes, owners, chunks, multipliers, RADIX,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ w R^(ROWS - 1 - row) v(column) over the 32-bit words w of a tensor's chunk; R = RADIX and v are odd multipliers.

    -0.0 is read as 0.0. Of float64 the second word has the sign, and -x for x below 2⁻¹⁰⁴² is read as x.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    words = tl.load(pointers + owner).to(tl.pointer_type(tl.int32))
    size = tl.load(sizes + owner)
    columns = tl.arange(0, COLUMNS)
    place = tl.load(chunks + program) * (ROWS * COLUMNS) + columns
    total = tl.zeros((COLUMNS,), tl.int64)
    for _ in range(ROWS):
        word = tl.load(words + place, mask=place < size, other=0)
        if WIDTH == 2:
            word = tl.where(word & 0xFFFF == 0x8000, word ^ 0x8000, word)
            word = tl.where(word >> 16 == -32768, word & 0xFFFF, word)
        elif WIDTH == 4:
            word = tl.where(word == -2147483648, 0, word)
        else:
            word = tl.where((word == -2147483648) & (place % 2 == 1), 0, word)
        total = total * RADIX + word
        place += COLUMNS
    tl.store(partials + program, tl.sum(total * tl.load(multipliers + columns)))
