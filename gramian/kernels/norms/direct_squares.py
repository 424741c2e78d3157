"""Squared Frobenius norms of per-sample gradients LᵀR, computed tile by tile; no gradient is written to memory.

B samples, T tokens, M and N features. L and R are the two matrices per sample whose product is the gradient of a weight, such
as output gradients and inputs of a linear layer.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels.launch import Tiles, cheapest, on_device, operand, takes_kernel, wants_descriptors
from gramian.plan.norm_algorithm import CHUNK_ELEMENTS, samples_per_chunk

_HALF = (
    Tiles(rows=128, columns=256, depth=64, warps=8, stages=4, cost=2.0),
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=4, cost=1.2),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=4, cost=0.5),
)
_SINGLE = (
    Tiles(rows=128, columns=128, depth=16, warps=8, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),
)


def direct_squares(left_BTM: Tensor, right_BTN: Tensor) -> Tensor:
    """‖L_bᵀR_b‖² of every sample b from L [B, T, M] and R [B, T, N], without writing the gradients L_bᵀR_b to memory.

    Returns [B] in float32; in float64 if an input is. Any strides are allowed; half precision whose rows do not begin at
    multiples of 16 bytes is copied once.

    Cost: 2·T·M·N FLOPs per sample, the same as computing the gradients; M·N/2¹⁵ floats written per sample.

    Raises:
        GramianError: if B or T of L and R differ.
    """
    if left_BTM.shape[:2] != right_BTN.shape[:2]:
        raise GramianError(f"left: {list(left_BTM.shape)} beside right {list(right_BTN.shape)}, B and T must agree")
    if takes_kernel(left_BTM, right_BTN):
        return direct_squares_kernel(left_BTM, right_BTN)
    return direct_squares_twin(left_BTM, right_BTN)


@torch.no_grad()
def direct_squares_twin(left_BTM: Tensor, right_BTN: Tensor) -> Tensor:
    """`direct_squares`, ‖LᵀR‖² per sample, in plain torch: gradients are formed for a chunk of samples and rows at a time."""
    wide = wide_dtype(left_BTM, right_BTN)
    samples, rows, columns = len(left_BTM), left_BTM.shape[2], right_BTN.shape[2]
    squares_B = left_BTM.new_zeros(samples, dtype=wide)
    at_once = samples_per_chunk(rows * columns)
    rows_at_once = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, samples, at_once):
        some = slice(start, start + at_once)
        right = right_BTN[some].to(wide)
        for row in range(0, rows, rows_at_once):
            gradient_BMN = left_BTM[some, :, row : row + rows_at_once].to(wide).mT @ right
            squares_B[some] += gradient_BMN.square_().sum((1, 2))
    return squares_B


@torch.no_grad()
def direct_squares_kernel(
    left_BTM: Tensor, right_BTN: Tensor, *, tiles: Tiles | None = None, group: int = 8, descriptor: bool | None = None
) -> Tensor:
    """`direct_squares`, ‖LᵀR‖² per sample, in Triton: one program per sample and gradient tile writes its sum of squares.

    Operands of two dtypes are copied to the wider one. `tiles`: tile sizes, None: the fastest for the shape; `group`: number of
    tile rows whose programs are consecutive, so that they share reads; `descriptor`: whether to read by bulk copies (TMA),
    None: for half precision if the device supports it.
    """
    from gramian.kernels.norms import _triton_direct_squares as triton_kernels

    common = torch.promote_types(left_BTM.dtype, right_BTN.dtype)
    left_BTM, right_BTN = left_BTM.to(common), right_BTN.to(common)
    samples, tokens, rows = left_BTM.shape
    columns = right_BTN.shape[2]
    if tiles is None:
        choices = _HALF if common.itemsize == 2 else _SINGLE
        tiles = cheapest([(choice, samples * choice.over(rows, columns)) for choice in choices], left_BTM)
    if descriptor is None:
        descriptor = wants_descriptors(left_BTM, right_BTN)
    sums_BP = left_BTM.new_empty((samples, tiles.over(rows, columns)), dtype=torch.float32)
    if sums_BP.numel():
        with on_device(left_BTM):
            triton_kernels.direct_squares[(sums_BP.numel(),)](
                sums_BP,
                operand(left_BTM, descriptor, tiles.depth, tiles.rows),
                operand(right_BTN, descriptor, tiles.depth, tiles.columns),
                tokens, -(-rows // tiles.rows), -(-columns // tiles.columns),
                *left_BTM.stride(), rows, *right_BTN.stride(), columns,
                ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=group, DESCRIPTOR=descriptor, **tiles.options,
            )  # fmt: skip
    return sums_BP.sum(1, dtype=torch.float64).float()
