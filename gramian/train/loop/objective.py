"""Model and loss as one module, which DDP or FSDP2 wraps, so that its reducer sees every gradient.

Legend: B windows, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gramian.linalg.wide import wide
from gramian.models.gpt import positions_of

IGNORED = -100
"""Target id of a position that has no loss term."""


class Objective(nn.Module):
    """Next-token cross-entropy of the reference `GPT` or `Goose`, or of a Hugging Face causal language model.

    Example:
        >>> loss, nats = Objective(model)(tokens_BT, targets_BT, 1 / tokens_BT.numel())  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that computes the logits, None if it is unknown; Hugging Face models use the same name for this method."""
        ask = getattr(self.model, "get_output_embeddings", None)
        head: nn.Module | None = ask() if callable(ask) else getattr(self.model, "head", None)
        return head

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, coefficient: float | Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return coefficient · Σ −log p(target) to differentiate, and Σ −log p(target) without a graph.

        Takes token and target ids [B, T]; a target of −100 does not count. `documents_BT` is the document of each token, for
        models that keep documents apart; None: one document per window. Both results are float32, or float64 for such logits.
        """
        logits_BTV = logits_of(self.model, tokens_BT, documents_BT)
        total = summed_loss(logits_BTV, targets_BT)
        return total * coefficient, total.detach()


def logits_of(model: nn.Module, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] of a model for token ids [B, T]; `documents_BT`: document of each token, which sees no other.

    A Hugging Face model gets positions that restart with each document, from which it makes its mask.
    """
    found: Any
    if hasattr(model, "get_output_embeddings"):
        positions = {} if documents_BT is None else {"position_ids": positions_of(documents_BT)}
        found = model(input_ids=tokens_BT, use_cache=False, **positions)
    else:
        found = model(tokens_BT) if documents_BT is None else model(tokens_BT, documents_BT)
    logits_BTV: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits_BTV


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ −log p(target) over all targets [B, T] but −100, from logits [B, T, V], in float32, or float64 if the logits are."""
    return F.cross_entropy(wide(logits_BTV.flatten(0, 1)), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Measured:
    """Summed loss of some windows, and the number of their tokens."""

    nats: float
    """Σ −log p(target) over the tokens."""
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.nats / max(1, self.tokens)
