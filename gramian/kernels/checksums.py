"""64-bit checksums of the values of many tensors: equal values have equal checksums, on every device and in every launch.

A tensor is read as signed 32-bit words w: half a float64, one float32, or two elements of 16 bits, with -0.0 as 0.0. The words
are arranged in chunks of ROWS × COLUMNS. With fixed odd multipliers R, u for each chunk and v for each column,

    checksum = Σ m w  mod 2⁶⁴,    m = u(chunk) · R^(ROWS - 1 - row) · v(column)

Integer sums have no rounding, so the order of summation does not matter. A change of one word always changes the checksum (m is
odd and a change is below 2³³); changes of several words cancel by chance with probability about 2⁻³². A tensor of zeros has the
checksum 0. The checksum detects mistakes, not manipulation: the multipliers are not secret.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gramian.kernels.launch import on_device, triton_found

ROWS, COLUMNS = 32, 1024
CHUNK = ROWS * COLUMNS
SMALL = 4096
"""Tensors of at most this many 32-bit words are concatenated by `checksums_twin` and summed in one pass."""
RADIX = 0x2545F4914F6CDD1D
"""The odd multiplier R, whose powers weight the rows of a chunk in `checksums`: that of Vigna's xorshift64*."""


def checksums(tensors: Sequence[Tensor], most: int | None = None) -> Tensor:
    """A 64-bit checksum of each tensor's values, int64 [len(tensors)] on the device of the first; equal for equal values.

    Cost: one read of all tensors; on CUDA five launches for each device and dtype, whatever the number of tensors
    (measured on an H200: 4.1 TB/s). It does not wait for the device. On one core of a CPU some 5 ns an element.

    Args:
        tensors: at least one; contiguous, of any shape, device and float dtype.
        most: only the first `most` elements of each tensor are read; None: all.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.device, t.dtype), []).append(i)
    parts = []
    for (device, _), members in groups.items():
        take = checksums_kernel if device.type == "cuda" and triton_found() else checksums_twin
        parts.append(take([tensors[i] for i in members], most).to(tensors[0].device, non_blocking=True))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)[_order(tuple(map(tuple, groups.values())), tensors[0].device)]


@torch.no_grad()
def checksums_twin(tensors: Sequence[Tensor], most: int | None = None) -> Tensor:
    """`checksums`, 64 bits per tensor, of tensors of one device and dtype, in plain torch: small tensors in one pass.

    `most`: only the first `most` elements of each tensor are read; None: all.
    """
    device = tensors[0].device
    weights, flats = _weights(device), [_whole_words(t.view(-1)[:most]) for t in tensors]
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    small = [i for i, flat in enumerate(flats) if flat.nbytes <= 4 * SMALL]
    if small:
        weights_W, owners_W = _joint(tuple(flats[i].nbytes // 4 for i in small), tuple(small), device)
        sums.index_add_(0, owners_W, _words(torch.cat([flats[i] for i in small])) * weights_W)
    for i, flat in enumerate(flats):
        if flat.nbytes > 4 * SMALL:
            chunks = flat.split(4 * CHUNK // flat.element_size())
            parts = torch.stack([(_words(some) * weights[: some.nbytes // 4]).sum() for some in chunks])
            sums[i] = (parts * _odd(torch.arange(len(parts))).to(device)).sum()
    return sums


@torch.no_grad()
def checksums_kernel(tensors: Sequence[Tensor], most: int | None = None) -> Tensor:
    """`checksums`, 64 bits per tensor, of tensors of one device and dtype, in Triton: one program per chunk of 2¹⁵ words.

    `most`: only the first `most` elements of each tensor are read; None: all.
    """
    from gramian.kernels import _triton_checksums as triton_kernels

    device, width = tensors[0].device, tensors[0].element_size()
    counts = [t.numel() if most is None else min(t.numel(), most) for t in tensors]
    if width == 2:
        tensors = [
            _whole_words(t.view(-1)[:count]) if count % 2 or t.data_ptr() % 4 else t
            for t, count in zip(tensors, counts, strict=True)
        ]
    sizes_N, owners_P, chunks_P, odd_P = _layout(tuple(counts), width, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    pointers_N = _addresses(tuple([t.data_ptr() for t in tensors]), device, stream)
    partials_P = torch.empty_like(odd_P)
    if len(partials_P):
        columns = _weights(device)[-COLUMNS:]
        with on_device(tensors[0]):
            triton_kernels.checksums[(len(partials_P),)](
                partials_P, pointers_N, sizes_N, owners_P, chunks_P, columns, RADIX,
                WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
    return torch.zeros(len(tensors), dtype=torch.int64, device=device).index_add_(0, owners_P, partials_P * odd_P)


def _words(flat: Tensor) -> Tensor:
    return flat.masked_fill(flat == 0, 0.0).view(torch.int32)


def _whole_words(flat: Tensor) -> Tensor:
    """`flat`, or a zero-padded copy if its 16-bit elements do not fill 32-bit words or are not aligned to 4 bytes."""
    if flat.element_size() == 2 and (len(flat) % 2 or flat.data_ptr() % 4):
        return nn.functional.pad(flat, (0, len(flat) % 2)).clone()
    return flat


@functools.lru_cache(maxsize=16)
def _order(groups: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Index of each tensor's checksum in the concatenated checksums of `groups`, which are tuples of tensor indices."""
    return torch.tensor([i for members in groups for i in members]).argsort().to(device)


@functools.lru_cache(maxsize=16)
def _layout(counts: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Work of the Triton programs for N tensors of `counts` elements of `width` bytes.

    Returns:
        Number of 32-bit words of each tensor [N]; for each of P programs its tensor, its chunk, and the chunk's multiplier.
    """
    sizes_N = (torch.tensor(counts) * width + 3) // 4
    counts_N = -(-sizes_N // CHUNK)
    owners_P = torch.arange(len(counts)).repeat_interleave(counts_N)
    chunks_P = torch.arange(len(owners_P)) - (counts_N.cumsum(0) - counts_N)[owners_P]
    return sizes_N.to(device), owners_P.to(device), chunks_P.to(device), _odd(chunks_P).to(device)


@functools.lru_cache(maxsize=16)
def _addresses(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Addresses [N] as a tensor for kernels of one stream, on which it is copied; tensors often lie where they did before."""
    return torch.tensor(pointers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@functools.lru_cache(maxsize=16)
def _joint(sizes: tuple[int, ...], numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Multiplier of every 32-bit word of the concatenated small tensors, and the index of the tensor that it belongs to.

    `sizes` are the numbers of words of the tensors, and `numbers` their indices.
    """
    weights = (_weights(torch.device("cpu")) * _odd(torch.zeros(1, dtype=torch.int64)))[:SMALL]
    owners = torch.tensor(numbers).repeat_interleave(torch.tensor(sizes))
    return torch.cat([weights[:size] for size in sizes]).to(device), owners.to(device)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Multipliers of a chunk's 32-bit words, int64 [ROWS · COLUMNS]: RADIX^(ROWS - 1 - row) · odd number of the column."""
    rows = torch.tensor([_signed(pow(RADIX, ROWS - 1 - row, 2**64)) for row in range(ROWS)])
    return (rows[:, None] * _odd(torch.arange(COLUMNS) - COLUMNS)).flatten().to(device)


def _odd(index: Tensor) -> Tensor:
    """A pseudo-random odd 64-bit number for each index (Steele, Lea and Flood's SplitMix64)."""
    z = (index + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def _signed(number: int) -> int:
    """The signed 64-bit integer with the same bits as an unsigned one."""
    return number - 2**64 if number >= 2**63 else number
