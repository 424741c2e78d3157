"""The Triton kernel of checksums.py: the checksum of one chunk of a tensor. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def checksums(
    partials, pointers, sizes, owners, chunks, multipliers, RADIX,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: Σ w R^(ROWS - 1 - row) v(column) over its 32-bit words w, R = RADIX and v odd multipliers.

    Program p reads chunk chunks[p] of tensor number owners[p], whose address is pointers[…] and whose number of words is
    sizes[…], and writes partials[p]. WIDTH: bytes per element. -0.0 is read as 0.0; of a float64 only the word with the sign is
    compared with that of -0.0, so that -x is read as x for x below 2⁻¹⁰⁴².
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
