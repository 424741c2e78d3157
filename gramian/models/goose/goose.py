r"""Goose: a recurrent language model whose matrix products have ternary operands ("spikes"), and its dense twin.

One block, for the residual stream x, with n = norm(x), prev the previous token (zero at the beginning) and σ the sigmoid:

    m_j = n_t + μ_j ⊙ (n_prev − n_t)                          j = k, v, r: a mix of this token and the previous one
    k = W_k spike(m_k)              v and r likewise          ternary operands
    S_t = d ⊙ S_{t−1} + k ⊙ v,      d = σ(w)                  memory, one number per channel
    x ← x + σ(r) ⊙ W_o spike(norm(√(1−d²) ⊙ S_t))
    x ← x + W_2 spike(relu(W_1 spike(m_f))²)                  m_f: the mix of norm(x)

Every W spike(x) is mean |x| · a ⊙ (W s) with s in {−1, 0, 1} (`gramian.models.goose.spike`).

Here a is a learned amplitude per output. √(1−d²) gives channels of all time constants the same variance. There are no position
embeddings: the recurrence encodes the order, and sequences have no maximum length. `spikes=False` is the dense twin: the same
code and the same initial matrices with spike = identity and no amplitudes.

Legend: B sequences, T tokens, D width of the residual stream, F hidden width of the MLP, V vocabulary.

Parameters: (4 + 2·ffn) D² per block and some vectors, plus V·D for each of embedding and head (shared when tied).
Cost of a forward pass: about 2 · parameters FLOPs per token for any T; `operations` counts how many of them are ternary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gramian.linalg.wide import wide
from gramian.models.goose.goose_layers import LeakyMemory, Mix, SpikingLinear
from gramian.models.goose.spike import Amplitude, Spike
from gramian.models.initial_weights import check_shape, draw_matrices
from gramian.models.residual_stream import segment_size, through_blocks


@dataclass(frozen=True)
class GooseConfig:
    """Shape of a Goose.

    Attributes:
        vocabulary: number of token ids.
        context: largest initial time constant of the memory, in tokens; sequences may be longer.
        layers: number of blocks.
        width: width of the residual stream.
        spikes: whether the inputs of the blocks' matrices are rounded to ternary spikes; False: the dense twin.
        tied: whether the head shares its weight with the token embedding.
        ffn: hidden width of the MLP, as a multiple of `width`.
        dropout: probability of dropout on the embedding and both residual branches.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 128
    spikes: bool = True
    tied: bool = False
    ffn: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raise a GramianError that names the first field with an impossible value."""
        check_shape(self, ("vocabulary", "context", "layers", "width", "ffn"))


class LayerState(NamedTuple):
    """State of one block after the tokens read so far."""

    memory_BD: Tensor
    """Memory S of the block, float32, or float64 if the model is."""
    token_BD: Tensor
    """Normalised residual stream of the last token before the memory, which the next token is mixed with."""
    mlp_token_BD: Tensor
    """Normalised residual stream of the last token before the MLP, which the next token is mixed with."""


State = tuple[LayerState, ...]
"""State of a Goose after the tokens read so far, one `LayerState` per block: 3·D numbers per block and sequence."""


class GooseBlock(nn.Module):
    """One block: `x + gate ⊙ memory(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: GooseConfig) -> None:
        """Build the block's layers; `Goose` initialises the matrices."""
        super().__init__()
        width, hidden, spikes = config.width, config.ffn * config.width, config.spikes
        self.norm_memory = nn.LayerNorm(width)
        self.mix_key, self.mix_value, self.mix_receptance = Mix(width), Mix(width), Mix(width)
        self.key = SpikingLinear(width, width, spikes)
        self.value = SpikingLinear(width, width, spikes)
        self.receptance = SpikingLinear(width, width, spikes)
        self.memory = LeakyMemory(width, config.context)
        self.norm_state = nn.LayerNorm(width)
        self.memory_out = SpikingLinear(width, width, spikes)
        self.norm_mlp = nn.LayerNorm(width)
        self.mix_mlp = Mix(width)
        self.fc = SpikingLinear(width, hidden, spikes)
        self.mlp_out = SpikingLinear(hidden, width, spikes)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, keep_BT: Tensor | None = None, state: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Map the residual stream [B, T, D] and the state after the previous tokens to the stream and state after the block.

        `keep_BT` is 0 where a document begins, else 1; None: each sequence is one document. `state` None: no previous tokens.
        """
        n_BTD = self.norm_memory(x_BTD)
        before_BTD = _before(n_BTD, keep_BT, None if state is None else state.token_BD)
        key_BTD = self.key(self.mix_key(n_BTD, before_BTD))
        value_BTD = self.value(self.mix_value(n_BTD, before_BTD))
        gate_BTD = self.receptance(self.mix_receptance(n_BTD, before_BTD)).sigmoid()
        read_BTD, memory_BD = self.memory(
            wide(key_BTD) * wide(value_BTD), keep_BT, None if state is None else state.memory_BD
        )
        out_BTD = gate_BTD * self.memory_out(self.norm_state(read_BTD.to(x_BTD.dtype)))
        x_BTD = x_BTD + self.residual_dropout(out_BTD)

        m_BTD = self.norm_mlp(x_BTD)
        mixed_BTD = self.mix_mlp(m_BTD, _before(m_BTD, keep_BT, None if state is None else state.mlp_token_BD))
        x_BTD = x_BTD + self.residual_dropout(self.mlp_out(self.fc(mixed_BTD).relu().square()))
        return x_BTD, LayerState(memory_BD, n_BTD[:, -1], m_BTD[:, -1])


class Goose(nn.Module):
    """Recurrent language model over token ids.

    The same `seed` gives the same weights on every device and in every dtype, and building a model does not change the global
    random state. The dense twin (`spikes=False`) of a seed has the same matrices.

    Example:
        >>> model = Goose(GooseConfig(vocabulary=256, layers=2, width=64), seed=0)
        >>> model(torch.zeros(1, 64, dtype=torch.long)).shape
        torch.Size([1, 64, 256])
    """

    def __init__(self, config: GooseConfig | None = None, seed: int = 0) -> None:
        """Build the model that `config` describes (None: `GooseConfig()`), with matrices drawn from `seed`."""
        super().__init__()
        self.config = config = config or GooseConfig()
        with torch.random.fork_rng(devices=[]):
            self.token_embedding = nn.Embedding(config.vocabulary, config.width)
            self.embedding_dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(GooseBlock(config) for _ in range(config.layers))
            self.final_norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.checkpoint_blocks = 0
        """Blocks per segment whose activations are recomputed in the backward pass; 0: all activations are stored."""
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set all parameters: matrices from N(0, 0.02²) as in GPT-2, drawn from `seed`; vectors to fixed initial values."""
        draw_matrices(self, seed, self.config.layers, ("memory_out.linear.weight", "mlp_out.linear.weight"))
        for module in self.modules():
            if isinstance(module, Mix | LeakyMemory | Spike | Amplitude):
                module.reset()
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Map token ids [B, T] of any length to logits [B, T, V] for the token that follows each position.

        `documents_BT` is the index of each token's document; the memory, and the mix with the previous token, then restart with
        every document. None: each sequence is one document.
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
            GramianError: for a layer that does not exist.
        """
        x_BTD = self.embedding_dropout(self.token_embedding(tokens_BT))
        keep_BT = None if documents_BT is None else continues(documents_BT)
        x_BTD, streams = through_blocks(
            self.blocks,
            lambda block, x_BTD: block(x_BTD, keep_BT)[0],
            x_BTD,
            layers,
            segment_size(self, self.checkpoint_blocks),
        )
        return self.final_norm(x_BTD), streams

    def advance(self, tokens_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run the model without its head on tokens [B, T], starting from a state (None: the beginning of a text).

        Returns:
            The head's input [B, T, D], and the state after the last token, to be passed on with the tokens that follow.
        """
        x_BTD = self.embedding_dropout(self.token_embedding(tokens_BT))
        after = []
        for layer, block in enumerate(self.blocks):
            x_BTD, found = block(x_BTD, None, None if state is None else state[layer])
            after.append(found)
        return self.final_norm(x_BTD), tuple(after)

    def step(self, token_B: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run one token [B] per sequence from `state` (None: the beginning); returns logits [B, V] and the new state.

        Cost: O(parameters), whatever the number of tokens before.
        """
        hidden_BTD, state = self.advance(token_B.unsqueeze(1), state)
        return self.head(hidden_BTD[:, 0]), state

    def num_parameters(self) -> int:
        """Number of scalar parameters; a weight that embedding and head share counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def continues(documents_BT: Tensor) -> Tensor:
    """Return [B, T]: 1 where a token belongs to the same document as the previous one, 0 where it begins a document."""
    keep_BT = torch.zeros(documents_BT.shape, device=documents_BT.device)
    keep_BT[:, 1:] = documents_BT[:, 1:] == documents_BT[:, :-1]
    return keep_BT


def _before(x_BTD: Tensor, keep_BT: Tensor | None, first_BD: Tensor | None) -> Tensor:
    """The values of x [B, T, D] at the previous token: `first_BD` (None: 0) for the first token, 0 where a document begins."""
    first_BD = torch.zeros_like(x_BTD[:, 0]) if first_BD is None else first_BD
    before_BTD = torch.cat([first_BD.unsqueeze(1), x_BTD[:, :-1]], dim=1)
    return before_BTD if keep_BT is None else before_BTD * keep_BT.unsqueeze(-1).to(before_BTD.dtype)
