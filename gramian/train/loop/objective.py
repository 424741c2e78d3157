"""Model and loss as one module: what DDP wraps, so that nothing of the loss slips past its reducer.

Legend: B windows, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""A target that does not count."""


class Objective(nn.Module):
    """Next-token cross-entropy of a language model."""

    def __init__(self, model: nn.Module) -> None:
        """Hold the model."""
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that makes the logits, as Hugging Face models tell it: nothing shows it from outside but a loss."""
        ask = getattr(self.model, "get_output_embeddings", None)
        head: nn.Module | None = ask() if callable(ask) else getattr(self.model, "head", None)
        return head

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, coefficient: float | Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss to go back from, and the plain sum.

        Args:
            tokens_BT: ids.
            targets_BT: the token after each, or −100.
            coefficient: of one token's loss in the first result.
            documents_BT: for models that keep documents apart.

        Returns:
            coefficient · Σ −log p(target), and Σ −log p(target) without a graph, in float32 or wider.
        """
        logits_BTV = logits_of(self.model, tokens_BT, documents_BT)
        total = F.cross_entropy(
            _wide(logits_BTV.flatten(0, 1)), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total * coefficient, total.detach()


def logits_of(model: nn.Module, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] of the reference GPT or of a Hugging Face model."""
    found: Any
    if hasattr(model, "get_output_embeddings"):
        found = model(input_ids=tokens_BT, use_cache=False)
    else:
        found = model(tokens_BT) if documents_BT is None else model(tokens_BT, documents_BT)
    logits_BTV: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits_BTV


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@dataclass(frozen=True)
class Measured:
    """Loss over some windows."""

    nats: float
    """Σ −log p."""
    tokens: int

    @property
    def loss(self) -> float:
        """Mean per token."""
        return self.nats / max(1, self.tokens)
