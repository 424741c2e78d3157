"""Squared Frobenius norms of per-sample gradients LᵀR from Gram matrices over tokens.

B samples, T tokens, M and N features; s and t run over tokens. L and R are the two matrices per sample whose product is the
gradient of a weight, such as output gradients and inputs of a linear layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels.launch import (
    Tiles,
    alignment,
    cheapest,
    fitted,
    on_device,
    scratch_for_descriptors,
    strides,
    table,
    takes_kernel,
    triton_dtype,
    wants_descriptors,
)
from gramian.plan.norm_algorithm import CHUNK_ELEMENTS

_HALF = (
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=4, cost=1.0),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=4, cost=0.5),
)
_SINGLE = (
    Tiles(rows=128, columns=128, depth=16, warps=16, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),
)


def gram_squares(left_BTM: Tensor, right_BTN: Tensor) -> tuple[Tensor, Tensor]:
    """‖LᵀR‖² of every sample, L [T, M], R [T, N], without forming a gradient or a T×T matrix.

    With rows l_t of L and r_t of R, squares = Σ_st (l_s·l_t)(r_s·r_t), and diagonal = Σ_t ‖l_t‖² ‖r_t‖² is its part with s = t:
    the sum over tokens of the squared norms of per-token gradients.

    Cost: T(T + 128)(M + N) FLOPs per sample, half of what two full Gram matrices take; (T/128)² floats written.

    Any strides are allowed; half precision whose rows do not begin at multiples of 16 bytes is copied once. Returns squares [B]
    and diagonal [B], in float32; in float64 if an input is.

    Raises:
        GramianError: if B or T differ.
    """
    if left_BTM.shape[:2] != right_BTN.shape[:2]:
        raise GramianError(f"left {list(left_BTM.shape)} beside right {list(right_BTN.shape)}: B and T must agree")
    squares_1B, diagonals_1B = gram_squares_of_layers([(left_BTM, right_BTN)])
    return squares_1B[0], diagonals_1B[0]


def gram_squares_of_layers(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`gram_squares` of K layers (L, R), all of one layout (`launch.layout`): [K, B] both; one launch on a GPU."""
    if takes_kernel(*layers[0]):
        return gram_squares_kernel(layers)
    squares, diagonals = zip(*(gram_squares_twin(left, right) for left, right in layers), strict=True)
    return torch.stack(squares), torch.stack(diagonals)


@torch.no_grad()
def gram_squares_twin(left_BTM: Tensor, right_BTN: Tensor) -> tuple[Tensor, Tensor]:
    """`gram_squares`, ‖LᵀR‖² per sample, in plain torch: rows of one sample's Gram matrices at a time."""
    wide = wide_dtype(left_BTM, right_BTN)
    samples, tokens = right_BTN.shape[:2]
    squares_B = right_BTN.new_zeros(samples, dtype=wide)
    diagonal_B = right_BTN.new_zeros(samples, dtype=wide)
    rows = max(1, CHUNK_ELEMENTS // max(1, tokens))
    for b in range(samples):
        left_TM, right_TN = left_BTM[b].to(wide), right_BTN[b].to(wide)
        diagonal_B[b] = (left_TM.square().sum(1) * right_TN.square().sum(1)).sum()
        for start in range(0, tokens, rows):
            some = slice(start, start + rows)
            squares_B[b] += (right_TN[some] @ right_TN.T).mul_(left_TM[some] @ left_TM.T).sum()
    return squares_B, diagonal_B


@torch.no_grad()
def gram_squares_kernel(
    layers: Sequence[tuple[Tensor, Tensor]],
    *,
    tiles: Tiles | None = None,
    group: int = 8,
    descriptor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`gram_squares_of_layers` in Triton: one program per layer, sample and pair of token tiles on or above the diagonal.

    The Gram tiles of L and R accumulate in registers, are multiplied there and summed to one float; torch sums these.
    Pairs off the diagonal count twice. `tiles`: square tile sizes, None: the fastest; `group`: number of tile columns whose
    programs are consecutive, so that they share reads; `descriptor`: whether to read by bulk copies (TMA), None: for half
    precision if the device supports it.
    """
    from gramian.kernels.norms import _triton_gram_squares as triton_kernels

    left, right = layers[0]
    samples, tokens = right.shape[:2]
    if tiles is None:
        choices = _HALF if left.element_size() == right.element_size() == 2 else _SINGLE
        programs = [(choice, len(layers) * samples * _pairs(tokens, choice.rows)) for choice in choices]
        tiles = cheapest(programs, right)
    if descriptor is None:
        descriptor = wants_descriptors(left, right)
    pairs = _pairs(tokens, tiles.rows)
    sums_2KBP = right.new_empty((2, len(layers), samples, pairs), dtype=torch.float32)
    if sums_2KBP.numel():
        lefts, rights = (fitted(side, descriptor) for side in zip(*layers, strict=True))
        sides = list(zip(lefts, rights, strict=True))
        with on_device(right):
            if descriptor:
                scratch_for_descriptors()
            triton_kernels.gram_squares[(len(layers) * samples * pairs,)](
                sums_2KBP, table(sides), samples, tokens, -(-tokens // tiles.rows), pairs,
                *strides(lefts[0], descriptor), left.shape[2], *strides(rights[0], descriptor), right.shape[2],
                LEFT=triton_dtype(left.dtype), RIGHT=triton_dtype(right.dtype), ALIGNMENT=alignment(sides),
                TILE=tiles.rows, DEPTH=tiles.depth, GROUP=group, DESCRIPTOR=descriptor, **tiles.options,
            )  # fmt: skip
    squares_KB, diagonals_KB = sums_2KBP.sum(3, dtype=torch.float64).float()
    return squares_KB, diagonals_KB


def _pairs(tokens: int, tile: int) -> int:
    """Number of pairs of token tiles on and above the diagonal, for `tokens` tokens in tiles of `tile`."""
    tiles = -(-tokens // tile)
    return tiles * (tiles + 1) // 2
