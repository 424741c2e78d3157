"""Weighted sums of products LᵀR over segments of rows, one sum for each group of segments: an expert's, over samples.

R rows, M and N features, G groups, B segments of each group. Segment s = b·G + g belongs to group g; its rows are as in
`norms.ragged_squares`.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.launch import DTYPES, Tiles, cheapest, on_device, takes_kernel

_HALF = (
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=3, cost=0.5),
)
_SINGLE = (Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),)


def ragged_products(
    left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor, weights_B: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Σ_b c_b L_bgᵀR_bg for every group g, [G, M, N] in `out_dtype`, with weights c [B]; S = B·G segments. 2·R·M·N FLOPs.

    Each segment's product is weighted in float32 (float64 if L or R is). A weight of exactly 0 adds nothing, even if the
    segment contains NaN or infinity. `order_R`, `offsets_S`: as in `ragged_squares`.
    """
    if takes_kernel(left_RM, right_RN) and weights_B.is_cuda and out_dtype in DTYPES:
        return ragged_products_kernel(left_RM, right_RN, order_R, offsets_S, weights_B, out_dtype)
    return ragged_products_twin(left_RM, right_RN, order_R, offsets_S, weights_B, out_dtype)


@torch.no_grad()
def ragged_products_twin(
    left_RM: Tensor, right_RN: Tensor, order_R: Tensor, offsets_S: Tensor, weights_B: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """`ragged_products` in plain torch, one segment at a time."""
    wide, ends = wide_dtype(left_RM, right_RN), offsets_S.tolist()
    groups = (len(ends) - 1) // max(len(weights_B), 1)
    left_RM, right_RN, weights = left_RM[order_R].to(wide), right_RN[order_R].to(wide), weights_B.tolist()
    total_GMN = left_RM.new_zeros(groups, left_RM.shape[1], right_RN.shape[1])
    for s, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if begin < end and weights[s // groups]:
            total_GMN[s % groups].addmm_(left_RM[begin:end].mT, right_RN[begin:end], alpha=weights[s // groups])
    return total_GMN.to(out_dtype)


@torch.no_grad()
def ragged_products_kernel(
    left_RM: Tensor,
    right_RN: Tensor,
    order_R: Tensor,
    offsets_S: Tensor,
    weights_B: Tensor,
    out_dtype: torch.dtype,
    *,
    tiles: Tiles | None = None,
    group: int = 8,
) -> Tensor:
    """`ragged_products` in Triton: one program per group and tile of its sum; `group`: as in `weighted_product`."""
    from gramian.kernels.sums import _triton_ragged_products as triton_kernels

    common = torch.promote_types(left_RM.dtype, right_RN.dtype)
    left_RM, right_RN = left_RM.to(common), right_RN.to(common)
    batch, (rows, columns) = len(weights_B), (left_RM.shape[1], right_RN.shape[1])
    groups = (len(offsets_S) - 1) // max(batch, 1)
    out_GMN = left_RM.new_zeros((groups, rows, columns), dtype=out_dtype)
    if tiles is None:
        choices = _HALF if common.itemsize == 2 else _SINGLE
        tiles = cheapest([(choice, groups * choice.over(rows, columns)) for choice in choices], left_RM)
    if out_GMN.numel() and len(order_R):
        with on_device(left_RM):
            triton_kernels.ragged_products[(tiles.over(rows, columns), groups)](
                out_GMN, left_RM, right_RN, order_R, offsets_S, weights_B.to(torch.float32).contiguous(), batch, groups,
                -(-rows // tiles.rows), -(-columns // tiles.columns),
                *left_RM.stride(), rows, *right_RN.stride(), columns,
                ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=group, **tiles.options,
            )  # fmt: skip
    return out_GMN
