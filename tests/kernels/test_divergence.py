"""Divergences in float32 keep their digits however large the logits are."""

import math

import pytest
import torch
from torch import Tensor

from gramian.kernels.distillation.divergence import DIRECTIONS, divergence
from gramian.kernels.distillation.rest_rows import rest_rows_twin


def in_float64(s: Tensor, t: Tensor, direction: str, beta: float) -> tuple[Tensor, Tensor]:
    """D of every row at u = 1, and dD/du, by autograd."""
    u = torch.ones(len(s), 1, dtype=torch.float64, requires_grad=True)
    log_q, log_p = ((u * z.double()).log_softmax(1) for z in (s, t))
    if direction == "forward":
        value_N = (log_p.exp() * (log_p - log_q)).sum(1)
    elif direction == "reverse":
        value_N = (log_q.exp() * (log_q - log_p)).sum(1)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        value_N = (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(1)
    (slope_N1,) = torch.autograd.grad(value_N.sum(), u)
    return value_N.detach(), slope_N1[:, 0]


@pytest.mark.oracle
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [3.0, 30.0, 200.0])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_values_and_slopes_of_large_logits_are_float64s(direction: str, size: float, shift: float) -> None:
    """Normalisers of logits of 1000 are off by 1e-4: taken from the largest logit they are not."""
    generator = torch.Generator().manual_seed(0)
    s, t = ((size * torch.randn(64, 40, generator=generator) + shift).float() for _ in range(2))
    beta = 0.3
    found = divergence(s, t, s, t, direction, beta)
    value_N, slope_N = in_float64(s, t, direction, beta)
    scale = value_N.mean()
    assert (found.value_N - value_N).abs().max() < 1e-5 * scale
    assert (found.slope_N - slope_N).abs().max() < 3e-5 * max(scale, slope_N.abs().mean())


@pytest.mark.oracle
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_entropies_of_large_logits_are_float64s(shift: float) -> None:
    z = (2 * torch.randn(64, 40, generator=torch.Generator().manual_seed(1)) + shift).float()
    _, lse_N, mean_N, _ = rest_rows_twin(z, torch.tensor(2.0))
    log_q = (z.double() / 2).log_softmax(1)
    centre_N = z.amax(1)
    expected_N = (log_q.exp() * (z - centre_N[:, None]).double()).sum(1)
    assert ((mean_N - centre_N).double() - expected_N).abs().max() < 2e-6 + 1e-7 * shift
    assert (lse_N.double() - (z.double() / 2).logsumexp(1)).abs().max() < 2e-6 + 1e-7 * shift
