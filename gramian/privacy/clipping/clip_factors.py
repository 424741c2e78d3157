"""The clip factor c_i = min(1, C / ‖g_i‖) of a sample with gradient g_i and clip norm C, with a margin for rounding.

All clipping uses this one function, so that one sample contributes a gradient of norm at most C to the sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = {torch.float64: 2.0**-36, torch.float32: 2.0**-17, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""Relative error that rounding may add to a norm or to a clipped gradient, by the narrowest dtype of the computation. Clip
factors below 1 are reduced by this much, so that the clipped gradient stays within the clip norm."""


@dataclass(frozen=True)
class ClippedBatch:
    """Gradient norms and clip factors of the samples of one backward. ε does not cover their publication."""

    norms_B: Tensor
    """Norm of each sample's gradient over all trained parameters: [B]."""
    factors_B: Tensor
    """Clip factor of each sample: [B]; 0 for one whose gradient is not finite."""
    nonfinite: int
    """Number of samples that were left out because their gradient is not finite."""


def clip_factors(norms: Tensor, max_grad_norm: float, slack: float) -> Tensor:
    """min(1, C / (1 + slack) / norm) for every norm, with C = max_grad_norm; 0 where the norm is not finite.

    `slack` is the relative rounding error to allow for, an entry of `SLACK`.
    """
    limit = max_grad_norm / (1 + slack)
    return torch.where(norms.isfinite(), (limit / norms).clamp(max=1.0), 0.0)
