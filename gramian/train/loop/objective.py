"""Model and loss as one module, which DDP or FSDP2 wraps, so that its reducer sees every gradient.

Legend: B windows, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that has no loss."""


class Objective(nn.Module):
    """Next-token cross-entropy of a language model.

    Args:
        model: the reference `GPT` or `Goose`, or a Hugging Face causal language model.

    Example:
        >>> loss, nats = Objective(model)(tokens_BT, targets_BT, 1 / tokens_BT.numel())  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that computes the logits, under the name that Hugging Face models have for it."""
        ask = getattr(self.model, "get_output_embeddings", None)
        head: nn.Module | None = ask() if callable(ask) else getattr(self.model, "head", None)
        return head

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, coefficient: float | Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and the plain sum.

        Args:
            tokens_BT: token ids.
            targets_BT: the next token at each position, or −100 for none.
            coefficient: factor of each token's loss in the first result.
            documents_BT: document of each token, for models that do not attend across documents.

        Returns:
            coefficient · Σ −log p(target), and Σ −log p(target) without a graph, in float32 or wider.
        """
        logits_BTV = logits_of(self.model, tokens_BT, documents_BT)
        total = summed_loss(logits_BTV, targets_BT)
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


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ −log p(target), in float32 or wider."""
    logits = logits_BTV.flatten(0, 1)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(wide, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Measured:
    """Summed loss over some windows."""

    nats: float
    """Σ −log p."""
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.nats / max(1, self.tokens)
