"""Direct kernel and twin against the per-sample gradients themselves, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.kernels.launch import Tiles
from gramian.kernels.norms.direct_squares import direct_squares, direct_squares_kernel, direct_squares_twin
from tests.kernels import LAYOUTS, interpreted, laid_out, random
from tests.kit.close import close_to_sum
from tests.kit.matrix import examples

SMALL = Tiles(rows=16, columns=32, depth=16, warps=4, stages=2, cost=1.0)


def case(samples, tokens, rows, columns, dtype=torch.float32, layout="contiguous", seed=0):
    left = random(samples, tokens, rows, seed=seed, dtype=dtype)
    right = random(samples, tokens, columns, seed=seed + 1, dtype=dtype)
    return laid_out(left, layout), laid_out(right, layout)


def reference(left, right):
    return torch.einsum("btm,btn->bmn", left.double(), right.double()).square().sum((1, 2))


def close(got, left, right):
    close_to_sum(got, reference(left, right), reference(left.abs(), right.abs()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1 << 25, 40, 6])
def test_twin_is_the_squared_norm_of_the_gradients_in_chunks_of_any_size(elements, dtype, monkeypatch):
    monkeypatch.setattr("gramian.kernels.norms.direct_squares.CHUNK_ELEMENTS", elements)
    monkeypatch.setattr("gramian.plan.norm_algorithm.CHUNK_ELEMENTS", elements)
    left, right = case(3, 11, 5, 4, dtype)
    got = direct_squares_twin(left, right)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.dtype == wide
    close(got, left, right)


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_in_every_layout(dtype, layout, descriptor):
    left, right = case(2, 35, 37, 70, dtype, layout)
    got = interpreted(direct_squares_kernel, left, right, tiles=SMALL, descriptor=descriptor, group=2)
    assert got.dtype == torch.float32
    close(got, left, right)


@settings(max_examples=examples(8))
@given(
    samples=st.integers(1, 3),
    tokens=st.integers(1, 40),
    rows=st.integers(1, 60),
    columns=st.integers(1, 70),
    group=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_kernel_at_any_shape(samples, tokens, rows, columns, group, layout):
    left, right = case(samples, tokens, rows, columns, layout=layout, seed=tokens)
    got = interpreted(direct_squares_kernel, left, right, tiles=SMALL, group=group)
    close(got, left, right)


def test_kernel_with_the_tiles_of_the_device_and_sides_of_two_dtypes():
    left, right = case(2, 70, 130, 140, torch.float16)
    for a, b in ((left, right), (left.float(), right.float()), (left, right.float())):
        got = interpreted(direct_squares_kernel, a, b)
        close(got, left, right)


@pytest.mark.parametrize("function", [direct_squares_kernel, direct_squares_twin])
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0)])
def test_nothing_gives_zeros(function, shape):
    torch.testing.assert_close(interpreted(function, *case(*shape)), torch.zeros(shape[0]))


@pytest.mark.parametrize("function", [direct_squares_kernel, direct_squares_twin])
def test_samples_do_not_touch(function):
    left, right = case(3, 20, 6, 5)
    left[1] = float("nan")
    got = interpreted(function, left, right)
    assert got[1].isnan()
    close(got[::2], left[::2], right[::2])


def test_dispatch_on_a_cpu_gives_the_twin_and_checks_shapes():
    left, right = case(2, 9, 4, 5)
    assert direct_squares(left, right).equal(direct_squares_twin(left, right))
    with pytest.raises(GramianError, match="B and T must agree"):
        direct_squares(left[:1], right)
