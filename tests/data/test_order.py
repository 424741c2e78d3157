"""The order of the windows: a permutation an epoch, and nothing but the seed and the position decides it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.data.window_order import Permutation, windows_at
from tests.kit.matrix import examples


def draws(size: int, seed: int, count: int) -> list[int]:
    """The endless sequence, draw by draw: one permutation after the other."""
    sequence: list[int] = []
    epoch = 0
    while len(sequence) < count:
        permutation = Permutation(size, f"{seed}/{epoch}".encode())
        sequence += [int(permutation(np.array([index]))[0]) for index in range(size)]
        epoch += 1
    return sequence[:count]


@settings(max_examples=examples(150))
@given(st.integers(1, 2000), st.binary(max_size=8))
def test_permutation_is_a_bijection(size: int, key: bytes) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


def test_permutation_is_a_bijection_around_squares() -> None:
    for size in [
        n for root in (1, 2, 3, 10, 31, 32, 100) for n in (root * root - 1, root * root, root * root + 1) if n
    ]:
        assert sorted(Permutation(size, b"key")(np.arange(size)).tolist()) == list(range(size))


def test_permutation_of_a_huge_range_stays_inside_and_apart() -> None:
    size = 2**61 + 12345
    places = Permutation(size, b"key")(size - 1 - np.arange(1000))
    assert places.min() >= 0
    assert places.max() < size
    assert len(set(places.tolist())) == 1000


def test_permutation_does_not_depend_on_what_is_asked_together() -> None:
    permutation = Permutation(1234, b"key")
    whole = permutation(np.arange(1234))
    assert whole[700:].tolist() == permutation(np.arange(700, 1234)).tolist()
    assert whole[::7].tolist() == permutation(np.arange(0, 1234, 7)).tolist()


def test_every_place_is_as_likely_for_the_first_two_indices() -> None:
    """Chi-square of 1500 keys over the 20 pairs of places of 5; 99.99 % of uniform orders stay below 52."""
    pairs = np.zeros((5, 5))
    for key in range(1500):
        first, second = Permutation(5, str(key).encode())(np.array([0, 1]))
        pairs[first, second] += 1
    seen = pairs[~np.eye(5, dtype=bool)]
    assert not np.diag(pairs).any()
    assert ((seen - 75) ** 2 / 75).sum() < 52


def test_order_is_the_one_it_was() -> None:
    """A run of an earlier version resumes with the batches it would have had."""
    assert windows_at(0, 10, 10, seed=0).tolist() == [7, 8, 3, 6, 1, 4, 0, 9, 2, 5]
    assert windows_at(7, 1_000_003, 4, seed=3).tolist() == [353316, 713388, 482160, 77952]


@settings(max_examples=examples(30))
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 12), st.integers(0, 3))
def test_batch_is_its_part_of_the_endless_sequence(size: int, batch: int, position: int, seed: int) -> None:
    told = windows_at(position, size, batch, seed)
    assert told.dtype == np.int64
    assert told.tolist() == draws(size, seed, (position + 1) * batch)[position * batch :]


@settings(max_examples=examples(40))
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 3))
def test_every_window_is_seen_once_an_epoch(size: int, batch: int, seed: int) -> None:
    sequence = np.concatenate([windows_at(position, size, batch, seed) for position in range(-(-3 * size // batch))])
    for epoch in range(3):
        assert sorted(sequence[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_seeds_and_epochs_order_differently() -> None:
    orders = {tuple(windows_at(epoch, 100, 100, seed).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_far_positions_are_as_near() -> None:
    assert windows_at(10**15, 10**6, 8, seed=1).max() < 10**6


@pytest.mark.parametrize("size", [0, -1, 2**62])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(GramianError, match="^size: expected at least 1"):
        Permutation(size, b"")
