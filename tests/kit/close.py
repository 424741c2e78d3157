"""Comparison of sums whose terms may cancel."""

import torch
from torch import Tensor

ROUNDINGS = 16
"""Of one eps each, in the sum of the absolute terms: what a sum of some thousand terms in blocks does not reach."""


def close_to_sum(actual: Tensor, expected: Tensor, absolute: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert |actual − expected| ≤ 16 eps(dtype) Σ|terms| + eps(actual.dtype) |expected|, element by element.

    Where terms cancel, no multiple of the sum bounds its rounding error; a multiple of the sum of their absolute values does.

    Args:
        actual: sums, rounded once to their dtype.
        expected: the same in float64.
        absolute: the sums of the absolute values of all terms, in float64.
        dtype: in which was summed; by default that of `actual`, and float32 for half precision.
    """
    if dtype is None:
        dtype = actual.dtype if actual.dtype.itemsize > 2 else torch.float32
    tolerance = ROUNDINGS * torch.finfo(dtype).eps * absolute + torch.finfo(actual.dtype).eps * expected.abs()
    assert actual.shape == expected.shape == absolute.shape, (actual.shape, expected.shape, absolute.shape)
    error = (actual.double() - expected).abs()
    wrong = ~(error <= tolerance)
    assert not wrong.any(), f"{actual[wrong]} expected {expected[wrong]} within {tolerance[wrong]} at {wrong.nonzero()}"
