"""The output head of a language model: from final hidden states [N, D] to logits [N, V].

Legend: N tokens, D width, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.kernels.distillation.distill_rows import Squash


@dataclass(frozen=True)
class Head:
    """Output head of a language model: logits = cap(scale · (h Wᵀ + b)) of hidden states h.

    cap(z) is softcap · tanh(z / softcap), or z if `softcap` is None.

    Example:
        >>> Head(torch.zeros(50, 8), softcap=30.0).logits(torch.randn(3, 8)).shape
        torch.Size([3, 50])
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def squash(self) -> Squash:
        """The map from products h Wᵀ + b to logits: scale and soft cap."""
        return Squash(self.scale, self.softcap)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "Head":
        """A copy of the head on another device or in another dtype."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return replace(self, weight_VD=self.weight_VD.to(device, dtype), bias_V=bias_V)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] or [B, T, V] of hidden states [N, D] or [B, T, D]."""
        return self.squash(F.linear(hidden_ND, self.weight_VD, self.bias_V))
