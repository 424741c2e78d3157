"""Orthogonalisation: the interval that the polynomials reach, the directions they keep, and rounding in bfloat16."""

import numpy as np
import pytest
import torch

from gramian.optim.orthogonalise import COEFFICIENTS, orthogonalised, scaled_to_one


def mapped(values: np.ndarray) -> np.ndarray:
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return values


def test_the_polynomials_bring_the_interval_near_one_and_small_values_up() -> None:
    reached = mapped(np.geomspace(0.003, 1, 100_000))
    assert 0.77 < reached.min() < 0.79 and 1.21 < reached.max() < 1.23
    assert (mapped(np.geomspace(1e-8, 0.003, 1000)) > 250 * np.geomspace(1e-8, 0.003, 1000)).all()


def test_each_polynomial_bears_an_interval_two_percent_longer() -> None:
    low, high = 0.003, 1.02
    for a, b, c in COEFFICIENTS:
        values = np.linspace(low, high, 100_000)
        reached = a * values + b * values**3 + c * values**5
        assert abs((reached.max() - 1) - (1 - reached.min())) < 5e-3  # as far above as below: nothing is nearer to 1
        low = reached.min()
        high = 1.02 * (2 - low)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("shape", [(3, 4, 7), (2, 9, 5), (1, 6, 6), (2, 1, 8)])
def test_singular_vectors_stay_and_values_are_mapped(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    U, s, V = torch.linalg.svd(x, full_matrices=False)
    s = torch.from_numpy(mapped((s / s.square().sum(-1, keepdim=True).sqrt()).numpy()))
    found = orthogonalised(x.to(dtype)).double()
    assert torch.allclose(found, (U * s[:, None, :]) @ V, atol=tolerance)


@pytest.mark.parametrize("kind", ["even", "rank one", "slope"])
def test_bfloat16_stays_in_the_interval(kind: str) -> None:
    """Rounding does not carry a singular value out of the interval in which the polynomials are tame."""
    n, generator = 96, torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    values = {
        "even": torch.ones(n),
        "rank one": torch.cat([torch.ones(1), torch.zeros(n - 1)]),
        "slope": torch.logspace(0, -4, n),
    }[kind].double()
    found = torch.linalg.svdvals(orthogonalised(((U * values) @ V).bfloat16()[None])[0].double())
    assert float(found.max()) < 1.35
    if kind == "even":
        assert float(found.min()) > 0.6


def test_zero_stays_zero() -> None:
    assert not orthogonalised(torch.zeros(2, 3, 4)).any() and not scaled_to_one(torch.zeros(2, 3, 4)).any()
