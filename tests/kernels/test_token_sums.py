"""Sums over tokens, kernels and twins, against float64 and against autograd through the layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.kernels.sums.token_sums import (
    normed_sums,
    normed_sums_kernel,
    normed_sums_twin,
    token_sums,
    token_sums_kernel,
    token_sums_twin,
)
from tests.kernels import LAYOUTS, interpreted, laid_out, random
from tests.kit.close import close_to_sum
from tests.kit.matrix import FULL

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def per_sample_gradients(x, g, eps, centred):
    """Weight and bias gradients of every sample, by autograd through the layer in float64."""
    rows = []
    for x_TD, g_TD in zip(x.double(), g.double(), strict=True):
        weight = torch.ones(x.shape[2], dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(x.shape[2], dtype=torch.float64, requires_grad=True)
        if centred:
            out = F.layer_norm(x_TD, x_TD.shape[1:], weight, bias, eps)
        else:
            out = F.rms_norm(x_TD, x_TD.shape[1:], weight, eps) + bias
        rows.append(torch.autograd.grad(out, (weight, bias), g_TD))
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def absolute_terms(x, g, eps, centred):
    """Σ_t |x̂_t g_t| and Σ_t |g_t|, where of x̂ = (x − mean) / scale both terms are taken as positive."""
    x, g = x.double(), g.double().abs()
    mean = x.mean(2, keepdim=True) if centred else torch.zeros(())
    scale = ((x - mean).square().mean(2, keepdim=True) + eps).sqrt()
    return ((x.abs() + mean.abs()) / scale * g).sum(1), g.sum(1)


def close(got, x, g, eps, centred):
    """Both sums of every sample."""
    for one in zip(got, per_sample_gradients(x, g, eps, centred), absolute_terms(x, g, eps, centred), strict=True):
        close_to_sum(*one)


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES))
@pytest.mark.parametrize("centred", [True, False])
def test_twins_are_the_gradients_of_the_layers(centred, dtype):
    x, g = random(3, 7, 10, dtype=dtype) + 2, random(3, 7, 10, seed=1, dtype=dtype)
    got = normed_sums_twin(x, g, 1e-3, centred)
    assert {one.dtype for one in got} == {torch.float64 if dtype == torch.float64 else torch.float32}
    close(got, x, g, 1e-3, centred)
    close_to_sum(token_sums_twin(g), g.double().sum(1), g.double().abs().sum(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_kernel_in_every_layout(dtype, layout):
    g = laid_out(random(2, 35, 37, dtype=dtype), layout)
    got = interpreted(token_sums_kernel, g, chunk=10, rows=4, columns=16)
    assert got.dtype == torch.float32
    close_to_sum(got, g.double().sum(1), g.double().abs().sum(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False])
def test_normed_kernel_in_every_layout(centred, dtype, layout):
    x, g = random(2, 35, 37, dtype=dtype) + 1, random(2, 35, 37, seed=1, dtype=dtype)
    x, g = laid_out(x, layout), laid_out(g, layout)
    got = interpreted(normed_sums_kernel, x, g, 1e-2, centred, chunk=10, rows=4)
    assert {one.dtype for one in got} == {torch.float32}
    close(got, x, g, 1e-2, centred)


@settings(max_examples=8 if FULL else 4)
@given(
    samples=st.integers(1, 3),
    tokens=st.integers(1, 70),
    width=st.integers(1, 70),
    chunk=st.integers(1, 80),
    rows=st.sampled_from([1, 2, 8]),
    centred=st.booleans(),
)
def test_kernels_at_any_shape(samples, tokens, width, chunk, rows, centred):
    x, g = random(samples, tokens, width, seed=tokens), random(samples, tokens, width, seed=width)
    close(interpreted(normed_sums_kernel, x, g, 0.1, centred, chunk=chunk, rows=rows), x, g, 0.1, centred)
    sums = interpreted(token_sums_kernel, g, chunk=chunk, rows=rows, columns=32)
    close_to_sum(sums, g.double().sum(1), g.double().abs().sum(1))


def test_kernels_with_the_chunks_of_the_device():
    x, g = random(2, 100, 300), random(2, 100, 300, seed=1)
    close(interpreted(normed_sums_kernel, x, g, 1e-5, True), x, g, 1e-5, True)
    close_to_sum(interpreted(token_sums_kernel, g), g.double().sum(1), g.double().abs().sum(1))


@pytest.mark.parametrize("centred", [True, False])
def test_without_eps_the_rows_beyond_the_last_add_nothing(centred):
    x, g = random(1, 5, 9), random(1, 5, 9, seed=1)
    close(interpreted(normed_sums_kernel, x, g, 0.0, centred, rows=4), x, g, 0.0, centred)


def test_a_large_mean_does_not_cancel():
    """The variance is taken about the mean, not as a difference of squares."""
    x, g = random(1, 8, 64) + 1000, random(1, 8, 64, seed=1)
    close(interpreted(normed_sums_kernel, x, g, 1e-5, True), x, g, 1e-5, True)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_gives_zeros(shape):
    x, zeros = random(*shape), torch.zeros(shape[0], shape[2])
    for function in (token_sums_kernel, token_sums_twin):
        torch.testing.assert_close(interpreted(function, x), zeros)
    for function in (normed_sums_kernel, normed_sums_twin):
        for result in interpreted(function, x, x, 1e-5, True):
            torch.testing.assert_close(result, zeros)


@pytest.mark.parametrize("function", [normed_sums_kernel, normed_sums_twin])
def test_samples_do_not_touch(function):
    x, g = random(3, 20, 6), random(3, 20, 6, seed=1)
    x[1], g[1] = float("nan"), float("inf")
    got = interpreted(function, x, g, 1e-5, True)
    assert not any(one[1].isfinite().any() for one in got)
    close([one[::2] for one in got], x[::2], g[::2], 1e-5, True)


def test_dispatch_on_a_cpu_gives_the_twins_and_checks_shapes():
    x, g = random(2, 9, 4), random(2, 9, 4, seed=1)
    assert token_sums(g).equal(token_sums_twin(g))
    for got, want in zip(normed_sums(x, g, 1e-5, False), normed_sums_twin(x, g, 1e-5, False), strict=True):
        assert got.equal(want)
    with pytest.raises(GramianError, match="shapes must agree"):
        normed_sums(x, g[:1], 1e-5, False)
