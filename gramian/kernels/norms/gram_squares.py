"""Squared Frobenius norms of per-sample gradients LᵀR from Gram matrices over tokens, for several L that share one R.

B samples, T tokens, M and N features; s and t run over tokens. L and R are the two matrices per sample whose product is the
gradient of a weight, such as output gradients and inputs of a linear layer.
"""

import functools
from collections.abc import Sequence
from typing import Any

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

MOST_LEFTS = 4

_HALF = (
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=4, cost=1.0),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=4, cost=0.5),
)
_SINGLE = (
    Tiles(rows=128, columns=128, depth=16, warps=16, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),
)


def gram_squares(lefts: Sequence[Tensor], right_BTN: Tensor) -> tuple[Tensor, Tensor]:
    """‖L₁ᵀR‖² + … + ‖L_KᵀR‖² of every sample, L_k [T, M_k], R [T, N], without forming a gradient or a T×T matrix.

    With rows r_t of R and l_kt of L_k, squares = Σ_st (r_s·r_t) Σ_k (l_ks·l_kt), and diagonal = Σ_t ‖r_t‖² Σ_k ‖l_kt‖² is its
    part with s = t: the sum over tokens of the squared norms of per-token gradients.

    Cost: T(T + 128)(N + Σ M_k) FLOPs per sample, half of what two full Gram matrices take; (T/128)² floats written.

    `lefts` are one to four tensors [B, T, M_k]. Any strides are allowed; half precision whose rows do not begin at multiples of
    16 bytes is copied once. Returns squares [B] and diagonal [B], in float32; in float64 if an input is.

    Raises:
        GramianError: for no or more than four lefts, or if B or T differ.
    """
    if not 1 <= len(lefts) <= MOST_LEFTS:
        raise GramianError(f"lefts: {len(lefts)} tensors, expected 1 to {MOST_LEFTS}")
    for left in lefts:
        if left.shape[:2] != right_BTN.shape[:2]:
            raise GramianError(f"lefts: {list(left.shape)} beside right {list(right_BTN.shape)}, B and T must agree")
    squares_1B, diagonals_1B = gram_squares_of_layers([[right_BTN, *lefts]])
    return squares_1B[0], diagonals_1B[0]


def gram_squares_of_layers(layers: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """`gram_squares` of K layers R, L₁, L₂, …, each of one layout (`launch.layout`): [K, B] both; one launch on a GPU."""
    if takes_kernel(*layers[0]):
        return gram_squares_kernel(layers)
    squares, diagonals = zip(*(gram_squares_twin(layer[1:], layer[0]) for layer in layers), strict=True)
    return torch.stack(squares), torch.stack(diagonals)


@torch.no_grad()
def gram_squares_twin(lefts: Sequence[Tensor], right_BTN: Tensor) -> tuple[Tensor, Tensor]:
    """`gram_squares`, Σ_k ‖L_kᵀR‖² per sample, in plain torch: rows of one sample's Gram matrices at a time."""
    wide = wide_dtype(right_BTN, *lefts)
    samples, tokens = right_BTN.shape[:2]
    squares_B = right_BTN.new_zeros(samples, dtype=wide)
    diagonal_B = right_BTN.new_zeros(samples, dtype=wide)
    rows = max(1, CHUNK_ELEMENTS // max(1, tokens))
    for b in range(samples):
        right_TN = right_BTN[b].to(wide)
        lefts_TM = [left[b].to(wide) for left in lefts]
        energy_T = torch.stack([left.square().sum(1) for left in lefts_TM]).sum(0)
        diagonal_B[b] = (right_TN.square().sum(1) * energy_T).sum()
        for start in range(0, tokens, rows):
            some = slice(start, start + rows)
            s_left = sum((left[some] @ left.T for left in lefts_TM[1:]), start=lefts_TM[0][some] @ lefts_TM[0].T)
            squares_B[b] += (right_TN[some] @ right_TN.T).mul_(s_left).sum()
    return squares_B, diagonal_B


@torch.no_grad()
def gram_squares_kernel(
    layers: Sequence[Sequence[Tensor]],
    *,
    tiles: Tiles | None = None,
    group: int = 8,
    descriptor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`gram_squares_of_layers` in Triton: one program per layer, sample and pair of token tiles on or above the diagonal.

    The Gram tiles of R and of all L_k accumulate in registers, are multiplied there and summed to one float; torch sums these.
    Pairs off the diagonal count twice. `tiles`: square tile sizes, None: the fastest; `group`: number of tile columns whose
    programs are consecutive, so that they share reads; `descriptor`: whether to read by bulk copies (TMA), None: for half
    precision if the device supports it.
    """
    from gramian.kernels.norms import _triton_gram_squares as triton_kernels

    layers = [_with_lefts_of_one_dtype(layer) for layer in layers]
    first = layers[0]
    samples, tokens = first[0].shape[:2]
    if tiles is None:
        choices = _HALF if all(tensor.element_size() == 2 for tensor in first) else _SINGLE
        programs = [(choice, len(layers) * samples * _pairs(tokens, choice.rows)) for choice in choices]
        tiles = cheapest(programs, first[0])
    if descriptor is None:
        descriptor = wants_descriptors(*first)
    pairs = _pairs(tokens, tiles.rows)
    sums_2KBP = first[0].new_empty((2, len(layers), samples, pairs), dtype=torch.float32)
    if sums_2KBP.numel():
        columns = [fitted(column, descriptor) for column in zip(*layers, strict=True)]
        layers = [list(layer) for layer in zip(*columns, strict=True)]
        shapes: list[Any] = [(*strides(tensor, descriptor), tensor.shape[2]) for tensor in layers[0]]
        unused = MOST_LEFTS + 1 - len(first)
        with on_device(first[0]):
            if descriptor:
                scratch_for_descriptors()
            triton_kernels.gram_squares[(len(layers) * samples * pairs,)](
                sums_2KBP, table(layers), samples, tokens, -(-tokens // tiles.rows), pairs,
                *[number for shape in shapes for number in shape], *[None] * (4 * unused),
                RIGHT=triton_dtype(first[0].dtype), LEFT=triton_dtype(first[1].dtype), ALIGNMENT=alignment(layers),
                LEFTS=len(first) - 1, TILE=tiles.rows, DEPTH=tiles.depth, GROUP=group, DESCRIPTOR=descriptor,
                **tiles.options,
            )  # fmt: skip
    squares_KB, diagonals_KB = sums_2KBP.sum(3, dtype=torch.float64).float()
    return squares_KB, diagonals_KB


def _with_lefts_of_one_dtype(layer: Sequence[Tensor]) -> list[Tensor]:
    right, *lefts = layer
    dtype = functools.reduce(torch.promote_types, [left.dtype for left in lefts])
    return [right, *(left.to(dtype) for left in lefts)]


def _pairs(tokens: int, tile: int) -> int:
    """Number of pairs of token tiles on and above the diagonal, for `tokens` tokens in tiles of `tile`."""
    tiles = -(-tokens // tile)
    return tiles * (tiles + 1) // 2
