"""The last map of a language model, from its final hidden state to logits.

Legend: N tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Head:
    """logits = cap(scale · (h Wᵀ + b)), where cap(z) = softcap · tanh(z / softcap), or z without a softcap."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, D] or [B, T, D] to logits over V."""
        logits_NV = F.linear(hidden_ND, self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return logits_NV if self.softcap is None else self.softcap * (logits_NV / self.softcap).tanh()
