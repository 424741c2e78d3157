"""Small networks, each with one property that a capture can get wrong.

Sizes are odd and unequal, so that a transposed factor cannot fit. No network mixes samples.
Shape legend: B samples, T tokens, D width, V classes or vocabulary, W windows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 9), nn.ReLU(inplace=True), nn.Linear(9, 11, bias=False), nn.ReLU(inplace=True), nn.Linear(11, 5)
    )


def linears() -> nn.Module:
    """Two linears without memory of the number of dimensions in front."""
    return nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5, bias=False))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, causal: bool):
        super().__init__()
        self.ln_1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.ln_2, self.fc, self.proj = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.ln_1(x_BTD))
        return x_BTD + self.proj(F.gelu(self.fc(self.ln_2(x_BTD))))


class GPT(nn.Module):
    """Position ids are [1, T]: the position embedding sees one row whatever B is."""

    def __init__(self, tied: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(13, 12), nn.Embedding(7, 12)
        self.blocks = nn.Sequential(Block(12, 3, 15, causal=True), Block(12, 3, 15, causal=True))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 13, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        return self.head(self.norm(self.blocks(self.tokens(ids_BT) + self.positions(positions_1T))))


def hf_gpt2() -> nn.Module:
    """Hugging Face's Conv1D (weight [in, out]) and a head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=13, n_positions=7, n_embd=12, n_layer=2, n_head=3, n_inner=15, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def hf_llama() -> nn.Module:
    """Grouped-query attention and an RMSNorm that casts to float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=13, hidden_size=10, intermediate_size=15, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=7, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class ViT(nn.Module):
    """Raw parameters on the parent (class token, position table) beside a patch convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 10, kernel_size=(2, 3), stride=(2, 3))
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 10)), nn.Parameter(torch.zeros(1, 7, 10))
        self.block, self.norm, self.head = Block(10, 2, 13, causal=False), nn.LayerNorm(10), nn.Linear(10, 5)

    def forward(self, images: Tensor) -> Tensor:
        x_BTD = self.patches(images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.cls_token.expand(images.shape[0], -1, -1), x_BTD], dim=1) + self.pos_embed
        return self.head(self.norm(self.block(x_BTD))[:, 0])


def convnet() -> nn.Module:
    """Stride, dilation, groups, depthwise, three padding modes, norms over a sample's own channels."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=1, padding_mode="circular"),
        nn.GroupNorm(3, 6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 10, 3, groups=2, padding=(1, 2), dilation=(1, 2), padding_mode="reflect", bias=False),
        nn.InstanceNorm2d(10, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(10, 7, (2, 3), stride=(1, 2), padding=(0, 1)),
        nn.Conv2d(7, 7, 3, padding="same", groups=7),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 5),
    )


def conv2d() -> nn.Module:
    """Stride, dilation and zero padding: what every library supports."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=1), nn.Tanh(),
        nn.Conv2d(6, 7, 2, dilation=(1, 2), bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(42, 5),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(6, 9, 2, dilation=2, groups=3, bias=False),
        nn.Tanh(), nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0)), nn.Tanh(),
        nn.Conv3d(6, 4, 2, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5),
    )  # fmt: skip


class Reused(nn.Module):
    """One linear called three times in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.inner(x_BTD)
        for _ in range(3):
            x_BTD = x_BTD + torch.tanh(self.shared(x_BTD))
        return self.head(x_BTD)


class TiedLinears(nn.Module):
    """Two modules with one weight, each with its own bias and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(7, 9), nn.Linear(7, 9), nn.Linear(9, 5)
        self.right.weight = self.left.weight

    def forward(self, left_BTD: Tensor, right_BD: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left_BTD)).mean(1) * torch.tanh(self.right(right_BD)))


class LoraLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, rank: int):
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.A, self.B = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


def lora() -> nn.Module:
    """Trained adapters beside frozen linears."""
    return nn.Sequential(LoraLinear(7, 11, 2), nn.GELU(), LoraLinear(11, 5, 3))


class MeanOverTokens(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.mean(1)


def padded_embedding() -> nn.Module:
    """The row of the padding token is read and has no gradient."""
    return nn.Sequential(nn.Embedding(13, 9, padding_idx=0), nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 5))


def rmsnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.RMSNorm(9), nn.GELU(), nn.Linear(9, 5))


class MultiheadSelfAttention(nn.Module):
    """torch's own attention: a raw in_proj_weight, and an out_proj whose forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 5)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norm(x_BTD)
        return self.head(x_BTD + self.attention(h_BTD, h_BTD, h_BTD, need_weights=False)[0])


def partially_frozen() -> nn.Module:
    """A trained bias beside a frozen weight, a frozen norm, a norm whose bias alone is frozen."""
    net = nn.Sequential(
        nn.Linear(7, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 11), nn.LayerNorm(11), nn.GELU(), nn.Linear(11, 5)
    )
    for frozen in (net[0].weight, net[1].weight, net[1].bias, net[4].bias):
        frozen.requires_grad_(False)
    return net


class Unused(nn.Module):
    """A trained linear that the forward pass never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(7, 5), nn.Linear(9, 11)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.used(x_BD)


class Broadcast(nn.Module):
    """An embedding and a linear see one row, which is expanded to B later."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.mix = nn.Embedding(6, 7), nn.Linear(7, 9)
        self.inner, self.head = nn.Linear(11, 9), nn.Linear(9, 5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        positions_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        return self.head(torch.tanh(self.inner(x_BTD) + self.mix(self.positions(positions_1T))))


class Windows(nn.Module):
    """Linears see W·B rows, sample-major: window w of sample b is row b·W + w."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention, self.head = nn.Linear(7, 9), Attention(9, 3, causal=False), nn.Linear(9, 5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        windows = x_BTD.unflatten(1, (-1, 3)).flatten(0, 1)
        windows = self.attention(torch.tanh(self.inner(windows)))
        return self.head(windows.unflatten(0, (x_BTD.shape[0], x_BTD.shape[1] // 3)).flatten(1, 2))


def pooled() -> nn.Module:
    """Tokens below the pooling, one row per sample above it."""
    return nn.Sequential(
        nn.Embedding(13, 9), nn.LayerNorm(9), nn.Linear(9, 11), nn.GELU(), MeanOverTokens(), nn.Linear(11, 5)
    )
