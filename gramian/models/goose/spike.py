r"""Ternary spikes: activations x are rounded to −1, 0 or 1 before a matrix product.

For a token x with C channels and its size m = mean_c |x_c|, the threshold θ and the spike s of channel c are

    θ_c = max(α_c · m, 1e-3),        s_c = 1[x_c > θ_c] − 1[x_c < −θ_c],

with a learned α per channel. The mean is over one token, since a mean over time or over the batch would make a token depend on
later tokens or on other sequences. The gradient of the ramp s̃_c = clamp(x_c / 2θ_c, −1, 1) is used for s, with m constant:

    ∂s_c/∂x_c = 1[|x_c| < 2θ_c] / 2θ_c,        ∂s_c/∂ log α_c = −1[|x_c| < 2θ_c] x_c / 2θ_c.

The following matrix product is multiplied by the size, one number per token, and by a learned amplitude, one per output:
y = m · a ⊙ (W s). So the operands of W are exactly −1, 0 and 1, y has the scale of W x, and the gradient at x is scaled by m
and a. The gradient of m is the ordinary one.

α and a start at the values for which m·a·s best approximates a normal variable (Lloyd–Max): a threshold of 0.6120 and an
amplitude of 1.2240 standard deviations. Then 54 % of channels fire (spike is not 0), and 19 % of the variance is lost.

Legend: B sequences, T tokens, C channels.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gramian.linalg.wide import wide

START_ALPHA = 0.6120 * math.sqrt(math.pi / 2)
START_AMPLITUDE = 1.2240 * math.sqrt(math.pi / 2)
"""Initial amplitude a (`START_ALPHA`: initial threshold α) in units of mean |x|, √(2/π) standard deviations of a normal x."""
FLOOR = 1e-3
"""Smallest threshold θ of a spike, so that a token of zeros gives no spikes and has a bounded gradient."""


class Spike(nn.Module):
    """Map x [..., C] to spikes in {−1, 0, 1}: sign(x) where |x| > α · mean |x|, with a learned α per channel, else 0."""

    def __init__(self, channels: int) -> None:
        """Build the layer for `channels` channels; thresholds start at their initial values."""
        super().__init__()
        self.log_alpha = nn.Parameter(torch.empty(channels))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set every threshold to the best one for normally distributed x (0.612 standard deviations)."""
        self.log_alpha.fill_(math.log(START_ALPHA))

    def forward(self, x_BTC: Tensor, size_BT1: Tensor) -> Tensor:
        """The spikes of x, in the dtype of x; `size_BT1` is mean |x| of every token, as `size_of` computes it."""
        spikes_BTC: Tensor = _Ternary.apply(x_BTC, size_BT1, self.log_alpha)  # type: ignore[no-untyped-call]
        return spikes_BTC


class Amplitude(nn.Module):
    """Multiply the output z of the linear layer after the spikes by one learned factor per channel: y = a ⊙ z."""

    def __init__(self, channels: int) -> None:
        """Build the layer for `channels` channels; amplitudes start at their initial values."""
        super().__init__()
        self.amplitude = nn.Parameter(torch.empty(channels))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set every amplitude to the best one for normally distributed x (1.224 standard deviations)."""
        self.amplitude.fill_(START_AMPLITUDE)

    def forward(self, z_BTC: Tensor) -> Tensor:
        """The product a ⊙ z, in the dtype of z."""
        return z_BTC * self.amplitude.to(z_BTC.dtype)


class _Ternary(torch.autograd.Function):
    """Autograd function of the spikes; saves x and mean |x|, where autograd through the ramp would save four tensors like x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BTC: Tensor, size_BT1: Tensor, log_alpha_C: Tensor) -> Tensor:
        x, threshold = wide(x_BTC), _threshold(size_BT1, log_alpha_C)[0]
        return (x > threshold).to(x_BTC.dtype) - (x < -threshold).to(x_BTC.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        x_BTC, size_BT1, log_alpha_C = ctx.saved_tensors
        threshold, above_floor = _threshold(size_BT1, log_alpha_C)
        ramp = wide(x_BTC) / (2.0 * threshold)
        slope = wide(gradients[0]) * (ramp.abs() < 1.0)
        of_alpha = (-slope * ramp * above_floor).flatten(0, -2).sum(dim=0)
        return (slope / (2.0 * threshold)).to(x_BTC.dtype), None, of_alpha.to(log_alpha_C.dtype)


def size_of(x_BTC: Tensor) -> Tensor:
    """Mean |x| over the channels of every token, [B, T, 1], in float32, or float64 for float64 inputs."""
    return wide(x_BTC).abs().mean(dim=-1, keepdim=True)


def _threshold(size_BT1: Tensor, log_alpha_C: Tensor) -> tuple[Tensor, Tensor]:
    """The thresholds θ [B, T, C] of the spikes, and a mask of where θ is above its floor of 1e-3."""
    threshold_BTC = wide(log_alpha_C).exp() * size_BT1
    return threshold_BTC.clamp(min=FLOOR), threshold_BTC > FLOOR
