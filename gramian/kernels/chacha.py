"""ChaCha20's key stream as 32-bit words, and normal numbers computed from it, from any position and on any device.

A word (uint32) is a function of (key, nonce, position), so parts of a tensor draw what the whole tensor draws. The cipher is
that of RFC 8439: a 32-bit block counter and a 96-bit nonce, hence 2³² blocks of 16 words per nonce. On the CPU the words come
from the `cryptography` package, or from numpy if that is not installed; on CUDA from a Triton kernel. All three give the same
words. The normals of CPU and CUDA differ by rounding: they are computed in float64 on the CPU, in float32 on CUDA.

A normal number uses one word on average: Box–Muller makes two normals of two words, one for the radius and one for the angle.
Only a radius in the tail uses a second word, from the key stream of another nonce. Three or four words for each pair would give
every radius 64 bits, at 1.6 or 2 times the cost, for digits that float32 cannot represent: outside the tail 32 bits resolve the
radius to 3.3e-6, 7 units in the last place of a float32 at 4.7, and to less than one unit below 4.

Arguments of all functions: a key of 32 bytes; a nonce below 2⁹⁶ (for normals below 2⁹⁵), little-endian in the cipher's state;
the position `start` of the first word or number, which need not begin a block, with start + count ≤ 2³⁶. Other values raise
GramianError.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.kernels.normal_tail import TAIL_NONCE, TAIL_WORDS

WORDS_PER_NONCE = 2**36
"""Number of words of the key stream of one nonce: 2³² blocks of 16 words."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_CHUNK = 2**20
"""Words or normals that the CPU computes at a time, a multiple of 16: temporaries near 30 MB, enough work for threads."""


