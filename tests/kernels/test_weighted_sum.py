"""Weighted sums and squared norms of kept rows, kernels and twins, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.kernels.sums.weighted_sum import (
    row_squares,
    row_squares_kernel,
    row_squares_twin,
    weighted_sum,
    weighted_sum_kernel,
    weighted_sum_twin,
)
from tests.kernels import interpreted, laid_out, random
from tests.kit.close import close_to_sum
from tests.kit.matrix import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "amid nan", "columns apart")


def case(samples, width, dtype=torch.float32, layout="contiguous", seed=0):
    return laid_out(random(samples, width, seed=seed, dtype=dtype), layout), random(samples, seed=seed + 1)


def close(got, kept, weights):
    kept, weights = kept.double(), weights.double()
    close_to_sum(got, weights @ kept, weights.abs() @ kept.abs())


def close_squares(got, kept):
    squares = kept.double().square().sum(1)
    close_to_sum(got, squares, squares)


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES))
def test_twins_are_what_they_say(dtype, monkeypatch):
    monkeypatch.setattr("gramian.kernels.sums.weighted_sum.CHUNK_ELEMENTS", 40)
    kept, weights = case(4, 33, dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    got = weighted_sum_twin(kept, weights)
    assert got.dtype == wide
    close(got, kept, weights)
    squares = row_squares_twin(kept)
    assert squares.dtype == wide
    close_squares(squares, kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_in_every_layout(dtype, layout):
    kept, weights = case(5, 101, dtype, layout)
    got = interpreted(weighted_sum_kernel, kept, weights, rows=2, columns=16)
    assert got.dtype == torch.float32
    close(got, kept, weights)
    squares = interpreted(row_squares_kernel, kept, chunk=32, columns=16)
    assert squares.dtype == torch.float32
    close_squares(squares, kept)


@settings(max_examples=examples(8))
@given(samples=st.integers(1, 9), width=st.integers(1, 200), layout=st.sampled_from(LAYOUTS))
def test_kernels_at_any_shape(samples, width, layout):
    kept, weights = case(samples, width, layout=layout, seed=width)
    close(interpreted(weighted_sum_kernel, kept, weights, rows=4, columns=64), kept, weights)
    squares = interpreted(row_squares_kernel, kept, chunk=128, columns=32)
    close_squares(squares, kept)


def test_kernels_with_the_blocks_of_the_device():
    kept, weights = case(3, 40_000)
    close(interpreted(weighted_sum_kernel, kept, weights), kept, weights)
    squares = interpreted(row_squares_kernel, kept)
    close_squares(squares, kept)


@pytest.mark.parametrize("function", [weighted_sum_kernel, weighted_sum_twin])
def test_a_row_of_weight_zero_adds_nothing_whatever_it_holds(function):
    kept, weights = case(5, 50)
    kept[1], kept[4], weights[1], weights[4] = float("nan"), float("inf"), 0.0, -0.0
    rows = [0, 2, 3]
    close(interpreted(function, kept, weights), kept[rows], weights[rows])


@pytest.mark.parametrize("function", [weighted_sum_kernel, weighted_sum_twin])
def test_a_weight_that_is_no_number_shows(function):
    kept, weights = case(3, 50)
    weights[1] = float("nan")
    assert interpreted(function, kept, weights).isnan().all()


@pytest.mark.parametrize("function", [weighted_sum_kernel, weighted_sum_twin])
def test_weights_are_not_rounded_to_the_dtype_of_the_rows(function):
    kept, weights = case(2, 64, torch.bfloat16)
    weights[0] = 1 / 3
    close(interpreted(function, kept, weights), kept, weights)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_gives_zeros(shape):
    kept = random(*shape)
    for function in (weighted_sum_kernel, weighted_sum_twin):
        torch.testing.assert_close(interpreted(function, kept, torch.ones(shape[0])), torch.zeros(shape[1]))
    for function in (row_squares_kernel, row_squares_twin):
        torch.testing.assert_close(interpreted(function, kept), torch.zeros(shape[0]))


def test_dispatch_on_a_cpu_gives_the_twins_and_checks_shapes():
    kept, weights = case(4, 33)
    assert weighted_sum(kept, weights).equal(weighted_sum_twin(kept, weights))
    assert row_squares(kept).equal(row_squares_twin(kept))
    with pytest.raises(GramianError, match="one for each of the 4 rows"):
        weighted_sum(kept, weights[:3])
