"""Powers with a scale per column, and the sums of shifted inverses behind fractional powers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.linalg import DiagonalLowRank
from gramian.linalg.factors import diagonal_low_rank
from gramian.linalg.factors.rational_power import rational_power
from tests.kit.matrix import FULL
from tests.linalg.matrices import CASES, POWERS, damped_power, distance, normal

pytestmark = pytest.mark.oracle

SCALES = torch.tensor([1.0, 0.0, 1e-3, 7.0, 40.0], dtype=torch.float64)
quick = settings(max_examples=200 if FULL else 20)


def _worst(factor: DiagonalLowRank, matrix: torch.Tensor, y: torch.Tensor, p: float, damping: float) -> float:
    actual = factor.power_by_column(y, p, SCALES, damping)
    columns = range(len(SCALES))
    return max(
        distance(actual[:, [j]], damped_power(SCALES[j] * matrix, y[:, [j]], p, damping)) for j in columns
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("plus", "softmax"))])
@pytest.mark.parametrize("p", POWERS)
def test_every_column_has_its_own_scale(name: str, p: float) -> None:
    case = CASES[name]()
    worst = _worst(case.factor, case.matrix, normal(case.factor.dim, len(SCALES), seed=1), p, 0.1)
    assert case.factor.work.error_bound < 1e-6
    assert worst <= case.factor.work.error_bound + 1e-10


def test_a_zero_column_stays_zero() -> None:
    case = CASES["softmax"]()
    y = normal(case.factor.dim, len(SCALES), seed=1)
    y[:, 2] = 0
    for p in (-1.0, -0.5):
        out = case.factor.power_by_column(y, p, SCALES, 0.1)
        assert bool((out[:, 2] == 0).all())
        assert bool(out.isfinite().all())


def test_no_columns_are_no_trouble() -> None:
    case = CASES["softmax"]()
    assert case.factor.power_by_column(normal(12, 0), -1.0, SCALES[:0], 0.1).shape == (12, 0)


@pytest.mark.parametrize("p", [-1.0, -0.5, -1.7, 0.3, 1.5])
def test_the_bound_holds_where_the_steps_run_out(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal_low_rank, "CG_STEPS", 3)
    case = CASES["plus"]()
    worst = _worst(case.factor, case.matrix, normal(case.factor.dim, len(SCALES), seed=1), p, 0.1)
    assert 1e-6 < worst <= case.factor.work.error_bound


@quick
@given(q=st.floats(-0.99, -0.01), low=st.floats(-14, 6), decades=st.floats(0, 12))
def test_the_error_of_a_sum_of_inverses_is_what_it_says(q: float, low: float, decades: float) -> None:
    bottom, top = 10**low, 10 ** (low + decades)
    fit = rational_power(q, bottom, top)
    x = np.exp(np.random.default_rng(0).uniform(math.log(bottom), math.log(top), 500))
    approximate = fit.constant + sum(w / (x + s) for w, s in zip(fit.weights, fit.shifts, strict=True))
    assert fit.error < 1e-8
    assert np.abs(approximate * x**-q - 1).max() <= 1.1 * fit.error + 1e-13
