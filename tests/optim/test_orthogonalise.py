"""Orthogonalisation: the interval that the polynomials reach, the directions they keep, and rounding in float16."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gramian.optim.orthogonalise import COEFFICIENTS, orthogonaliser
from gramian.optim.whitened_steps import MatrixGroup, directions, product_dtype


def mapped(values: np.ndarray) -> np.ndarray:
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return values


def orthogonalised(x: Tensor, dtype: torch.dtype) -> Tensor:
    return orthogonaliser(x @ x.mT, dtype).to(x.dtype) @ x / x.square().sum((-2, -1), keepdim=True).sqrt()


def exactly(x: Tensor) -> Tensor:
    """The same in float64, from singular values."""
    U, s, V = torch.linalg.svd(x.double(), full_matrices=False)
    return (U * torch.from_numpy(mapped((s / s.square().sum(-1, keepdim=True).sqrt()).numpy()))[..., None, :]) @ V


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
@pytest.mark.parametrize("shape", [(3, 4, 7), (1, 6, 6), (2, 1, 8)])
def test_singular_vectors_stay_and_values_are_mapped(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    assert torch.allclose(orthogonalised(x.to(dtype), dtype).double(), exactly(x), atol=tolerance)


@pytest.mark.parametrize("kind, error", [("even", 0.015), ("slope", 0.05), ("spike", 0.02), ("gap", 0.05)])
def test_float16_keeps_small_singular_values_beside_large_ones(kind: str, error: float) -> None:
    """Squares of 2.5e-5 of the largest are above the rounding of the Gram matrix: "spike" is 0.13 off without its rest."""
    n, generator = 128, torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    values = {
        "even": torch.ones(n),
        "slope": torch.logspace(0, -4, n),
        "spike": torch.cat([torch.ones(1), torch.full((n - 1,), 5e-3)]),
        "gap": torch.cat([torch.ones(9), torch.full((n - 9,), 1e-3)]),
    }[kind].double()
    x = ((U * values) @ V).float()[None]
    found, want = orthogonalised(x, torch.float16).double(), exactly(x)
    assert float((found - want).norm() / want.norm()) < error
    assert float(torch.linalg.svdvals(found).max()) < 1.25


def test_zero_is_no_reason_for_nan() -> None:
    assert not orthogonaliser(torch.zeros(2, 3, 3), torch.float32).isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_precision_have_the_direction_of_float64(dtype: torch.dtype) -> None:
    """In bfloat16, whose eight bits lose small singular values in the Gram matrix, the cosine would be 0.2."""
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(1, 24, 40, generator=generator, dtype=torch.float64) * torch.logspace(
        0, -2, 40, dtype=torch.float64
    )
    P, D = torch.eye(24, dtype=torch.float64)[None], torch.ones(1, 1, 40, dtype=torch.float64)
    found = []
    for one in (product_dtype(torch.zeros(1, dtype=dtype)), torch.float64):
        group = MatrixGroup(("w",), False, P.to(one), D.to(one), torch.ones(1, 1, 1))
        [(z, d)] = directions([group.whitened(n.to(one), [0])])
        found.append((z.double() * d.double()).flatten())
    assert float(torch.nn.functional.cosine_similarity(*found, dim=0)) > 0.999


@pytest.mark.parametrize(
    "size", [0.0, 1e-44, 1e-40, 1e-35, 1e-30, 1e-28, 1e-26, 1e-24, 1e-22, 1e-12, 1.0, 1e12, 1e18, 1e30]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_size_of_a_gradient_is_a_reason_for_nan(dtype: torch.dtype, size: float) -> None:
    """Where squares underflow or overflow in float32, too; a gradient far below the factors' gives no step."""
    generator = torch.Generator().manual_seed(0)
    n = (torch.randn(1, 16, 24, generator=generator) * size).to(torch.bfloat16 if dtype == torch.float16 else dtype)
    P, D = torch.eye(16, dtype=dtype)[None], torch.ones(1, 1, 24, dtype=dtype)
    [(z, d)] = directions([MatrixGroup(("w",), False, P, D, torch.full((1, 1, 1), 1e-8)).whitened(n, [0])])
    rms = float((z.float() * d).square().mean().sqrt())
    if 1e-18 < size < 1e17:
        assert rms == pytest.approx(min(1.0, float(n.float().norm()) / 1e-8), rel=0.01)
    else:
        assert rms <= 1e-9
