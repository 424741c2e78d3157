"""The ternary spike: its values, its gradient, what it may not see."""

import math

import pytest
import torch
from torch import Tensor

from gramian.models.goose.goose_layers import SpikingLinear
from gramian.models.goose.spike import FLOOR, START_ALPHA, START_AMPLITUDE, Amplitude, Spike, size_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spike(channels: int = 9) -> Spike:
    """With a threshold of its own for every channel."""
    found = Spike(channels).double()
    with torch.no_grad():
        found.log_alpha += 0.3 * drawn(channels, seed=7)
    return found


def fired(module: Spike, x_BTC: Tensor) -> Tensor:
    return module(x_BTC, size_of(x_BTC))


def test_values_are_ternary_and_follow_the_threshold_of_each_token_and_channel() -> None:
    module, x_BTC = spike(), drawn(4, 6, 9)
    found = fired(module, x_BTC)
    for b in range(4):
        for t in range(6):
            size = sum(abs(v) for v in x_BTC[b, t].tolist()) / 9
            for c in range(9):
                threshold, x = module.log_alpha[c].exp().item() * size, x_BTC[b, t, c].item()
                assert found[b, t, c] == (1 if x > threshold else -1 if x < -threshold else 0)


@pytest.mark.oracle
def test_the_gradient_is_that_of_the_ramp_with_the_size_held_fixed() -> None:
    module, x_BTC, weights = spike(), drawn(4, 6, 9).requires_grad_(), drawn(4, 6, 9, seed=1)
    (fired(module, x_BTC) * weights).sum().backward()
    x, log_alpha = x_BTC.detach().clone().requires_grad_(), module.log_alpha.detach().clone().requires_grad_()
    threshold = log_alpha.exp() * x.detach().abs().mean(-1, keepdim=True)
    expected = torch.autograd.grad(((x / (2 * threshold)).clamp(-1, 1) * weights).sum(), (x, log_alpha))
    torch.testing.assert_close(x_BTC.grad, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.log_alpha.grad, expected[1], rtol=1e-12, atol=1e-12)
    outside = (x.abs() > 2 * threshold).sum()
    assert 0 < outside < x.numel()
    assert x_BTC.grad is not None and (x_BTC.grad == 0).sum() == outside


@pytest.mark.oracle
def test_a_spiking_linear_is_the_matrix_on_ternary_operands_times_size_and_amplitude_with_gradients_of_all() -> None:
    layer, x_BTC, weights = SpikingLinear(9, 5, spikes=True).double(), drawn(4, 6, 9), drawn(4, 6, 5, seed=1)
    with torch.no_grad():
        layer.spike.log_alpha += 0.3 * drawn(9, seed=2)
        layer.amplitude.amplitude += 0.3 * drawn(5, seed=3)
    leaves = [x_BTC, layer.spike.log_alpha, layer.amplitude.amplitude, layer.linear.weight]
    found = layer(x_BTC.requires_grad_())
    x, log_alpha, amplitude, matrix = (t.detach().clone().requires_grad_() for t in leaves)
    size = x.abs().mean(-1, keepdim=True)
    ramp = (x / (2 * log_alpha.exp() * size.detach())).clamp(-1, 1)
    spikes = (ramp > 0.5).double() - (ramp < -0.5).double() + ramp - ramp.detach()
    expected = size * amplitude * (spikes @ matrix.T)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    by_hand = torch.autograd.grad((expected * weights).sum(), (x, log_alpha, amplitude, matrix))
    for gradient, other in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


def test_the_threshold_learns() -> None:
    """In the code behind the seed it was called learnable and never got a gradient."""
    module, x_BTC = spike(), drawn(4, 6, 9)
    fired(module, x_BTC).square().sum().backward()
    fired(module, x_BTC).mul(x_BTC).sum().backward()
    assert module.log_alpha.grad is not None and module.log_alpha.grad.ne(0).all()


def test_a_token_sees_neither_other_tokens_nor_batch_mates() -> None:
    module, x_BTC = spike(), drawn(4, 6, 9)
    other = x_BTC.clone()
    other[1:] *= 100
    other[0, 3:] *= 100
    assert torch.equal(fired(module, other)[0, :3], fired(module, x_BTC)[0, :3])


def test_scale_does_not_matter_above_the_floor_and_zeros_are_silent() -> None:
    module, x_BTC = spike(), drawn(4, 6, 9)
    assert torch.equal(fired(module, x_BTC), fired(module, 50 * x_BTC))
    zeros = torch.zeros(2, 3, 9, dtype=torch.float64, requires_grad=True)
    found = fired(module, zeros)
    assert found.eq(0).all()
    found.sum().backward()
    assert zeros.grad is not None and zeros.grad.abs().max() <= 1 / (2 * FLOOR)


def test_a_normal_variable_is_approximated_as_well_as_three_levels_can() -> None:
    x = 3.0 * drawn(2000, 256)
    s = fired(Spike(256).double(), x)
    a = Amplitude(1).double()(s) * size_of(x)
    lost = (x - a).square().mean().item() / 9
    assert lost == pytest.approx(0.1902, abs=0.003)  # the optimum of Max (1960)
    assert s.abs().mean().item() == pytest.approx(0.5405, abs=0.005)
    unit = 3.0 * math.sqrt(2 / math.pi)
    for threshold, amplitude in [(0.8, 1.0), (1.25, 1.0), (1.0, 0.85), (1.0, 1.15)]:
        worse = START_AMPLITUDE * amplitude * unit * x.sign() * (x.abs() > START_ALPHA * threshold * unit)
        assert (x - worse).square().mean().item() / 9 > lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_keeps_its_dtype_and_decides_in_float32(dtype: torch.dtype) -> None:
    module, x = Spike(64).to(dtype), drawn(3, 5, 64).to(dtype).requires_grad_()
    found = fired(module, x)
    assert found.dtype == dtype and set(found.unique().tolist()) == {-1.0, 0.0, 1.0}
    wide = Spike(64)
    with torch.no_grad():
        wide.log_alpha.copy_(module.log_alpha)
    assert torch.equal(found.float(), fired(wide, x.float()))
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype
    assert module.log_alpha.grad is not None and module.log_alpha.grad.dtype == dtype
