"""The Triton kernels of chacha.py: each lane computes a ChaCha20 block of 16 uint32 words, and 16 normals by Box–Muller.

Importing this file imports triton. `write_words` and `add_normals` accept tensors on any device that Triton runs on, including
the CPU with Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gramian.kernels.launch import on_device
from gramian.kernels.normal_tail import TAIL_WORDS

BLOCK = 128
"""Number of ChaCha20 blocks per Triton program, one per thread."""

_KINDS = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TAIL = tl.constexpr(TAIL_WORDS)
_TAIL_NONCE = tl.constexpr(-(2**31))
"""The highest bit of the nonce's last 32-bit word, as a signed integer: it adds 2⁹⁵ to the nonce."""


@triton.jit
def _add(x, y):
    """x + y modulo 2³² of uint32 words; overflow is intended, so Triton's check for it is off."""
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _rotate(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    """ChaCha20's quarter round (RFC 8439, section 2.1) on four tensors of 32-bit words; returns the new a, b, c, d."""
    a = _add(a, b)
    d = _rotate(d ^ a, 16)
    c = _add(c, d)
    b = _rotate(b ^ c, 12)
    a = _add(a, b)
    d = _rotate(d ^ a, 8)
    c = _add(c, d)
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _lanes(word, counter_B):
    """A signed 32-bit scalar as a uint32 tensor with the same bits and the shape of `counter_B`."""
    return tl.zeros_like(counter_B) | word.to(tl.uint32, bitcast=True)


@triton.jit
def _block(counter_B, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2):
    """The 16 output words, each uint32 [B], of B ChaCha20 blocks: block counters `counter_B`, key k0 … k7, nonce n0 … n2."""
    s0 = tl.full(counter_B.shape, 0x61707865, tl.uint32)
    s1 = tl.full(counter_B.shape, 0x3320646E, tl.uint32)
    s2 = tl.full(counter_B.shape, 0x79622D32, tl.uint32)
    s3 = tl.full(counter_B.shape, 0x6B206574, tl.uint32)
    s4, s5, s6, s7 = _lanes(k0, counter_B), _lanes(k1, counter_B), _lanes(k2, counter_B), _lanes(k3, counter_B)
    s8, s9, s10, s11 = _lanes(k4, counter_B), _lanes(k5, counter_B), _lanes(k6, counter_B), _lanes(k7, counter_B)
    s12, s13, s14, s15 = counter_B, _lanes(n0, counter_B), _lanes(n1, counter_B), _lanes(n2, counter_B)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = _add(x0, s0), _add(x1, s1), _add(x2, s2), _add(x3, s3)
    x4, x5, x6, x7 = _add(x4, s4), _add(x5, s5), _add(x6, s6), _add(x7, s7)
    x8, x9, x10, x11 = _add(x8, s8), _add(x9, s9), _add(x10, s10), _add(x11, s11)
    x12, x13, x14, x15 = _add(x12, s12), _add(x13, s13), _add(x14, s14), _add(x15, s15)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _stack(a, b, c, d, e, f, g, h):
    """Eight tensors [B] stacked as the columns of [B, 8]; tl.join interleaves its two arguments."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 8])


@triton.jit
def _pairs(chunk, first_block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, BLOCK: tl.constexpr):
    """The words of chunk number `chunk` of BLOCK ChaCha20 blocks as 8 pairs per block: first and second words, [BLOCK, 8]."""
    lane_B = (chunk * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    counter_B = _add(lane_B, first_block.to(tl.uint32))
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _block(
        counter_B, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
    )
    return _stack(x0, x2, x4, x6, x8, x10, x12, x14), _stack(x1, x3, x5, x7, x9, x11, x13, x15)


@triton.jit
def _places(chunk, skip, BLOCK: tl.constexpr):
    """Index in the output of each of a chunk's words, [BLOCK, 16]; negative for the first `skip` words, not requested."""
    lane_B = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return lane_B[:, None] * 16 + tl.arange(0, 16)[None, :] - skip


@triton.jit
def _radius(high, low):
    """Box–Muller radius √(-2 ln u), accurate to a few float32 ulps for all u.

    u is the uniform number in (0, 1) of the 32-bit word `high`; if that is below `TAIL_WORDS`, `low` gives 32 further bits.
    """
    u = (high.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # (w + ½) / 2³²
    below = (low.to(tl.float32) + 0.5) * 5.421010862427522e-20  # (v + ½) / 2⁶⁴
    u = tl.where(high < _TAIL, high.to(tl.float32) * 2.3283064365386963e-10 + below, u)
    # Near u = 1 the float32 above has lost its low bits: -ln u is the series of -ln(1 - v), v = 1 - u from the other end.
    v = ((high ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    return tl.sqrt_rn(2.0 * tl.where(v < 0.03125, series, -tl.log(u)))


@triton.jit(do_not_specialize=["first_block", "skip", "count", *(f"k{i}" for i in range(8)), "n0", "n1", "n2"])
def _words_kernel(out, first_block, skip, count, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, BLOCK: tl.constexpr):
    chunk, first_block = tl.program_id(0), first_block.to(tl.uint32, bitcast=True)
    even, odd = _pairs(chunk, first_block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, BLOCK)
    words = tl.reshape(tl.join(even, odd), [BLOCK, 16]).to(tl.int32, bitcast=True)
    place = _places(chunk, skip, BLOCK)
    tl.store(out + place, words, mask=(place >= 0) & (place < count))


@triton.jit(do_not_specialize=["tensors", *(f"k{i}" for i in range(8)), "n0", "n1", "n2"])
def _add_normals_kernel(
    addresses, sizes, owners, chunks, scales, tensors, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p adds normals to chunk chunks[p] of tensor owners[p]; `sizes` are (first block, skip, count) of each tensor."""
    owner, chunk = tl.load(owners + tl.program_id(0)), tl.load(chunks + tl.program_id(0))
    first_block, skip = tl.load(sizes + owner), tl.load(sizes + tensors + owner)
    even, odd = _pairs(chunk, first_block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, BLOCK)
    low = tl.zeros_like(even)
    # One program in 64 takes its blocks of the other nonce as well, for the further bits.
    if tl.max((even < _TAIL).to(tl.int32)) > 0:
        low, _ = _pairs(chunk, first_block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2 ^ _TAIL_NONCE, BLOCK)
    radius = _radius(even, low)
    # As a signed number the word is an angle in [-π, π), where float32 is finest around 0.
    angle = odd.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # π / 2³¹
    noise = tl.reshape(tl.join(radius * tl.cos(angle), radius * tl.sin(angle)), [BLOCK, 16])
    place = _places(chunk, skip, BLOCK)
    mask = (place >= 0) & (place < tl.load(sizes + 2 * tensors + owner))
    source = tl.load(addresses + owner).to(tl.pointer_type(SOURCE))
    target = tl.load(addresses + tensors + owner).to(tl.pointer_type(TARGET))
    before = tl.load(source + place, mask=mask, other=0.0)
    if WIDE:
        after = (before.to(tl.float64) + tl.load(scales) * noise.to(tl.float64)) * tl.load(scales + 1)
    else:
        after = (before.to(tl.float32) + tl.load(scales).to(tl.float32) * noise) * tl.load(scales + 1).to(tl.float32)
    tl.store(target + place, after.to(TARGET), mask=mask)


def write_words(out: Tensor, key: Sequence[int], nonce: Sequence[int], start: int) -> None:
    """Fill a contiguous int32 tensor with words of the ChaCha20 key stream, from word number `start` on.

    `key` and `nonce` are 8 and 3 signed 32-bit integers.
    """
    first, skip = divmod(start, 16)
    chunks = triton.cdiv(skip + out.numel(), 16 * BLOCK)
    first -= (first >= 2**31) * 2**32
    with on_device(out):
        _words_kernel[(chunks,)](out, first, skip, out.numel(), *key, *nonce, BLOCK=BLOCK, num_warps=4)


def add_normals(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scales: Tensor,
    key: Sequence[int],
    nonce: Sequence[int],
    starts: Sequence[int],
) -> None:
    """targets[i] = (sources[i] + std · normals) · factor, with the normals from number starts[i] on; one launch for all.

    Sources have one dtype and targets one, all are contiguous on one device, and a target may be its source. `scales`: (std,
    factor), float64 [2] there. `key` and `nonce` are 8 and 3 signed 32-bit integers.
    """
    device = targets[0].device
    sizes, owners, chunks = _layout(tuple(t.numel() for t in targets), tuple(starts), device)
    if not len(owners):
        return
    addresses = torch.tensor([t.data_ptr() for t in (*sources, *targets)], pin_memory=device.type == "cuda")
    kinds = {"SOURCE": _KINDS[sources[0].dtype], "TARGET": _KINDS[targets[0].dtype]}
    wide = sources[0].dtype == torch.float64
    with on_device(targets[0]):
        _add_normals_kernel[(len(owners),)](
            addresses.to(device, non_blocking=True), sizes, owners, chunks, scales, len(targets), *key, *nonce,
            **kinds, WIDE=wide, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _layout(counts: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Work of the programs: (first block, skipped words, words) [3, N] of N tensors; tensor and chunk of each program [P]."""
    words, places = torch.tensor(counts, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64)
    skips = places % 16
    chunks = torch.where(words > 0, -(-(skips + words) // (16 * BLOCK)), 0)
    owners = torch.arange(len(counts)).repeat_interleave(chunks)
    numbers = torch.arange(len(owners)) - (chunks.cumsum(0) - chunks)[owners]
    return torch.stack([places // 16, skips, words]).to(device), owners.to(device), numbers.to(device)
