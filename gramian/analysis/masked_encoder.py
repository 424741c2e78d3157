"""Encoders that return logits at masked positions only, and the choice of these positions.

Legend: B windows, T tokens of a window, M masked positions of a window, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingScores(nn.Module):
    """An encoder without a head: logits are inner products of its hidden states with its input embeddings.

    The weight of `head` is the embedding's, one tied parameter; there is no bias, scale or transform. A pooler, which the loss
    does not reach, is frozen.
    """

    def __init__(self, encoder: Any) -> None:
        """Tie an output layer to the input embedding of `encoder`, a Hugging Face model without a head."""
        super().__init__()
        self.model = encoder
        table = encoder.get_input_embeddings()
        self.head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False, device="meta")
        self.head.weight = table.weight
        if isinstance(getattr(encoder, "pooler", None), nn.Module):
            encoder.pooler.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Module:
        """The linear layer that computes the logits; its weight is the input embedding."""
        return self.head

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Map token ids [B, T] and positions [B, M] to the logits [B, M, V] at these positions."""
        hidden_BTD = self.model(input_ids=input_ids).last_hidden_state
        logits_BMV: Tensor = self.head(_at(hidden_BTD, positions))
        return logits_BMV


class MaskedHead(nn.Module):
    """An encoder that has a masked-language-model head, and returns its logits at chosen positions."""

    def __init__(self, model: Any) -> None:
        """Wrap `model`, a Hugging Face model for masked language modelling."""
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> nn.Module:
        """The last linear layer of the model's head, which computes the logits."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Map token ids [B, T] and positions [B, M] to the logits [B, M, V] at these positions; the head runs on all T."""
        return _at(self.model(input_ids=input_ids).logits, positions)


def mask(windows_BT: Tensor, token: int, share: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a share of the tokens of every window, at least one, by the id `token`; if T > 2, never the first or the last.

    Returns ids [B, T], masked positions [B, M] in ascending order, and the original ids at these positions [B, M].
    """
    generator = torch.Generator().manual_seed(seed)
    B, T = windows_BT.shape
    edge = int(T > 2)
    inside = T - 2 * edge
    M = max(1, round(share * inside))
    positions_BM = torch.rand(B, inside, generator=generator).argsort(1)[:, :M].sort(1).values + edge
    return windows_BT.scatter(1, positions_BM, token), positions_BM, windows_BT.gather(1, positions_BM)


def _at(rows_BTN: Tensor, positions_BM: Tensor) -> Tensor:
    return rows_BTN.gather(1, positions_BM[..., None].expand(-1, -1, rows_BTN.shape[-1]))
