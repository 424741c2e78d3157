"""Squared norms of products LᵀR over segments of rows of different lengths: samples of a packed batch, experts of a sample.

R rows, M and N features, S segments. Segment s has the rows order[offsets[s]], …, order[offsets[s + 1] − 1] of L [R, M] and
R [R, N]; rows behind the last offset belong to none. The host never reads an offset, so nothing waits for the device.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.launch import Tiles, cheapest, on_device, takes_kernel

_HALF = (
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=3, cost=0.5),
)
_SINGLE = (Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),)


def ragged_gram_squares(left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor) -> tuple[Tensor, Tensor]:
    """‖L_sᵀR_s‖² of every segment s as Σ_tu (l_t·l_u)(r_t·r_u), and its part with t = u.

    Cost: about n(n + 128)(M + N) FLOPs for a segment of n rows; no matrix is written.

    Args:
        left_RM: the rows of L.
        right_RN: the rows of R.
        order_R: row numbers, those of a segment next to each other.
        offsets_S: [S + 1] integers: where each segment begins, and the end of the last.

    Returns:
        Two tensors [S], in float32; in float64 if an input is.
    """
    run = ragged_gram_squares_kernel if takes_kernel(left_RM, right_RN) else ragged_gram_squares_twin
    return run(left_RM, right_RN, order_R, offsets_S)


def ragged_direct_squares(left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor) -> Tensor:
    """‖L_sᵀR_s‖² of every segment s, [S], the products formed tile by tile and not written. 2·R·M·N FLOPs.

    Arguments as in `ragged_gram_squares`.
    """
    run = ragged_direct_squares_kernel if takes_kernel(left_RM, right_RN) else ragged_direct_squares_twin
    return run(left_RM, right_RN, order_R, offsets_S)


@torch.no_grad()
def ragged_gram_squares_twin(
    left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor
) -> tuple[Tensor, Tensor]:
    """`ragged_gram_squares` in plain torch, one segment at a time."""
    wide, ends = wide_dtype(left_RM, right_RN), offsets_S.tolist()
    left_RM, right_RN = left_RM[order_R].to(wide), right_RN[order_R].to(wide)
    squares_S = left_RM.new_zeros(len(ends) - 1)
    diagonal_S = torch.zeros_like(squares_S)
    for s, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if begin < end:
            left, right = left_RM[begin:end], right_RN[begin:end]
            product = (left @ left.mT).mul_(right @ right.mT)
            squares_S[s], diagonal_S[s] = product.sum(), product.diagonal().sum()
    return squares_S, diagonal_S


@torch.no_grad()
def ragged_direct_squares_twin(left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor) -> Tensor:
    """`ragged_direct_squares` in plain torch, one segment at a time."""
    wide, ends = wide_dtype(left_RM, right_RN), offsets_S.tolist()
    left_RM, right_RN = left_RM[order_R].to(wide), right_RN[order_R].to(wide)
    squares_S = left_RM.new_zeros(len(ends) - 1)
    for s, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if begin < end:
            squares_S[s] = (left_RM[begin:end].mT @ right_RN[begin:end]).square_().sum()
    return squares_S


@torch.no_grad()
def ragged_gram_squares_kernel(
    left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor, *, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """`ragged_gram_squares` in Triton: one program per tile of a segment's rows, which runs over the tiles before it.

    There are at most R / tile + S such tiles, whatever the lengths; programs without one end at once.
    """
    from gramian.kernels.norms import _triton_ragged_squares as triton_kernels

    rows, segments = len(order_R), len(offsets_S) - 1
    if tiles is None:
        tiles = (_HALF if left_RM.element_size() == right_RN.element_size() == 2 else _SINGLE)[-1]
    lengths_S = offsets_S.diff()
    firsts_S = torch.nn.functional.pad(((lengths_S + tiles.rows - 1) // tiles.rows).cumsum(0), (1, 0))
    most = rows // tiles.rows + segments
    numbers = torch.arange(most, device=left_RM.device)
    segment_P = torch.searchsorted(firsts_S[1:], numbers, right=True)
    sums_2P = left_RM.new_zeros((2, most), dtype=torch.float32)
    if rows and segments and left_RM.shape[1] and right_RN.shape[1]:
        with on_device(left_RM):
            triton_kernels.ragged_gram_squares[(most,)](
                sums_2P[0], sums_2P[1], left_RM, right_RN, order_R, offsets_S, segment_P, firsts_S, segments,
                *left_RM.stride(), left_RM.shape[1], *right_RN.stride(), right_RN.shape[1],
                TILE=tiles.rows, DEPTH=tiles.depth, **tiles.options,
            )  # fmt: skip
    squares_S, diagonal_S = (
        torch.segment_reduce(sums_P, "sum", offsets=firsts_S, unsafe=True, initial=0) for sums_P in sums_2P
    )
    return squares_S, diagonal_S


@torch.no_grad()
def ragged_direct_squares_kernel(
    left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor, *, tiles: Tiles | None = None, group: int = 8
) -> Tensor:
    """`ragged_direct_squares` in Triton: one program per segment and tile of its product; `group` as in `direct_squares`."""
    from gramian.kernels.norms import _triton_ragged_squares as triton_kernels

    common = torch.promote_types(left_RM.dtype, right_RN.dtype)
    left_RM, right_RN = left_RM.to(common), right_RN.to(common)
    segments, (rows, columns) = len(offsets_S) - 1, (left_RM.shape[1], right_RN.shape[1])
    if tiles is None:
        choices = [(t, segments * t.over(rows, columns)) for t in (_HALF if common.itemsize == 2 else _SINGLE)]
        tiles = cheapest(choices, left_RM)
    sums_SP = left_RM.new_zeros((segments, tiles.over(rows, columns)), dtype=torch.float32)
    if sums_SP.numel():
        with on_device(left_RM):
            triton_kernels.ragged_direct_squares[(sums_SP.numel(),)](
                sums_SP, left_RM, right_RN, order_R, offsets_S, -(-rows // tiles.rows), -(-columns // tiles.columns),
                *left_RM.stride(), rows, *right_RN.stride(), columns,
                ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=group, **tiles.options,
            )  # fmt: skip
    return sums_SP.sum(1, dtype=torch.float64).float()
