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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.models.initial_weights import check_shape, draw_matrices
from gramian.models.residual_stream import segment_size, through_blocks
from gramian.models.token_sampling import sample_tokens


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        vocabulary: number of token ids.
        context: longest sequence that the position embedding covers.
        layers: number of blocks.
        width: width of the residual stream, a multiple of `heads`.
        heads: attention heads per block.
        tied: whether the head shares its weight with the token embedding.
        dropout: probability of dropout on the embedding, the attention weights and both residual branches.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raise a GramianError that names the first field with an impossible value."""
        check_shape(self, ("vocabulary", "context", "layers", "width", "heads"))
        if self.width % self.heads:
            raise GramianError(f"width: got {self.width}; expected a multiple of heads ({self.heads})")


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

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        """Map the residual stream [B, T, D] to that after the block; mask: true where attention is allowed, None: causal."""
        x_BTD = x_BTD + self.residual_dropout(self._attention(self.norm_attention(x_BTD), mask_B1TT))
        hidden_BTF = self.gelu(self.fc(self.norm_mlp(x_BTD)))
        out_BTD: Tensor = x_BTD + self.residual_dropout(self.mlp_out(hidden_BTF))
        return out_BTD

    def _attention(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        mixed_BHTK = F.scaled_dot_product_attention(
            self._split_heads(q_BTD),
            self._split_heads(k_BTD),
            self._split_heads(v_BTD),
            attn_mask=mask_B1TT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_B1TT is None,
        )
        mixed_BTD = mixed_BHTK.transpose(1, 2).flatten(2)
        out_BTD: Tensor = self.attention_out(mixed_BTD)
        return out_BTD

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        return x_BTD.view(B, T, self.heads, D // self.heads).transpose(1, 2)


class GPT(nn.Module):
    """Decoder-only transformer over token ids, with learned positions.

    The same `seed` gives the same weights on every device and in every dtype, and building a model does not change the global
    random state.

    Example:
        >>> model = GPT(GPTConfig(vocabulary=256, context=64, layers=2, width=64, heads=4), seed=0)
        >>> model(torch.zeros(1, 64, dtype=torch.long)).shape
        torch.Size([1, 64, 256])
    """

    def __init__(self, config: GPTConfig | None = None, seed: int = 0) -> None:
        """Build the model that `config` describes (None: `GPTConfig()`), with weights drawn from `seed`."""
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
        """Blocks per segment whose activations are recomputed in the backward pass; 0: all activations are stored."""
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set all parameters as GPT-2 does: matrices from N(0, 0.02²), drawn from `seed`, biases 0, norm weights 1.

        Matrices that write into the residual stream are also divided by √(2 · layers).
        """
        draw_matrices(self, seed, self.config.layers, ("attention_out.weight", "mlp_out.weight"))
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Map token ids [B, T], T <= context, to logits [B, T, V] for the token that follows each position.

        `documents_BT` is the index of each token's document; attention is then limited to the token's own document, and
        positions restart with each document. None: each sequence is one document.

        Raises:
            GramianError: if T exceeds the context.
        """
        logits_BTV: Tensor = self.head(self.hidden(tokens_BT, documents_BT)[0])
        return logits_BTV

    def hidden(
        self, tokens_BT: Tensor, documents_BT: Tensor | None = None, layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the model without its head; returns the head's input [B, T, D] and {layer: residual stream [B, T, D]}.

        The head's input is the residual stream after the final norm. `layers`: which streams to return besides; 0 is the
        embedding, l the stream after block l, counted from 1.

        Raises:
            GramianError: if T exceeds the context, or a layer does not exist.
        """
        length = tokens_BT.shape[1]
        if length > self.config.context:
            raise GramianError(f"tokens: got {length} per sequence; expected at most context ({self.config.context})")
        if documents_BT is None:
            # One row of ids for the whole batch: the layer after it broadcasts over B.
            positions, mask_B1TT = torch.arange(length, device=tokens_BT.device).unsqueeze(0), None
        else:
            positions, mask_B1TT = isolated(documents_BT)
        x_BTD = self.embedding_dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions))
        x_BTD, streams = through_blocks(
            self.blocks,
            lambda block, x_BTD: block(x_BTD, mask_B1TT),
            x_BTD,
            layers,
            segment_size(self, self.checkpoint_blocks),
        )
        return self.final_norm(x_BTD), streams

    def num_parameters(self) -> int:
        """Number of scalar parameters; a weight that embedding and head share counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def isolated(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, T] that restart with each document, and a causal mask [B, 1, T, T] that is true within a document only.

    `documents_BT`: index of each token's document. Memory: O(B T²) bytes.
    """
    order_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    return positions_of(documents_BT), (same_BTT & (order_T.unsqueeze(1) >= order_T)).unsqueeze(1)


def positions_of(documents_BT: Tensor) -> Tensor:
    """Position [B, T] of each token in its document; `documents_BT`: index of each token's document."""
    order_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return order_T - torch.where(begins_BT, order_T, 0).cummax(dim=1).values


def generate(model: GPT, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Sample `length` tokens after a prompt of token ids [T]; returns prompt and continuation, [T + length].

    Each token takes one full forward pass over the last `context` tokens. `temperature` > 0 divides the logits; the same `seed`
    gives the same tokens.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), length=20, temperature=0.8)

    Raises:
        GramianError: for an empty prompt, a negative length, or a temperature that is not above 0.
    """

    def next_logits(tokens_T: Tensor) -> Tensor:
        logits_BTV: Tensor = model(tokens_T[-model.config.context :].unsqueeze(0))
        return logits_BTV[0, -1]

    return sample_tokens(model, prompt_T, length, temperature, seed, next_logits)
