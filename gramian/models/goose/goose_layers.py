r"""What a block of Goose is made of. Every raw parameter has a small module of its own, so that taps can explain it.

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
"""Initial share of the token before, in the channel where it is largest; 0 where it is smallest. The same in every layer:
if the share grew with depth up to 1, the last layer would see the token before alone."""
SHORTEST = 2.0
"""Smallest initial time constant, in tokens."""


class Mix(nn.Module):
    """This token and the one before: x + μ ⊙ (before − x)."""

    def __init__(self, width: int) -> None:
        """Build it with its initial shares."""
        super().__init__()
        self.share = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """μ from 0 to 0.75 over the channels."""
        self.share.copy_(torch.linspace(0.0, MOST_OF_BEFORE, self.share.shape[0]))

    def forward(self, x_BTD: Tensor, before_BTD: Tensor) -> Tensor:
        """The mix, [B, T, D]."""
        return x_BTD + self.share.to(x_BTD.dtype) * (before_BTD - x_BTD)


class LeakyMemory(nn.Module):
    """S_t = d ⊙ S_{t−1} + u_t with d = σ(w), read out as √(1−d²) ⊙ S_t: as loud as u, where u is white noise, whatever d is."""

    def __init__(self, width: int, longest: float) -> None:
        """Build it with its initial decays.

        Args:
            width: channels.
            longest: largest initial time constant, in tokens.
        """
        super().__init__()
        self.longest = max(longest, SHORTEST)
        self.decay_logit = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """d = exp(−1/τ) with τ spaced evenly in log τ, from 2 tokens to the longest."""
        first, last = math.log(SHORTEST), math.log(self.longest)
        taus_D = torch.linspace(first, last, self.decay_logit.shape[0], dtype=torch.float64).exp()
        self.decay_logit.copy_((-1.0 / taus_D).exp().logit())

    def forward(
        self, u_BTD: Tensor, keep_BT: Tensor | None = None, initial_BD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The readout [B, T, D] and the last state [B, D], float32 or wider.

        Args:
            u_BTD: what is written.
            keep_BT: 0 where a document begins, else 1.
            initial_BD: the state before the first token; default: 0.
        """
        logit_D = wide(self.decay_logit)
        states_BTD = scan(u_BTD, logit_D.sigmoid(), keep_BT, initial_BD)
        # √((1−d)(1+d)) by way of log(1−d) = logsigmoid(−w): finite slope also where d rounds to 1.
        loudness_D = (0.5 * F.logsigmoid(-logit_D)).exp() * (1.0 + logit_D.sigmoid()).sqrt()
        return loudness_D * states_BTD, states_BTD[:, -1]


class SpikingLinear(nn.Module):
    """m · a ⊙ (W spike(x)) with m = mean |x|; without spikes W x, the same W."""

    def __init__(self, inputs: int, outputs: int, spikes: bool) -> None:
        """Build it; the model draws W."""
        super().__init__()
        self.spike = Spike(inputs) if spikes else None
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.amplitude = Amplitude(outputs) if spikes else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, inputs] to [B, T, outputs]."""
        if self.spike is None or self.amplitude is None:
            y_BTD: Tensor = self.linear(x_BTD)
            return y_BTD
        size_BT1 = size_of(x_BTD)
        y_BTD = self.amplitude(self.linear(self.spike(x_BTD, size_BT1)))
        return y_BTD * size_BT1.to(y_BTD.dtype)
