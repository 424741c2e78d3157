"""Batches scaled sample by sample, kernel and twin, against float64."""

import pytest
import torch

from gramian.kernels.sums.scaled_rows import scaled_rows, scaled_rows_kernel, scaled_rows_twin
from tests.kernels import interpreted, random

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1), (4, 33), (2, 3, 2, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_twin_multiply_wide_and_round_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weights = random(*shape, dtype=dtype), random(shape[0], seed=1)
    exact = (x.float() * weights.reshape(-1, *[1] * (len(shape) - 1))).to(dtype)
    got = scaled_rows_twin(x, weights)
    assert got.dtype == dtype and torch.equal(got, exact)
    got = interpreted(scaled_rows_kernel, x, weights, block=16)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, exact, rtol=torch.finfo(dtype).eps, atol=0
    )  # the interpreter may cut off, not round


def test_other_layouts_and_float64_take_the_twin() -> None:
    x, weights = random(4, 6, 5, dtype=torch.float64).transpose(1, 2), random(4, seed=1, dtype=torch.float64)
    got = scaled_rows(x, weights)
    assert got.is_contiguous() and torch.equal(got, x * weights[:, None, None])
    assert scaled_rows(torch.zeros(0, 3), torch.zeros(0)).shape == (0, 3)
