"""Kernels over segments of rows of different lengths against the products themselves, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.kernels.launch import Tiles
from gramian.kernels.norms import ragged_squares
from gramian.kernels.sums import ragged_products
from tests.kernels import interpreted, laid_out, random
from tests.kit.close import close_to_sum

SMALL = Tiles(rows=16, columns=16, depth=16, warps=4, stages=2, cost=1.0)
LENGTHS = [[0, 3, 17, 40, 0, 1], [5], [0, 0], [16, 32, 1, 1]]


def case(lengths: list[int], dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> tuple[Tensor, ...]:
    """Sides of rows in any order, of which the last four belong to no segment."""
    rows = sum(lengths) + 4
    left, right = (laid_out(random(1, rows, width, seed=width, dtype=dtype), layout)[0] for width in (37, 21))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    return left, right, order, torch.tensor([0, *lengths]).cumsum(0)


def products(left: Tensor, right: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    segments = [order[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    return torch.stack([left[rows].double().mT @ right[rows].double() for rows in segments])


def close(got: Tensor, of: Any, sides: tuple[Tensor, ...]) -> None:
    left, right, *rest = sides
    close_to_sum(got, of(products(left, right, *rest)), of(products(left.abs(), right.abs(), *rest)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_of_segments(lengths: list[int], dtype: torch.dtype) -> None:
    sides = case(lengths, dtype, "amid nan")
    for squares, diagonal in (
        ragged_squares.ragged_gram_squares(*sides),
        interpreted(ragged_squares.ragged_gram_squares_kernel, *sides, tiles=SMALL),
    ):
        close(squares, lambda p: p.square().sum((1, 2)), sides)
        energy = sides[0].double().square().sum(1) * sides[1].double().square().sum(1)
        ends = sides[3].tolist()
        apart = [energy[sides[2][a:b]].sum() for a, b in zip(ends, ends[1:], strict=False)]
        close_to_sum(diagonal, torch.stack(apart), torch.stack(apart))
    close(ragged_squares.ragged_direct_squares(*sides), lambda p: p.square().sum((1, 2)), sides)
    direct = interpreted(ragged_squares.ragged_direct_squares_kernel, *sides, tiles=SMALL)
    close(direct, lambda p: p.square().sum((1, 2)), sides)


@pytest.mark.parametrize("run", ["twin", "kernel"])
def test_weighted_sums_of_groups_and_a_weight_of_zero_hides_nan(run: str) -> None:
    left, right, order, offsets = case([0, 3, 17, 40, 0, 1])
    weights = torch.tensor([0.5, 0.0, 2.0])
    left[order[3:60]] = torch.where(torch.rand(57, 1) < 0.5, torch.nan, left[order[3:60]])[: len(order[3:60])]
    left[order[:3]], left[order[60:]] = 1.5, 0.25  # of samples 0 and 2
    function = getattr(ragged_products, f"ragged_products_{run}")
    options = {"tiles": SMALL} if run == "kernel" else {}
    call = function if run == "twin" else lambda *args, **kwargs: interpreted(function, *args, **kwargs)
    got = call(left, right, order, offsets, weights, torch.float32, **options)
    kept = [0, 1, 4, 5]
    clean = left.nan_to_num(0.0)
    found = products(clean, right, order, offsets)
    want = (found * torch.tensor([0.5, 0.5, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64)[:, None, None])[kept]
    bounds = (products(clean.abs(), right.abs(), order, offsets) * 2)[kept]
    close_to_sum(got, want.reshape(2, 2, 37, 21).sum(0), bounds.reshape(2, 2, 37, 21).sum(0))


def test_no_rows_at_all() -> None:
    left, right, order, offsets = (t[:0] if i < 3 else t * 0 for i, t in enumerate(case([0, 0])))
    for gram in (ragged_squares.ragged_gram_squares_twin, ragged_squares.ragged_gram_squares_kernel):
        assert not interpreted(gram, left, right, order, offsets)[0].any()
    for direct in (ragged_squares.ragged_direct_squares_twin, ragged_squares.ragged_direct_squares_kernel):
        assert not interpreted(direct, left, right, order, offsets).any()
    for sums in (ragged_products.ragged_products_twin, ragged_products.ragged_products_kernel):
        assert not interpreted(sums, left, right, order, offsets, torch.ones(1), torch.float32).any()
