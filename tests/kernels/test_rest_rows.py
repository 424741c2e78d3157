"""The student's share of ids that nobody named, kernels and twins, against float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.kernels.distillation.distill_rows import Squash
from gramian.kernels.distillation.rest_rows import (
    REST,
    rest_gradient_,
    rest_gradient_kernel_,
    rest_gradient_twin_,
    rest_rows,
    rest_rows_kernel,
    rest_rows_twin,
)
from tests.kernels import interpreted, laid_out, random
from tests.kit.matrix import examples, sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def products(tokens, vocabulary, dtype=torch.float32, seed=0):
    """A third of the ids left out, the first block of some rows among them."""
    x = 3 * random(tokens, vocabulary, seed=seed)
    x[:, 1::3] = -torch.inf
    x[::2, : vocabulary - 1] = -torch.inf
    x[:, -1] = 0.5
    return x.to(dtype)


def logits(x, squash):
    z = squash.scale * x.double()
    z = z if squash.softcap is None else squash.softcap * torch.tanh(z / squash.softcap)
    return z.masked_fill(x == -torch.inf, -torch.inf)


def expected_rows(x, T, squash):
    z = logits(x, squash)
    mean = ((z / T).softmax(1) * z.clamp(min=-1e9)).sum(1)
    return torch.stack([z.amax(1), (z / T).logsumexp(1), mean, z.logsumexp(1)])


def expected_gradient(x, targets, T, factor, lse, lse_1, ce_weight, squash):
    z = logits(x, squash)
    onehot = torch.nn.functional.one_hot(targets.clamp(min=0), x.shape[1]).double()
    dz = factor.double()[:, None] * (z / T - lse.double()[:, None]).exp()
    dz = dz + ce_weight * ((z - lse_1.double()[:, None]).exp() - onehot)
    slope = squash.scale * (1 - (z.clamp(min=-1e9) / squash.softcap) ** 2 if squash.softcap else 1.0)
    nothing = (x == -torch.inf) | (targets == -100)[:, None]
    return (dz * slope).masked_fill(nothing, 0.0)


def written(function, x, *args, **kwargs):
    function(x, *args, **kwargs)
    return x


def both_close(x, T, squash, block, seed=0):
    targets = torch.randint(x.shape[1], (len(x),), generator=torch.Generator().manual_seed(seed))
    targets[1::4] = -100
    want = expected_rows(x, T, squash)
    temperature = torch.tensor(T)
    coefficients = (random(len(x), seed=seed), want[1].float(), want[3].float() + 0.3)
    want_gradient = expected_gradient(x, targets, T, *coefficients, 0.4, squash)
    eps = torch.finfo(x.dtype).eps if x.dtype != torch.float32 else 0.0
    options = (({}, rest_rows_twin, rest_gradient_twin_), ({"block": block}, rest_rows_kernel, rest_gradient_kernel_))
    for extra, rows, gradient_ in options:
        got = interpreted(rows, x, temperature, squash, **extra)
        assert got.dtype == torch.float32 and len(got) == len(REST)
        torch.testing.assert_close(got.double(), want, rtol=5e-6, atol=5e-6)
        after = interpreted(
            written, gradient_, x.clone(), targets, temperature, *coefficients, 0.4, -100, squash, **extra
        )
        assert after.dtype == x.dtype
        scale = float(want_gradient.abs().max())
        torch.testing.assert_close(after.double(), want_gradient, rtol=2e-5 + eps, atol=2e-6 * scale + 1e-7)
        assert not after[targets == -100].any() and not after[x == -torch.inf].any()


CASES = sample(
    list(itertools.product(DTYPES, (Squash(), Squash(0.5, 3.0)), (1.0, 2.0, 10.0), ((5, 37), (4, 64), (1, 1)))),
    10,
    case=lambda item: (item[0], item[1]),
)


@pytest.mark.parametrize(("dtype", "squash", "T", "shape"), CASES)
def test_kernels_and_twins_are_float64s(dtype, squash, T, shape):
    both_close(products(*shape, dtype=dtype), T, squash, 16)


@settings(max_examples=examples(6))
@given(tokens=st.integers(1, 4), vocabulary=st.integers(1, 70), block=st.sampled_from([16, 32]), T=st.floats(0.5, 10))
def test_kernels_at_any_shape(tokens, vocabulary, block, T):
    both_close(products(tokens, vocabulary, seed=vocabulary), T, Squash(), block, seed=tokens)


def test_padded_rows_are_read_and_written_in_their_place():
    x = products(5, 33)
    around, targets, temperature = laid_out(x, "amid nan"), torch.arange(5), torch.tensor(2.0)
    for rows, gradient_ in ((rest_rows_twin, rest_gradient_twin_), (rest_rows_kernel, rest_gradient_kernel_)):
        want = interpreted(rows, x, temperature)
        assert interpreted(rows, around, temperature).equal(want)
        args = (targets, temperature, want[0], want[1], want[3], 0.5, -100)
        assert interpreted(written, gradient_, around, *args).equal(interpreted(written, gradient_, x.clone(), *args))


def test_a_logit_that_is_no_number_is_not_hidden():
    x = products(4, 20)
    x[3, 0] = float("nan")
    for rows in (rest_rows_twin, rest_rows_kernel):
        got = interpreted(rows, x, torch.tensor(2.0))
        assert got[1].isnan().tolist() == [False, False, False, True]


def test_dispatch_on_a_cpu_gives_the_twins():
    x, targets, temperature = products(4, 20), torch.arange(4), torch.tensor(2.0)
    want = rest_rows_twin(x, temperature)
    assert rest_rows(x, temperature).equal(want)
    args = (targets, temperature, want[0], want[1], want[3], 0.5, -100)
    assert written(rest_gradient_, x.clone(), *args).equal(written(rest_gradient_twin_, x.clone(), *args))
    assert rest_rows(x.double(), temperature).dtype == torch.float64
