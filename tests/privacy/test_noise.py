"""Noise by element: any sharding draws the same, and what is drawn is standard normal and independent.

The statistical tests use a fixed key, so they pass or fail for good; for a fresh key each would fail with the probability it
states, ALARM at most.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gramian.kernels import chacha
from gramian.privacy.noise.element_noise import NoisePlan
from tests.kit.matrix import examples
from tests.kit.private import add_noise
from tests.kit.refusals import refusal

KEY = bytes(range(32))
SHAPES = [("embed", (7, 3)), ("scale", ()), ("conv", (5, 2, 3, 1)), ("none", (0, 4)), ("bias", (9,))]
ALARM = 1e-6


def plan():
    return NoisePlan(KEY, SHAPES)


def noise(name, release=0, rows=None, std=1.0, dtype=torch.float32, shapes=SHAPES):
    shape = dict(shapes)[name]
    box = None if rows is None else (slice(*rows), *map(slice, shape[1:]))
    part = torch.zeros(shape, dtype=dtype)
    return add_noise(NoisePlan(KEY, shapes), part if box is None else part[box].clone(), name, std, release, box)


def test_elements_have_places_of_their_own_that_start_even():
    assert plan().offsets == {"embed": 0, "scale": 22, "conv": 24, "none": 54, "bias": 54}
    assert plan().total == 64
    assert torch.equal(noise("conv", release=3).flatten(), chacha.normals(KEY, 3, 24, 30))


@settings(max_examples=examples(60))
@given(name=st.sampled_from(["embed", "conv", "bias"]), cuts=st.lists(st.integers(0, 9), max_size=4), data=st.data())
def test_any_sharding_over_dim_0_draws_the_same_noise_bit_for_bit(name, cuts, data):
    rows = dict(SHAPES)[name][0]
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    dtype = data.draw(st.sampled_from(chacha.DTYPES))
    parts = [noise(name, 5, (a, b), 0.3, dtype) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), noise(name, 5, None, 0.3, dtype))


def test_any_box_has_the_noise_of_its_elements():
    whole = noise("embed")
    for box in itertools.product((slice(2, 5), slice(None, 4), slice(0, 0)), (slice(1, 3), slice(0, 0), slice(None))):
        part = torch.zeros_like(whole[box])
        assert torch.equal(add_noise(plan(), part, "embed", 1.0, 0, box), whole[box])


def test_a_deviation_may_be_a_tensor_and_zero_changes_nothing():
    assert torch.equal(noise("embed", std=torch.tensor(0.25)), noise("embed", std=0.25))
    assert torch.equal(noise("embed", std=0.0), torch.zeros(7, 3))


def test_the_places_of_a_large_model_go_on_in_another_nonce(monkeypatch):
    monkeypatch.setattr(chacha, "WORDS_PER_NONCE", 32)
    shapes = [("a", (20,)), ("b", (50,))]
    got = noise("b", release=6, shapes=shapes)
    nonces = [6, 6 + (1 << 64), 6 + (2 << 64)]
    want = torch.cat([chacha.normals(KEY, n, s, c) for n, s, c in zip(nonces, (20, 0, 0), (12, 32, 6), strict=True)])
    assert torch.equal(got, want)
    assert torch.equal(noise("b", 6, (10, 40), shapes=shapes), got[10:40])


def test_its_text_does_not_show_the_key():
    assert repr(plan()) == "NoisePlan(5 parameters, 64 places)"


@pytest.mark.parametrize(
    "message, call",
    [
        ("w: not in the noise plan; expected", lambda: add_noise(plan(), torch.zeros(2), "w", 1.0, 0)),
        ("bias: gradient of shape .*; expected", lambda: add_noise(plan(), torch.zeros(8), "bias", 1.0, 0)),
        (
            "bias: gradient of shape .*; expected",
            lambda: add_noise(plan(), torch.zeros(9), "bias", 1.0, 0, (slice(8),)),
        ),
        ("bias: .*; expected", lambda: add_noise(plan(), torch.zeros(3), "bias", 1.0, 0, (slice(7, 10),))),
        ("release: -1; expected", lambda: add_noise(plan(), torch.zeros(9), "bias", 1.0, -1)),
        ("bias: given twice; expected", lambda: NoisePlan(KEY, [("bias", (2,)), ("bias", (2,))])),
        ("std: .*; expected", lambda: add_noise(plan(), torch.zeros(9), "bias", -1.0, 0)),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(message, call):
    with refusal(f"^{message}"):
        call()


N = 400_000
LIMIT = float(stats.norm.isf(ALARM / 2))
"""Standard errors that a mean of N terms exceeds with probability ALARM."""


@pytest.fixture(scope="module")
def large():
    """Two releases of a parameter of N elements."""
    shapes = [("w", (N // 100, 100))]
    return [noise("w", release, shapes=shapes).flatten().double().numpy() for release in (0, 1)]


@pytest.mark.parametrize("power, mean, variance", [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)])
def test_moments_are_those_of_a_standard_normal(large, power, mean, variance):
    """False alarm: ALARM per moment."""
    assert abs((large[0] ** power).mean() - mean) < LIMIT * (variance / N) ** 0.5


def test_the_distribution_is_normal(large):
    """Kolmogorov–Smirnov, on even and odd elements (cosines and sines) and on all. False alarm: 3 ALARM."""
    for x in (large[0], large[0][::2], large[0][1::2]):
        assert stats.kstest(x, "norm").pvalue > ALARM


def test_the_tail_is_there(large):
    """Elements beyond 4 are Poisson with mean 25. False alarm: 2 ALARM."""
    mean, count = N * 2 * stats.norm.sf(4), (abs(large[0]) > 4).sum()
    assert stats.poisson.ppf(ALARM, mean) <= count <= stats.poisson.isf(ALARM, mean)


def correlation(x, y):
    return abs((x * y).mean()) * len(x) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 15, 16, 32, 100])
def test_elements_of_a_release_are_independent(large, lag):
    """Products and products of squares at a distance within a pair, a block, across blocks and rows. False alarm: 2 ALARM."""
    x, squares = large[0], (large[0] ** 2 - 1) / 2**0.5
    assert correlation(x[:-lag], x[lag:]) < LIMIT
    assert correlation(squares[:-lag], squares[lag:]) < LIMIT


def test_shards_are_independent(large):
    """Every two of eight shards. False alarm: 28 ALARM."""
    for x, y in itertools.combinations(np.split(large[0], 8), 2):
        assert correlation(x, y) < LIMIT


def test_releases_and_keys_are_independent(large):
    """False alarm: 3 ALARM."""
    other = chacha.normals(KEY[::-1], 0, 0, N).double().numpy()
    assert correlation(large[0], large[1]) < LIMIT
    assert correlation(large[0], other) < LIMIT
    assert correlation(large[1][:-2], large[0][2:]) < LIMIT


def test_the_deviation_is_the_one_asked_for():
    """False alarm: ALARM."""
    x = noise("w", std=0.37, shapes=[("w", (N,))]).double()
    assert abs(float((x**2).mean()) / 0.37**2 - 1) < LIMIT * (2 / N) ** 0.5
