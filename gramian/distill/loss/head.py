"""The output head of a language model: from final hidden states [N, D] to logits [N, V].

Legend: N tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Head:
    """logits = cap(scale · (h Wᵀ + b)), where cap(z) = softcap · tanh(z / softcap), or z without a softcap.

    Example:
        >>> Head(torch.zeros(50, 8), softcap=30.0).logits(torch.randn(3, 8)).shape
        torch.Size([3, 50])
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] or [B, T, V] of hidden states [N, D] or [B, T, D]."""
        logits_NV = F.linear(hidden_ND, self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return logits_NV if self.softcap is None else self.softcap * (logits_NV / self.softcap).tanh()
