"""The tolerance of a sum is that of its terms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.close import close_to_sum

finite = st.floats(-1e6, 1e6, width=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(terms=st.lists(finite, min_size=1, max_size=50))
def test_any_order_of_the_terms_is_close_and_a_term_more_is_not(terms: list[float], dtype: torch.dtype) -> None:
    exact = torch.tensor(terms, dtype=torch.float64)
    wanted, absolute = exact.sum(), exact.abs().sum()
    total = torch.zeros((), dtype=dtype)
    for term in sorted(terms + [-term for term in terms]) + terms:  # cancels but for the last
        total += term
    close_to_sum(total, wanted, 3 * absolute)
    with pytest.raises(AssertionError, match="expected"):
        close_to_sum(total + 1e-4 * absolute + 1, wanted, 3 * absolute)


def test_no_number_and_another_shape_are_not_close() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="nan"):
        close_to_sum(torch.tensor([1.0, float("nan"), 1.0]), ones, ones)
    with pytest.raises(AssertionError):
        close_to_sum(torch.ones(1), ones, ones)


def test_half_precision_is_rounded_once() -> None:
    third = torch.full((1,), 1 / 3, dtype=torch.float64)
    close_to_sum(third.bfloat16(), third, third)
    with pytest.raises(AssertionError):
        close_to_sum(third.bfloat16() * 1.02, third, third)
