"""Gram kernel and twin against the per-sample gradients themselves, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.kernels.launch import Tiles
from gramian.kernels.norms import gram_squares as grams
from gramian.kernels.norms.gram_squares import gram_squares, gram_squares_of_layers, gram_squares_twin
from tests.kernels import LAYOUTS, interpreted, laid_out, random
from tests.kit.close import close_to_sum
from tests.kit.matrix import FULL

SMALL = Tiles(rows=16, columns=16, depth=16, warps=4, stages=2, cost=1.0)


def case(samples, tokens, m, n, dtype=torch.float32, layout="contiguous", seed=0):
    left = laid_out(random(samples, tokens, m, seed=seed + m, dtype=dtype), layout)
    return left, laid_out(random(samples, tokens, n, seed=seed, dtype=dtype), layout)


def gram_squares_kernel(left, right, **options):
    squares, diagonals = grams.gram_squares_kernel([(left, right)], **options)
    return squares[0], diagonals[0]


def reference(left, right):
    gradient = torch.einsum("btm,btn->bmn", left.double(), right.double())
    of_tokens = torch.einsum("btm,btn->btmn", left.double(), right.double())
    return gradient.square().sum((1, 2)), of_tokens.square().sum((1, 2, 3))


def close(got, left, right):
    for a, b, c in zip(got, reference(left, right), reference(left.abs(), right.abs()), strict=True):
        close_to_sum(a, b, c)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 37, 8, 12), (1, 1, 3, 1), (3, 4, 2, 7)])
def test_twin_is_the_squared_norm_of_the_gradients(shape, dtype):
    left, right = case(*shape, dtype=dtype)
    got = gram_squares_twin(left, right)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got[0].dtype == got[1].dtype == wide
    close(got, left, right)


def test_twin_in_blocks_of_rows_is_the_same(monkeypatch):
    left, right = case(2, 10, 3, 5, dtype=torch.float64)
    monkeypatch.setattr("gramian.kernels.norms.gram_squares.CHUNK_ELEMENTS", 30)
    close(gram_squares_twin(left, right), left, right)


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_in_every_layout(dtype, layout, descriptor):
    left, right = case(2, 35, 20, 18, dtype, layout)
    got = interpreted(gram_squares_kernel, left, right, tiles=SMALL, descriptor=descriptor, group=2)
    assert got[0].dtype == got[1].dtype == torch.float32
    close(got, left, right)


@pytest.mark.parametrize("layout, descriptor", [("contiguous", True), ("amid nan", False), ("columns apart", True)])
def test_several_layers_in_one_launch(layout, descriptor):
    cases = [case(2, 18, 9, 5, torch.float16, layout, seed=100 * k) for k in range(2)]
    squares, diagonals = interpreted(grams.gram_squares_kernel, cases, tiles=SMALL, descriptor=descriptor)
    for k, (left, right) in enumerate(cases):
        alone = interpreted(gram_squares_kernel, left, right, tiles=SMALL, descriptor=descriptor)
        assert squares[k].equal(alone[0]) and diagonals[k].equal(alone[1])
        close(alone, left, right)
    on_cpu = gram_squares_of_layers(cases)
    for k, (left, right) in enumerate(cases):
        assert all(one[k].equal(twin) for one, twin in zip(on_cpu, gram_squares_twin(left, right), strict=True))


def test_layers_of_one_launch_of_which_one_begins_between_two_multiples_of_16_bytes():
    wide = [random(2, 18, 24, seed=k, dtype=torch.float16) for k in range(2)]
    layers = [(x[..., k : k + 16], x[..., 8 - k : 24 - k]) for k, x in enumerate(wide)]
    squares, diagonals = interpreted(grams.gram_squares_kernel, layers, tiles=SMALL, descriptor=True)
    for k, (left, right) in enumerate(layers):
        close((squares[k], diagonals[k]), left, right)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 90])
@pytest.mark.parametrize("m", [7, 16, 33])
def test_kernel_at_the_edges_of_tiles(tokens, m):
    left, right = case(1, tokens, m, 5, layout="amid nan")
    close(interpreted(gram_squares_kernel, left, right, tiles=SMALL, group=3), left, right)


@settings(max_examples=8 if FULL else 4)
@given(
    samples=st.integers(1, 3),
    tokens=st.integers(1, 70),
    m=st.integers(1, 24),
    n=st.integers(1, 40),
    group=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_kernel_at_any_shape(samples, tokens, m, n, group, layout):
    left, right = case(samples, tokens, m, n, layout=layout, seed=tokens)
    close(interpreted(gram_squares_kernel, left, right, tiles=SMALL, group=group), left, right)


def test_kernel_with_the_tiles_of_the_device():
    for dtype in (torch.float16, torch.float32):
        left, right = case(2, 150, 70, 33, dtype)
        close(interpreted(gram_squares_kernel, left, right), left, right)


@pytest.mark.parametrize("function", [gram_squares_kernel, gram_squares_twin])
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4)])
def test_nothing_gives_zeros(function, shape):
    left, right = case(*shape)
    for result in interpreted(function, left, right):
        torch.testing.assert_close(result, torch.zeros(shape[0]))


@pytest.mark.parametrize("function", [gram_squares_kernel, gram_squares_twin])
def test_samples_do_not_touch(function):
    """One whose numbers are not finite spoils itself only."""
    left, right = case(3, 20, 6, 5)
    right[1, 19] = float("inf")
    left[1] = float("nan")
    got = interpreted(function, left, right)
    assert not got[0][1].isfinite() and not got[1][1].isfinite()
    close([result[::2] for result in got], left[::2], right[::2])


def test_dispatch_on_a_cpu_gives_the_twin_and_checks_shapes():
    left, right = case(2, 9, 4, 5)
    torch.testing.assert_close(gram_squares(left, right), gram_squares_twin(left, right), rtol=0, atol=0)
    with pytest.raises(GramianError, match="B and T must agree"):
        gram_squares(left[:, :3], right)


def test_results_carry_no_graph():
    left, right = case(2, 9, 4, 5)
    squares, diagonal = gram_squares(left.requires_grad_(), right)
    assert not squares.requires_grad and not diagonal.requires_grad
