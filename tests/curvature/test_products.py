"""Sums over all products of two spectra against sums of them one by one, in fifty digits."""

import itertools
import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.curvature.spectrum import spectrum_products
from gramian.curvature.spectrum.spectrum_products import Values, count_above, damped_sums, largest_products
from tests.curvature.test_memory import Largest
from tests.kit.matrix import FULL

EXAMPLES = 400 if FULL else 30

NUMBERS = st.one_of(st.just(0.0), st.sampled_from([1.0, 1e-9]), st.floats(-300, 300).map(lambda x: 10.0**x))
"""Zeros, repetitions, and everything from 1e-300 to 1e300."""
SPECTRA = st.lists(NUMBERS, min_size=1, max_size=6)
DAMPING = st.floats(-280, 280).map(lambda x: 10.0**x)


def values(numbers: list[float], **more: Any) -> Values:
    return Values.of(torch.tensor(numbers, dtype=torch.float64), **more)


def exact(left: list[float], right: list[float], damping: float) -> tuple[Any, Any, Any]:
    """Both sums over products that are formed in fifty digits, and how much the first one adds up."""
    with mpmath.workdps(50):
        pairs = [mpmath.mpf(a) * mpmath.mpf(b) for a in left for b in right]
        logs = [mpmath.log(x + damping) for x in pairs]
        return mpmath.fsum(logs), mpmath.fsum(x / (x + damping) for x in pairs), mpmath.fsum(abs(y) for y in logs)


@settings(max_examples=EXAMPLES)
@given(SPECTRA, SPECTRA, DAMPING)
def test_sums_over_products_are_those_of_fifty_digits(left: list[float], right: list[float], damping: float) -> None:
    log_det, dimension = damped_sums(values(left), values(right), damping)
    logs, shares, size = exact(left, right, damping)
    assert abs(log_det - logs) <= 1e-12 * max(size, 700)
    assert abs(dimension - shares) <= 1e-12 * float(shares) + 1e-300


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 100])
def test_sums_do_not_depend_on_the_pieces(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = values([3.0, 2.0, 2.0, 0.0, 1e-3]), values([5.0, 1.0, 1e-5])
    expected = damped_sums(left, right, 1e-2)
    monkeypatch.setattr(spectrum_products, "CHUNK", chunk)
    with Largest() as largest:
        found = damped_sums(left, right, 1e-2)
    assert found == pytest.approx(expected, rel=1e-14)
    assert largest.elements <= max(chunk, 5)  # and the spectra themselves


def test_all_products_are_never_stored_at_once() -> None:
    """Research 2C-37: 3000 × 3000 products would be 72 MB at once."""
    left, right = (Values.of(torch.rand(3000, generator=torch.Generator().manual_seed(i))) for i in range(2))
    with Largest() as largest:
        damped_sums(left, right, 1e-3)
        count_above(left, right, 1e-3)
        largest_products([(left, right)], 50)
    assert largest.elements <= spectrum_products.CHUNK, largest.operator


def test_a_value_of_weight_two_counts_as_two_of_them() -> None:
    twice = values([4.0, 2.0, 1.0], weights_R=torch.tensor([1.0, 2.0, 1.0]), dim=6)
    written, other = values([4.0, 2.0, 2.0, 1.0, 0.0, 0.0]), values([3.0, 1e-4])
    assert damped_sums(twice, other, 1e-2) == pytest.approx(damped_sums(written, other, 1e-2), rel=1e-14)
    assert damped_sums(other, twice, 1e-2) == pytest.approx(damped_sums(other, written, 1e-2), rel=1e-14)
    for share in (0.0, 1e-5, 0.3, 0.6):
        assert (
            count_above(twice, other, share) == count_above(written, other, share) == count_above(other, twice, share)
        )


@settings(max_examples=EXAMPLES)
@given(SPECTRA, SPECTRA, st.floats(-18, -1e-3).map(lambda x: 10.0**x))
def test_products_above_a_share_are_counted(left: list[float], right: list[float], share: float) -> None:
    with mpmath.workdps(50):
        pairs = [mpmath.mpf(a) * mpmath.mpf(b) for a in left for b in right]
        threshold = share * max(pairs)
        near = sum(abs(x - threshold) < 1e-14 * threshold for x in pairs)
        expected = sum(x > threshold for x in pairs)
    assert abs(count_above(values(left), values(right), share) - expected) <= near


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(SPECTRA, SPECTRA), min_size=1, max_size=4), st.data())
def test_the_largest_products_are_those_of_all_of_them(
    pairs: list[tuple[list[float], list[float]]], data: st.DataObject
) -> None:
    everything = sorted((a * b for left, right in pairs for a, b in itertools.product(left, right)), reverse=True)
    k = data.draw(st.integers(1, len(everything)))
    assert largest_products([(values(left), values(right)) for left, right in pairs], k) == everything[:k]


def test_extremes_know_what_is_not_among_the_values() -> None:
    assert (values([2.0, 5.0]).smallest, values([2.0, 5.0]).largest) == (2.0, 5.0)
    assert values([2.0, 5.0], dim=3).smallest == values([2.0, 0.0]).smallest == 0.0
    nothing = values([], dim=4)
    assert (nothing.largest, nothing.smallest, nothing.count) == (0.0, 0.0, 0.0)
    assert damped_sums(nothing, values([3.0]), 0.5) == pytest.approx((4 * math.log(0.5), 0.0))
    assert largest_products([(nothing, values([3.0]))], 2) == [0.0, 0.0]
