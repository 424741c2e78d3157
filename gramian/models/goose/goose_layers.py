"""Layers of a Goose block. Every parameter outside the linear layers has its own module, so that hooks capture it.

Legend: B sequences, T tokens, D width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.linalg.wide import wide
from gramian.models.goose.scan import scan
from gramian.models.goose.spike import Amplitude, Spike, size_of

MOST_OF_BEFORE = 0.75
"""Initial share μ of the previous token in the last channel; over the channels μ rises linearly from 0. It is the same in every
layer: if it grew with depth up to 1, the last layer would read only the previous token.
"""
SHORTEST = 2.0
"""Smallest initial time constant of the memory, in tokens."""


class Mix(nn.Module):
    """Mix of every token x with the previous one, per channel: x + μ ⊙ (before − x), with a learned share μ."""

    def __init__(self, width: int) -> None:
        """Build the layer for `width` channels, with initial shares from 0 to 0.75."""
        super().__init__()
        self.share = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set the shares μ to their initial values: linear over the channels from 0 to 0.75."""
        self.share.copy_(torch.linspace(0.0, MOST_OF_BEFORE, self.share.shape[0]))

    def forward(self, x_BTD: Tensor, before_BTD: Tensor) -> Tensor:
        """x + μ ⊙ (before − x), [B, T, D], where `before_BTD` is x shifted by one token: the value at the previous token."""
        return x_BTD + self.share.to(x_BTD.dtype) * (before_BTD - x_BTD)


class LeakyMemory(nn.Module):
    """Decaying memory of every channel: S_t = d ⊙ S_{t−1} + u_t with learned d = sigmoid(w); the output is √(1−d²) ⊙ S_t.

    For white noise u the output has the variance of u, whatever d is.
    """

    def __init__(self, width: int, longest: float) -> None:
        """Build the memory of `width` channels; `longest` is the largest initial time constant, in tokens."""
        super().__init__()
        self.longest = max(longest, SHORTEST)
        self.decay_logit = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set the decays d = exp(−1/τ), with time constants τ evenly spaced in log τ from 2 tokens to `longest`."""
        first, last = math.log(SHORTEST), math.log(self.longest)
        taus_D = torch.linspace(first, last, self.decay_logit.shape[0], dtype=torch.float64).exp()
        self.decay_logit.copy_((-1.0 / taus_D).exp().logit())

    def forward(
        self, u_BTD: Tensor, keep_BT: Tensor | None = None, initial_BD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output √(1−d²) ⊙ S [B, T, D] for inputs u, and the last state S [B, D]; float32, or float64 for float64 inputs.

        `keep_BT` is 0 where a document begins, else 1; None: each sequence is one document. `initial_BD` is the state before
        the first token; None: 0.
        """
        logit_D = wide(self.decay_logit)
        states_BTD = scan(u_BTD, logit_D.sigmoid(), keep_BT, initial_BD)
        # √((1−d)(1+d)) from log(1−d) = logsigmoid(−w): the slope is finite even if d rounds to 1.
        loudness_D = (0.5 * F.logsigmoid(-logit_D)).exp() * (1.0 + logit_D.sigmoid()).sqrt()
        return loudness_D * states_BTD, states_BTD[:, -1]


class SpikingLinear(nn.Module):
    """Linear layer on ternary spikes: mean |x| · a ⊙ (W spike(x)), with spike(x) in {−1, 0, 1} and a learned amplitude a."""

    def __init__(self, inputs: int, outputs: int, spikes: bool) -> None:
        """Build the layer; with `spikes` false it is the plain linear layer W x. The model initialises W."""
        super().__init__()
        self.spike = Spike(inputs) if spikes else None
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.amplitude = Amplitude(outputs) if spikes else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, inputs] to [B, T, outputs]."""
        if self.spike is None or self.amplitude is None:
            y_BTD: Tensor = self.linear(x_BTD)
            return y_BTD
        size_BT1 = size_of(x_BTD)
        y_BTD = self.amplitude(self.linear(self.spike(x_BTD, size_BT1)))
        return y_BTD * size_BT1.to(y_BTD.dtype)
