"""A small GPT in plain `torch.nn` modules: the reference model of the demo, the tests and the benchmarks.

Shape suffixes:
    B  batch (sequences)
    T  time (tokens in a sequence)
    D  width of the residual stream
    H  attention heads
    K  width of one head, D = H * K
    F  hidden width of the MLP, F = 4 * D
    V  vocabulary

Parameters: 12 D^2 per block, plus V D for each of embedding and head (shared when tied).
Cost of a forward: about 2 * parameters + 4 T D * layers FLOPs per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.models.residual_stream import recomputed, through_blocks


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        vocabulary: Number of token ids.
        context: Longest sequence the position embedding covers.
        layers: Number of blocks.
        width: Width of the residual stream, a multiple of `heads`.
        heads: Attention heads per block.
        tied: Whether the head shares its weight with the token embedding.
        dropout: Probability applied to the embedding, the attention weights and both residual branches.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built, naming the field."""
        for field in ("vocabulary", "context", "layers", "width", "heads"):
            value = getattr(self, field)
            if value < 1:
                raise GramianError(f"{field}: got {value}; accepted: an integer of at least 1")
        if self.width % self.heads:
            raise GramianError(f"width: got {self.width}; accepted: a multiple of heads ({self.heads})")
        if not 0.0 <= self.dropout < 1.0:
            raise GramianError(f"dropout: got {self.dropout}; accepted: 0 <= dropout < 1")


class GPTBlock(nn.Module):
    """One pre-norm transformer block: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the block's layers; `GPT` initialises them."""
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.mlp_out = nn.Linear(4 * config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, sees_B1TT: Tensor | None = None) -> Tensor:
        """Map the residual stream [B, T, D] to the next one [B, T, D]; `sees` says which tokens see which, default: causal."""
        x_BTD = x_BTD + self.residual_dropout(self._attention(self.norm_attention(x_BTD), sees_B1TT))
        hidden_BTF = self.gelu(self.fc(self.norm_mlp(x_BTD)))
        out_BTD: Tensor = x_BTD + self.residual_dropout(self.mlp_out(hidden_BTF))
        return out_BTD

    def _attention(self, x_BTD: Tensor, sees_B1TT: Tensor | None) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        mixed_BHTK = F.scaled_dot_product_attention(
            self._split_heads(q_BTD),
            self._split_heads(k_BTD),
            self._split_heads(v_BTD),
            attn_mask=sees_B1TT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=sees_B1TT is None,
        )
        mixed_BTD = mixed_BHTK.transpose(1, 2).flatten(2)
        out_BTD: Tensor = self.attention_out(mixed_BTD)
        return out_BTD

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        return x_BTD.view(B, T, self.heads, D // self.heads).transpose(1, 2)


class GPT(nn.Module):
    """Decoder-only transformer over token ids, with learned positions.

    The same `seed` gives the same weights on every device and in every dtype (values are drawn in float32 on the
    CPU), and building a model leaves the global random state alone.
    """

    def __init__(self, config: GPTConfig | None = None, seed: int = 0) -> None:
        """Build and initialise the model that `config` (default: `GPTConfig()`) describes."""
        super().__init__()
        self.config = config = config or GPTConfig()
        with torch.random.fork_rng(devices=[]):
            self.token_embedding = nn.Embedding(config.vocabulary, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
            self.embedding_dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
            self.final_norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.checkpoint_blocks = 0
        """Blocks of a segment whose activations are computed again in the backward; 0: all are kept."""
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter as GPT-2 does, as a function of `seed` alone.

        Matrices are N(0, 0.02^2); those that write into the residual stream are scaled by 1/sqrt(2 * layers), so that
        the stream's variance does not grow with depth. Biases are 0, normalisation weights 1.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:  # a shape: there is nothing to set
                continue
            if parameter.dim() == 2:
                writes_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                std = 0.02 / math.sqrt(2 * self.config.layers) if writes_residual else 0.02
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn * std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Map token ids [B, T], T <= context, to logits [B, T, V] for the token that follows each position.

        Args:
            tokens_BT: ids.
            documents_BT: which document each token belongs to; tokens then see their own document alone, and positions start
                anew with it. Default: a row is one document.
        """
        logits_BTV: Tensor = self.head(self.hidden(tokens_BT, documents_BT)[0])
        return logits_BTV

    def hidden(
        self, tokens_BT: Tensor, documents_BT: Tensor | None = None, layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the head reads, and the residual stream on the way there.

        Args:
            tokens_BT: ids.
            documents_BT: as of `forward`.
            layers: where to read the stream: 0 is the embedding, l is after block l, counted from 1.

        Returns:
            The final hidden state [B, T, D], after the final norm, and {layer: stream [B, T, D]} before it.
        """
        length = tokens_BT.shape[1]
        if length > self.config.context:
            raise GramianError(f"tokens: got {length} per sequence; accepted: at most context ({self.config.context})")
        if documents_BT is None:
            # One row of ids for the whole batch: the layer after it broadcasts over B.
            positions, sees_B1TT = torch.arange(length, device=tokens_BT.device).unsqueeze(0), None
        else:
            positions, sees_B1TT = isolated(documents_BT)
        x_BTD = self.embedding_dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions))
        x_BTD, streams = through_blocks(
            self.blocks,
            lambda block, x_BTD: block(x_BTD, sees_B1TT),
            x_BTD,
            layers,
            recomputed(self, self.checkpoint_blocks),
        )
        return self.final_norm(x_BTD), streams

    def num_parameters(self) -> int:
        """Number of scalar parameters; a shared one counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def isolated(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, T] that start anew with each document, and the mask [B, 1, T, T] of who sees whom. Cost: O(B T²) bits."""
    length = documents_BT.shape[1]
    order_T = torch.arange(length, device=documents_BT.device)
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    first_BT = torch.where(begins_BT, order_T, 0).cummax(dim=1).values
    return order_T - first_BT, (same_BTT & (order_T.unsqueeze(1) >= order_T)).unsqueeze(1)


@torch.no_grad()
def generate(model: GPT, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Sample a continuation, one full forward per token.

    Args:
        model: The model; its training mode is restored afterwards.
        prompt_T: Token ids [T], T >= 1.
        length: Number of tokens to add.
        temperature: Divides the logits; above 0.
        seed: Of the draws.

    Returns:
        Token ids [T + length], the prompt first.
    """
    if temperature <= 0.0:
        raise GramianError(f"temperature: got {temperature}; accepted: a number above 0")
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        tokens_T = prompt_T
        for _ in range(length):
            logits_BTV = model(tokens_T[-model.config.context :].unsqueeze(0))
            probabilities_V = (logits_BTV[0, -1].float() / temperature).softmax(dim=-1).cpu()
            drawn_1 = torch.multinomial(probabilities_V, 1, generator=generator)
            tokens_T = torch.cat([tokens_T, drawn_1.to(tokens_T)])
    finally:
        model.train(was_training)
    return tokens_T
