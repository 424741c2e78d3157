"""The weighted sum of per-sample gradients LᵀR as one matrix product, with float32 weights.

B samples, T tokens, M and N features. L and R are, for example, output gradients and inputs of a linear layer.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.kernels.launch import (
    DTYPES,
    Tiles,
    alignment,
    fitted,
    on_device,
    processors,
    scratch_for_descriptors,
    strides,
    table,
    takes_kernel,
    triton_dtype,
    wants_descriptors,
)

_BULK = (
    Tiles(rows=128, columns=256, depth=64, warps=8, stages=4, cost=1.6),
    Tiles(rows=256, columns=128, depth=64, warps=8, stages=3, cost=1.6),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=4, cost=0.5),
)
"""Tiles that are read by bulk copies (TMA)."""
_HALF = (
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=4, cost=1.0),
    Tiles(rows=64, columns=64, depth=64, warps=4, stages=4, cost=0.5),
)
_SINGLE = (
    Tiles(rows=128, columns=128, depth=16, warps=8, stages=3, cost=1.0),
    Tiles(rows=64, columns=64, depth=32, warps=8, stages=2, cost=0.5),
)

_WAVES = 8
"""How often the programs of one launch fill the device: a launch takes the host a fraction of a millisecond."""


def weighted_product(left_BTM: Tensor, right_BTN: Tensor, weights_B: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Σ_b c_b L_bᵀR_b, [M, N] in `out_dtype`, from L [B, T, M], R [B, T, N] and weights c [B], rounded once.

    Each sample's product L_bᵀR_b is multiplied by c_b and added in float32 (float64 if L or R is). A sample of weight exactly 0
    adds nothing, even if it contains NaN or infinity.

    Cost: 2·B·T·M·N FLOPs, one read of L and R per band of tiles, one write of [M, N]. If these are too few tiles to fill the
    device, the tokens are divided into up to B·T/(16·tile depth) parts, whose float32 sums [M, N] are written and added.

    Any strides are allowed; half precision whose rows do not begin at multiples of 16 bytes is copied once.

    Raises:
        GramianError: if B or T of L and R differ, or c is not [B].
    """
    samples = len(left_BTM)
    if left_BTM.shape[:2] != right_BTN.shape[:2]:
        raise GramianError(f"left: {list(left_BTM.shape)} beside right {list(right_BTN.shape)}, B and T must agree")
    if weights_B.shape != (samples,):
        raise GramianError(f"weights: shape {list(weights_B.shape)}, expected one for each of the {samples} samples")
    if _has_kernel(left_BTM, right_BTN, weights_B, out_dtype):
        return weighted_products_kernel([left_BTM], [right_BTN], weights_B, out_dtype)[0]
    return weighted_product_twin(left_BTM, right_BTN, weights_B, out_dtype)


def weighted_products(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], weights_B: Tensor, out_dtype: torch.dtype
) -> list[Tensor]:
    """`weighted_product` of several pairs [B, T, M], [B, T, N] of one layout (`launch.layout`), by one launch on a GPU."""
    if _has_kernel(lefts[0], rights[0], weights_B, out_dtype):
        return weighted_products_kernel(lefts, rights, weights_B, out_dtype)
    return [weighted_product(left, right, weights_B, out_dtype) for left, right in zip(lefts, rights, strict=True)]


