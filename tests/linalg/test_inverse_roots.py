"""Inverse fourth roots by iteration against eigenvectors, and the interval in which the iteration keeps eigenvalues."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gramian.linalg.inverse_roots import CLOSE, coefficients, inverse_fourth_root, iterated_fourth_root

pytestmark = pytest.mark.oracle


def spectrum(kind: str, n: int, damping: float) -> Tensor:
    """Eigenvalues with mean 1, damped."""
    values = {
        "even": torch.ones(n, dtype=torch.float64),
        "one is large": torch.cat([torch.ones(1), torch.zeros(n - 1)]).double(),
        "a slope": torch.logspace(0, -9, n, dtype=torch.float64),
    }[kind]
    return values / values.mean() + damping


def problem(kind: str, n: int, damping: float) -> tuple[Tensor, Tensor, float]:
    """A stack of two matrices, their roots, and the bound of their condition."""
    generator = torch.Generator().manual_seed(n)
    bases = torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64, generator=generator))[0]
    values = spectrum(kind, n, damping)
    return (bases * values) @ bases.mT, (bases * values**-0.25) @ bases.mT, (n + damping * n**0.5) / damping


@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["even", "one is large", "a slope"])
@pytest.mark.parametrize("n", [1, 7, 48])
def test_the_iteration_is_the_root(n: int, kind: str, damping: float) -> None:
    stack, roots, bound = problem(kind, n, damping)
    for found, tolerance in (
        (inverse_fourth_root(stack, bound), 1e-12),
        (iterated_fourth_root(stack, bound, "fp64", torch.float64), CLOSE / 4),
        (iterated_fourth_root(stack.float(), bound, "bf16x3", torch.float16), 5e-3),
    ):
        error = torch.linalg.matrix_norm(found.double() - roots, 2) / torch.linalg.matrix_norm(roots, 2)
        assert float(error.max()) <= tolerance


@pytest.mark.parametrize("smallest", [0.5, 1e-2, 1e-4, 1e-7])
def test_eigenvalues_stay_in_the_interval_and_reach_one(smallest: float) -> None:
    values = np.concatenate([np.geomspace(smallest, 1, 20_001), [smallest, 1.0]])
    for a, b, least in coefficients(smallest):
        assert values.min() >= least * (1 - 1e-9)
        values = values * (a - b * values) ** 4
        assert values.max() <= 1 + 1e-12
    assert values.min() >= 1 - CLOSE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["even", "one is large", "a slope"])
@pytest.mark.parametrize("n", [64, 384, 1024])
def test_the_iteration_is_the_root_on_tensor_cores(n: int, kind: str) -> None:
    stack, roots, bound = problem(kind, n, 0.1)
    found = inverse_fourth_root(stack.float().cuda(), bound).double().cpu()
    error = torch.linalg.matrix_norm(found - roots, 2) / torch.linalg.matrix_norm(roots, 2)
    assert float(error.max()) <= 0.01
