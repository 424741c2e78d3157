"""Weighted product, kernel and twin, against the sum over samples in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.kernels.launch import Tiles
from gramian.kernels.sums.weighted_product import (
    weighted_product,
    weighted_product_twin,
    weighted_products,
    weighted_products_kernel,
)
from tests.kernels import LAYOUTS, interpreted, laid_out, random
from tests.kit.close import close_to_sum
from tests.kit.matrix import examples

SMALL = Tiles(rows=16, columns=32, depth=16, warps=4, stages=2, cost=1.0)


def weighted_product_kernel(left, right, *args, **kwargs):
    return weighted_products_kernel([left], [right], *args, **kwargs)[0]


def case(samples, tokens, rows, columns, dtype=torch.float32, layout="contiguous", seed=0):
    left = random(samples, tokens, rows, seed=seed, dtype=dtype)
    right = random(samples, tokens, columns, seed=seed + 1, dtype=dtype)
    return laid_out(left, layout), laid_out(right, layout), random(samples, seed=seed + 2).abs()


def reference(left, right, weights):
    return torch.einsum("btm,btn,b->mn", left.double(), right.double(), weights.double())


def close(got, left, right, weights, dtype=None):
    close_to_sum(got, reference(left, right, weights), reference(left.abs(), right.abs(), weights.abs()), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_twin_is_the_weighted_sum(dtype):
    left, right, weights = case(4, 9, 5, 6, dtype)
    for out_dtype in (torch.float64, torch.float32, torch.bfloat16):
        got = weighted_product_twin(left, right, weights, out_dtype)
        assert got.dtype == out_dtype
        close(got, left, right, weights, dtype if dtype == out_dtype else torch.float32)


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_in_every_layout(dtype, layout, descriptor):
    left, right, weights = case(3, 35, 37, 70, dtype, layout)
    got = interpreted(
        weighted_product_kernel, left, right, weights, torch.float32, tiles=SMALL, descriptor=descriptor, group=2
    )
    assert got.dtype == torch.float32
    close(got, left, right, weights)


@pytest.mark.parametrize(
    "layout, parts, descriptor",
    [("contiguous", 1, True), ("contiguous", 3, True), ("amid nan", 2, False), ("columns apart", 1, True)],
)
def test_several_products_in_one_launch(layout, parts, descriptor):
    cases = [case(3, 18, 17, 34, torch.float16, layout, seed=3 * k) for k in range(2)]
    lefts, rights = [left for left, _, _ in cases], [right for _, right, _ in cases]
    weights = cases[0][2]
    options = {"tiles": SMALL, "parts": parts, "descriptor": descriptor}
    got = interpreted(weighted_products_kernel, lefts, rights, weights, torch.float32, **options)
    for total, left, right in zip(got, lefts, rights, strict=True):
        close(total, left, right, weights)
        assert total.equal(interpreted(weighted_product_kernel, left, right, weights, torch.float32, **options))
    on_cpu = weighted_products(lefts, rights, weights, torch.float32)
    for total, left, right in zip(on_cpu, lefts, rights, strict=True):
        assert total.equal(weighted_product_twin(left, right, weights, torch.float32))


def test_layers_of_one_launch_of_which_one_begins_between_two_multiples_of_16_bytes():
    """It is copied, so that bulk copies can read it, and the others with it, which have the same strides as before."""
    wide = [random(2, 18, 24, seed=k, dtype=torch.float16) for k in range(2)]
    lefts, rights = (
        [x[..., k : k + 16] for k, x in enumerate(wide)],
        [x[..., 8 - k : 24 - k] for k, x in enumerate(wide)],
    )
    weights = random(2, seed=5).abs()
    got = interpreted(weighted_products_kernel, lefts, rights, weights, torch.float32, tiles=SMALL, descriptor=True)
    for total, left, right in zip(got, lefts, rights, strict=True):
        close(total, left, right, weights)


def test_layers_of_two_layouts_in_one_launch_are_refused():
    lefts, rights = [random(2, 9, 8), random(2, 8, 9).mT], [random(2, 9, 5)] * 2
    with pytest.raises(GramianError, match="layers of one launch: strides"):
        weighted_products_kernel(lefts, rights, random(2), torch.float32, tiles=SMALL, descriptor=False)


@settings(max_examples=examples(8))
@given(
    samples=st.integers(1, 5),
    tokens=st.integers(1, 40),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    parts=st.integers(1, 7),
    layout=st.sampled_from(LAYOUTS),
)
def test_kernel_at_any_shape_in_any_number_of_parts(samples, tokens, rows, columns, parts, layout):
    left, right, weights = case(samples, tokens, rows, columns, layout=layout, seed=tokens)
    got = interpreted(weighted_product_kernel, left, right, weights, torch.float32, tiles=SMALL, parts=parts)
    close(got, left, right, weights)


def test_kernel_with_the_tiles_of_the_device_and_sides_of_two_dtypes():
    left, right, weights = case(2, 70, 130, 140, torch.float16)
    for a, b in ((left, right), (left.float(), right.float()), (left.float(), right)):
        close(interpreted(weighted_product_kernel, a, b, weights, torch.float32), left, right, weights)


def test_half_precision_in_is_rounded_once():
    """The weight is not rounded to the dtype of the sides, and neither is a weighted side."""
    left, right, _ = case(3, 20, 18, 20, torch.float16)
    weights = torch.tensor([1 / 3, 1e-3, 2 / 3])
    close(interpreted(weighted_product_kernel, left, right, weights, torch.float32, tiles=SMALL), left, right, weights)
    half = interpreted(weighted_product_kernel, left, right, weights, torch.float16, tiles=SMALL)
    assert half.dtype == torch.float16
    close(half, left, right, weights)


@pytest.mark.parametrize("function", [weighted_product_kernel, weighted_product_twin])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_weights_of_every_size_with_zeros_among_them(function, parts):
    """Samples are added by ascending weight, in one accumulator that is rescaled between them."""
    left, right, _ = case(7, 20, 18, 20)
    weights = torch.tensor([1e-12, 0.0, 3.0, -0.0, 1e8, 0.0, -1e-3])
    left, right = left / weights.abs().clamp(min=1e-30)[:, None, None].sqrt(), right
    right = right / weights.abs().clamp(min=1e-30)[:, None, None].sqrt()
    left[weights == 0] = float("nan")
    settings = {"tiles": SMALL, "parts": parts} if function is weighted_product_kernel else {}
    got = interpreted(function, left, right, weights, torch.float32, **settings)
    kept = weights != 0
    close(got, left[kept], right[kept], weights[kept])
    weights[:] = 0
    got = interpreted(function, left, right, weights, torch.float32, **settings)
    assert got.eq(0).all()


@pytest.mark.parametrize("function", [weighted_product_kernel, weighted_product_twin])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_sample_of_weight_zero_adds_nothing_whatever_it_holds(function, parts):
    left, right, weights = case(4, 20, 18, 20)
    left[1], right[1, 3], left[3, 0, 0], weights[1], weights[3] = float("nan"), float("inf"), float("inf"), 0.0, -0.0
    settings = {"tiles": SMALL, "parts": parts} if function is weighted_product_kernel else {}
    got = interpreted(function, left, right, weights, torch.float32, **settings)
    close(got, left[::2], right[::2], weights[::2])


def test_a_weight_that_is_no_number_shows():
    left, right, weights = case(2, 20, 18, 20)
    weights[0] = float("nan")
    assert interpreted(weighted_product_kernel, left, right, weights, torch.float32, tiles=SMALL).isnan().all()
    assert weighted_product_twin(left, right, weights, torch.float32).isnan().all()


@pytest.mark.parametrize("function", [weighted_product_kernel, weighted_product_twin])
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0)])
def test_nothing_gives_zeros(function, shape):
    got = interpreted(function, *case(*shape), torch.float16)
    torch.testing.assert_close(got, torch.zeros(shape[2:], dtype=torch.float16))


def test_dispatch_on_a_cpu_gives_the_twin_and_checks_shapes():
    left, right, weights = case(2, 9, 4, 5)
    got = weighted_product(left, right, weights, torch.float32)
    assert got.equal(weighted_product_twin(left, right, weights, torch.float32))
    with pytest.raises(GramianError, match="B and T must agree"):
        weighted_product(left[:1], right, weights, torch.float32)
    with pytest.raises(GramianError, match="one for each of the 2 samples"):
        weighted_product(left, right, weights[:1], torch.float32)