def products_of_one_launch(left_BTM: Tensor, right_BTN: Tensor) -> int:
    """Number of products of this layout that `weighted_products` should form together: enough to fill a GPU `_WAVES` times.

    One where no kernel runs, and in float32, whose products are quicker by torch.
    """
    if not takes_kernel(left_BTM, right_BTN) or min(left_BTM.element_size(), right_BTN.element_size()) == 4:
        return 1
    tiles = _BULK[0].over(left_BTM.shape[2], right_BTN.shape[2])
    return -(-_WAVES * processors(left_BTM) // max(1, tiles))


def _has_kernel(left_BTM: Tensor, right_BTN: Tensor, weights_B: Tensor, out_dtype: torch.dtype) -> bool:
    return takes_kernel(left_BTM, right_BTN) and weights_B.is_cuda and out_dtype in DTYPES


@torch.no_grad()
def weighted_product_twin(left_BTM: Tensor, right_BTN: Tensor, weights_B: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`weighted_product`, Σ_b c_b L_bᵀR_b over samples b, in plain torch, one sample at a time."""
    wide = wide_dtype(left_BTM, right_BTN)
    total_MN = left_BTM.new_zeros((left_BTM.shape[2], right_BTN.shape[2]), dtype=wide)
    weights_B = weights_B.to(wide)
    for left_TM, right_TN, weight in zip(left_BTM, right_BTN, weights_B, strict=True):
        product_MN = (left_TM.to(wide).mT @ right_TN.to(wide)).mul_(weight)
        total_MN += product_MN.masked_fill_(weight == 0, 0)
    return total_MN.to(out_dtype)


@torch.no_grad()
def weighted_products_kernel(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights_B: Tensor,
    out_dtype: torch.dtype,
    *,
    tiles: Tiles | None = None,
    parts: int | None = None,
    group: int = 8,
    descriptor: bool | None = None,
) -> list[Tensor]:
    """`weighted_products`, Σ_b c_b L_bᵀR_b by layer, in Triton: one program per layer, tile of its sum and part of the tokens.

    `parts`: number of parts into which the concatenated tokens of all samples are divided; None: as many as fill the device
    with programs of at least 16 steps (`tiles.depth` tokens each). `tiles`: tile sizes, None: the fastest for the shape;
    `group`: number of tile rows whose programs are consecutive, so that they share reads; `descriptor`: whether to read by bulk
    copies (TMA), None: for half precision if the device supports it.
    """
    from gramian.kernels.sums import _triton_weighted_product as triton_kernels

    common = torch.promote_types(lefts[0].dtype, rights[0].dtype)
    lefts, rights = [left.to(common) for left in lefts], [right.to(common) for right in rights]
    samples, tokens, rows = lefts[0].shape
    columns = rights[0].shape[2]
    if not (samples and tokens and rows and columns):
        return [left.new_zeros((rows, columns), dtype=out_dtype) for left in lefts]
    if descriptor is None:
        descriptor = wants_descriptors(lefts[0], rights[0])
    choices = (tiles,) if tiles is not None else _BULK if descriptor else _HALF if common.itemsize == 2 else _SINGLE
    tiles, most = _divided(choices, len(lefts), samples, tokens, rows, columns, processors(lefts[0]))
    steps_per_sample = -(-tokens // tiles.depth)
    steps = samples * steps_per_sample
    parts = most if parts is None else parts
    steps_per_part = -(-steps // parts)
    parts = -(-steps // steps_per_part)
    sides = list(zip(fitted(lefts, descriptor), fitted(rights, descriptor), strict=True))
    left, right = sides[0]
    dtype = out_dtype if parts == 1 else torch.float32
    sums_PMN = [left.new_empty((parts, rows, columns), dtype=dtype) for _ in sides]
    with on_device(left):
        if descriptor:
            scratch_for_descriptors()
        triton_kernels.weighted_products[(len(sides) * tiles.over(rows, columns), parts)](
            table([[*pair, total] for pair, total in zip(sides, sums_PMN, strict=True)]), *_ascending(weights_B),
            samples, tokens, steps_per_sample, steps, steps_per_part, -(-rows // tiles.rows), -(-columns // tiles.columns),
            *strides(left, descriptor), rows, *strides(right, descriptor), columns,
            DTYPE=triton_dtype(common), OUT=triton_dtype(dtype), ALIGNMENT=alignment(sides),
            ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=group, DESCRIPTOR=descriptor, **tiles.options,
        )  # fmt: skip
    return [total[0] if parts == 1 else total.sum(0).to(out_dtype) for total in sums_PMN]


@functools.lru_cache(1024)
def _divided(
    choices: tuple[Tiles, ...], layers: int, samples: int, tokens: int, rows: int, columns: int, processors: int
) -> tuple[Tiles, int]:
    """The fastest of some tile sizes for these products on a device of so many processors, and the parts of their sums."""
    found = []
    for tiles in choices:
        programs = layers * tiles.over(rows, columns)
        parts = max(1, min(processors // programs, samples * -(-tokens // tiles.depth) // 16))
        found.append((-(-programs * parts // processors) * tiles.cost / parts, tiles, parts))
    return min(found, key=lambda one: one[0])[1:]


_ascending_of = WeakTensorKeyDictionary()
"""{weights of samples: what `_ascending` returned for them and their version}: a step uses one tensor for all its layers."""


def _ascending(weights_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples by ascending |weight|: numbers [B], weights [B], ratios [B] of the weight before to the own, count of zeros."""
    found, version = _ascending_of.get(weights_B, (None, -1))
    if found is None or version != weights_B._version:
        order_B = weights_B.abs().argsort()  # NaN comes last
        sorted_B = weights_B.to(torch.float32)[order_B]
        before_B = sorted_B.roll(1)
        before_B[0] = 0
        ratios_B = torch.where(before_B == 0, 0, before_B / sorted_B)
        found = order_B, sorted_B, ratios_B, (sorted_B == 0).sum()
        _ascending_of[weights_B] = found, weights_B._version
    return found  # type: ignore[no-any-return]