def words(key: bytes, nonce: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Words [start, start + count) of the ChaCha20 key stream of (key, nonce), uint32 [count], computed on `device`.

    Cost: 60 integer operations per word; on the CPU some 5 ns a word with `cryptography`. Raises GramianError for arguments
    outside the module's limits, and on CUDA without triton.
    """
    _check(key, nonce, start, count)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.from_numpy(_host_words(key, nonce, start, count))
    out = torch.empty(count, dtype=torch.int32, device=device)
    if count:
        _kernels(device).write_words(out, *_arguments(key, nonce), start)
    return out.view(torch.uint32)


def normals(key: bytes, nonce: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normals number start … start + count − 1 of (key, nonce), float32 [count], by Box–Muller on `device`.

    The words w₀ and w₁ at positions 2k and 2k+1 of the key stream give the normals number 2k and 2k+1:

        u = (w₀ + ½) / 2³²,  and where w₀ < 2¹⁶  u = (2³² w₀ + v₀ + ½) / 2⁶⁴
        r = √(-2 ln u),  r cos(2π w₁ / 2³²),  r sin(2π w₁ / 2³²)

    with v₀ the word at position 2k of the key stream of nonce + 2⁹⁵; so |x| ≤ √(130 ln 2) ≈ 9.49. Cost on the CPU: some 15 ns
    an element on one core. Raises GramianError as `words` does.
    """
    _check(key, nonce, start, count, TAIL_NONCE)
    device = torch.device(device)
    out = torch.zeros(count, device=device)
    if device.type == "cpu":
        for at in range(0, count, _CHUNK):
            stop = min(at + _CHUNK, count)
            out[at:stop] = _host_normals(key, nonce, start + at, stop - at)
    else:
        add_normals_(out, key, nonce, start, 1.0)
    return out


def add_normals_(
    tensor: Tensor, key: bytes, nonce: int, start: int, std: float | Tensor, factor: float = 1.0
) -> Tensor:
    """tensor = (tensor + std · normals) · factor, in place, with the normals number start … start + numel − 1 of (key, nonce).

    Arguments, cost and errors as of `add_normals_to`. Returns the tensor.
    """
    add_normals_to([tensor], [tensor], key, nonce, [start], std, factor)
    return tensor


def add_normals_to(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    key: bytes,
    nonce: int,
    starts: Sequence[int],
    std: float | Tensor,
    factor: float = 1.0,
) -> None:
    """targets[i] = (sources[i] + std · normals) · factor, with the normals from number starts[i] on of (key, nonce).

    The sum is computed in float32 (float64 on the CPU and for float64 sources) and rounded to the target's dtype once. On CUDA
    one launch for each pair of dtypes, whatever the number of tensors, reads and writes each once, and the host never waits.

    Args:
        targets: contiguous tensors in any of `DTYPES`, all on one device.
        sources: as many, each with as many elements as its target, which it may be.
        key: 32 bytes.
        nonce: below 2⁹⁵.
        starts: for each target the number of the normal that is added to its first element.
        std: standard deviation, a number of at least 0, or a 0-dim tensor on the targets' device or on the CPU.
        factor: multiplies the sums.

    Raises:
        GramianError: for an argument outside these limits, or on CUDA without triton.
    """
    ends = [start + tensor.numel() for tensor, start in zip(targets, starts, strict=True)]
    first, last = min(starts, default=0), max(ends, default=0)
    _check(key, nonce, first, last - first, TAIL_NONCE)
    for tensor in (*targets, *sources):
        if tensor.dtype not in DTYPES:
            raise GramianError(f"tensor: dtype {tensor.dtype}; expected one of {', '.join(str(d) for d in DTYPES)}")
        if not tensor.is_contiguous():
            raise GramianError(f"tensor: strides {list(tensor.stride())}; expected a contiguous tensor")
    device = targets[0].device
    if isinstance(std, Tensor) and (std.dim() or std.device not in (device, torch.device("cpu"))):
        raise GramianError(
            f"std: shape {list(std.shape)} on {std.device}; expected a number or a 0-dim tensor on {device}"
        )
    if not isinstance(std, Tensor) and not (math.isfinite(std) and std >= 0):
        raise GramianError(f"std: {std}; expected a finite number of at least 0")
    with torch.no_grad():
        if device.type == "cpu":
            for target, source, start in zip(targets, sources, starts, strict=True):
                _add_on_host(target.view(-1), source.view(-1), key, nonce, start, float(std), factor)
            return
        scales = torch.tensor([0.0 if isinstance(std, Tensor) else std, factor], dtype=torch.float64, pin_memory=True)
        scales = scales.to(device, non_blocking=True)
        if isinstance(std, Tensor):
            scales[0] = std
        groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
            groups.setdefault((source.dtype, target.dtype), []).append(i)
        kernels, arguments = _kernels(device), _arguments(key, nonce)
        for group in groups.values():
            some = ([tensors[i] for i in group] for tensors in (sources, targets))
            kernels.add_normals(*some, scales, *arguments, [starts[i] for i in group])


def _add_on_host(
    flat_N: Tensor, source_N: Tensor, key: bytes, nonce: int, start: int, std: float, factor: float
) -> None:
    for at in range(0, flat_N.numel(), _CHUNK):
        part = flat_N[at : at + _CHUNK]
        noise = _host_normals(key, nonce, start + at, part.numel()) if std else part.new_zeros(part.shape)
        part.copy_(noise.double().mul_(std).add_(source_N[at : at + _CHUNK]).mul_(factor))


def _host_normals(key: bytes, nonce: int, start: int, count: int) -> Tensor:
    """Normals number start … start + count − 1, float32 [count], computed on the CPU in float64; independent of chunking."""
    first, stop = start - start % 2, start + count + (start + count) % 2
    words_P2 = _host_words(key, nonce, first, stop - first).reshape(-1, 2)
    uniform_P = (words_P2[:, 0] + 0.5) * 2.0**-32
    for pair in np.flatnonzero(words_P2[:, 0] < TAIL_WORDS):  # an expected 8 of a chunk
        low = _host_words(key, nonce + TAIL_NONCE, first + 2 * int(pair), 1)[0]
        uniform_P[pair] = (int(words_P2[pair, 0]) * 2**32 + int(low) + 0.5) * 2.0**-64  # 49 bits: exact
    radius_P = torch.from_numpy(uniform_P).log_().mul_(-2.0).sqrt_()
    angle_P = torch.from_numpy(words_P2[:, 1].astype(np.float64)).mul_(2.0 * math.pi * 2.0**-32)
    pairs_P2 = torch.empty(len(words_P2), 2)
    pairs_P2[:, 0] = angle_P.cos().mul_(radius_P)
    pairs_P2[:, 1] = angle_P.sin_().mul_(radius_P)
    return pairs_P2.view(-1)[start - first : start - first + count]


def _host_words(key: bytes, nonce: int, start: int, count: int) -> NDArray[np.uint32]:
    """Words [start, start + count) of the key stream, uint32 [count], computed on the CPU in blocks of 16 and then sliced."""
    first, stop = start // 16, -(-(start + count) // 16)
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError:
        stream = numpy_blocks(key, nonce, first, stop - first).ravel()
    else:
        counter_and_nonce = struct.pack("<I", first % 2**32) + nonce.to_bytes(12, "little")
        cipher = Cipher(algorithms.ChaCha20(key, counter_and_nonce), mode=None).encryptor()
        stream = np.frombuffer(cipher.update(bytes(64 * (stop - first))), dtype="<u4").astype(np.uint32)
    return stream[start - 16 * first : start - 16 * first + count]


def numpy_blocks(key: bytes, nonce: int, first: int, count: int) -> NDArray[np.uint32]:
    """ChaCha20 blocks [first, first + count) of (key, nonce) in plain numpy, each quarter round on all blocks at once.

    Returns uint32 [count, 16]. Cost: 960 passes over 4·count bytes, some 500 ns a block.
    """
    out = np.empty((count, 16), np.uint32)
    for at in range(0, count, _CHUNK // 16):
        rows = np.arange(first + at, first + min(at + _CHUNK // 16, count), dtype=np.uint64).astype(np.uint32)
        before = np.empty((16, len(rows)), np.uint32)
        before[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
        before[4:12] = np.frombuffer(key, "<u4")[:, None]
        before[12] = rows
        before[13:] = np.frombuffer(nonce.to_bytes(12, "little"), "<u4")[:, None]
        state = before.copy()
        for _ in range(10):
            for a, b, c, d in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
                _quarter(state, a, b, c, d)
            for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
                _quarter(state, a, b, c, d)
        out[at : at + len(rows)] = (state + before).T
    return out


def _quarter(state: NDArray[np.uint32], a: int, b: int, c: int, d: int) -> None:
    """ChaCha20's quarter round (RFC 8439) on rows a, b, c, d of the state [16, blocks], in place."""
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] += state[y]
        mixed = state[z] ^ state[x]
        state[z] = (mixed << np.uint32(bits)) | (mixed >> np.uint32(32 - bits))


def _kernels(device: torch.device):  # type: ignore[no-untyped-def]
    """The module of Triton kernels, imported on first use; raises `GramianError` if triton is not installed."""
    try:
        from gramian.kernels import _triton_chacha
    except ImportError as reason:
        raise GramianError(f"device: {device} without triton ({reason}); expected triton installed, or a CPU") from None
    return _triton_chacha


def _arguments(key: bytes, nonce: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Key and nonce as 8 and 3 signed 32-bit integers: one integer type, so that a kernel is compiled once for all values."""
    return struct.unpack("<8i", key), struct.unpack("<3i", nonce.to_bytes(12, "little"))


def _check(key: bytes, nonce: int, start: int, count: int, nonces: int = 2**96) -> None:
    if not isinstance(key, bytes) or len(key) != 32:
        length = f"{len(key)} of {type(key).__name__}" if hasattr(key, "__len__") else type(key).__name__
        raise GramianError(f"key: {length}; expected 32 bytes")
    if not 0 <= nonce < nonces:
        raise GramianError(f"nonce: {nonce}; expected an integer in [0, 2^{nonces.bit_length() - 1})")
    if start < 0 or count < 0 or start + count > WORDS_PER_NONCE:
        raise GramianError(f"start: [{start}, {start + count}); expected places in [0, 2^36), the words of one nonce")
