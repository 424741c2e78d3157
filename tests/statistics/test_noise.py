"""The gradient noise scale against the loop, and its unbiasedness over draws from a known population."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import gramian
from tests.kit.matrix import FULL, sample
from tests.kit.models import CASES
from tests.oracles import sample_statistics
from tests.statistics.problems import assert_noise, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

MATRIX = [*itertools.product(CASES, ("mean", "sum"), (torch.float64, torch.float32))]


@pytest.mark.parametrize("name, reduction, dtype", sample(MATRIX, 30))
def test_both_moments_and_both_ratios_are_those_of_the_loop(name: str, reduction: str, dtype: torch.dtype) -> None:
    p = problem(name, 5, dtype)
    model, noise = p.model(), gramian.NoiseScale()
    with gramian.observe(model, noise, loss_reduction=reduction) as seen:
        p.backward(model, p.batch, reduction)
    assert_noise(seen[noise], p.noise(), 5, p.tolerance)


def test_two_samples_by_hand() -> None:
    # Gradients (0, 2) and (2, 2): mean (1, 2), deviations ±(1, 0). tr Σ = 2, |G|² = 5 - 2/2, plug-in 5.
    result = _estimate(torch.tensor([[0.0, 2.0], [2.0, 2.0]], dtype=torch.float64))
    assert result.samples == 2
    assert (result.trace_covariance, result.squared_gradient) == pytest.approx((2.0, 4.0), rel=1e-12)
    assert result.simple == pytest.approx(0.4, rel=1e-12)
    assert result.unbiased == pytest.approx(0.5, rel=1e-12)


def test_the_plug_in_is_below_the_unbiased_ratio() -> None:
    result = _estimate(torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2)
    assert 0 < result.simple < result.unbiased


def test_equal_samples_have_no_noise() -> None:
    result = _estimate(torch.ones(6, 3, dtype=torch.float64))
    assert result.trace_covariance == pytest.approx(0, abs=1e-12)
    assert result.squared_gradient == pytest.approx(3, rel=1e-12)
    assert result.unbiased == pytest.approx(0, abs=1e-12)


def test_one_sample_has_no_variance_and_no_samples_nothing() -> None:
    one = _estimate(torch.ones(1, 3, dtype=torch.float64))
    assert one.samples == 1
    assert all(math.isnan(value) for value in (one.trace_covariance, one.squared_gradient, one.simple, one.unbiased))
    none = _estimate(torch.ones(0, 3, dtype=torch.float64))
    assert none.samples == 0
    assert all(
        math.isnan(value) for value in (none.trace_covariance, none.squared_gradient, none.simple, none.unbiased)
    )


def test_both_moments_are_unbiased_over_all_draws_of_three_from_four() -> None:
    # The mean over all draws with replacement is the expectation itself: no error rate.
    population = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = [_estimate(population[list(draw)]) for draw in itertools.product(range(4), repeat=3)]
    mean = population.mean(0)
    trace = float((population - mean).square().sum()) / 4
    assert sum(d.trace_covariance for d in draws) / len(draws) == pytest.approx(trace, rel=1e-10)
    assert sum(d.squared_gradient for d in draws) / len(draws) == pytest.approx(float(mean.square().sum()), rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("samples, signal", [(2, 0.3), (8, 0.3), (8, 2.0)])
def test_both_moments_are_unbiased_over_draws_from_a_gaussian(samples: int, signal: float) -> None:
    # Gradients ~ N(μ, σ² per coordinate): the data of a linear model whose loss is its output. The mean of D independent
    # estimates is within 4 standard errors of the truth with probability 1 - 6.3e-5 (normal; 6 checks: 4e-4 in all), and
    # the draws are seeded, so the test cannot turn red by chance on a machine where it was green.
    draws = 20000 if FULL else 1000
    generator = torch.Generator().manual_seed(samples)
    deviation = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
    mean = torch.full((6,), signal, dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False).double()
    noise = gramian.NoiseScale()
    traces, squares = [], []
    for _ in range(draws):
        x_BI = mean + deviation * torch.randn(samples, 6, dtype=torch.float64, generator=generator)
        result = _estimate(x_BI, model, noise)
        traces.append(result.trace_covariance)
        squares.append(result.squared_gradient)
    for estimates, truth in ((traces, deviation.square().sum()), (squares, mean.square().sum())):
        values = torch.tensor(estimates, dtype=torch.float64)
        error = float((values.mean() - truth).abs())
        standard = float(values.std() / draws**0.5)
        assert error <= 4 * standard, f"mean {float(values.mean()):.4g}, truth {float(truth):.4g} ± {standard:.2g}"
        assert standard < 0.2 * float(deviation.square().sum()), "too few draws to tell"


def test_the_estimate_over_many_passes_is_that_over_all_samples() -> None:
    # Not the mean of per-batch estimates, which could not see the variance between batches.
    p = problem("gpt", 6)
    model, noise = p.model(), gramian.NoiseScale()
    with gramian.observe(model, noise) as seen:
        for rows in (slice(0, 1), slice(1, 2), slice(2, 6)):
            p.backward(model, p.rows(rows))
    assert_noise(seen[noise], p.noise(), 6, p.tolerance)


def test_units_replace_samples() -> None:
    p = problem("mlp", 6)
    model, noise, ids = p.model(), gramian.NoiseScale(), torch.tensor([0, 1, 2, 0, 1, 2])
    with gramian.observe(model, noise, loss_reduction="sum", sample_ids=ids) as seen:
        p.backward(model, p.batch, "sum")
    units = {key: g[:3] + g[3:] for key, g in p.gradients.items()}
    assert_noise(seen[noise], sample_statistics.noise_scale(units), 3, p.tolerance)


def _estimate(
    gradients_BP: Tensor, model: nn.Linear | None = None, noise: gramian.NoiseScale | None = None
) -> gramian.statistics.NoiseScaleResult:
    """Through a model whose per-sample gradients are these rows."""
    model = model or nn.Linear(gradients_BP.shape[1], 1, bias=False).double()
    noise = noise or gramian.NoiseScale()
    with gramian.observe(model, noise, loss_reduction="sum") as seen:
        model(gradients_BP).sum().backward()
    return seen[noise]
