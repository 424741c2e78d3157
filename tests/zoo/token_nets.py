"""Small networks over patches and sequences, one for each way of mixing them; pictures are [B, 3, 16, 16]."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.conv_nets import Residual, classifier

D, SIDE = 8, 4
"""Width of a token; a picture has 4 × 4 patches of 4 × 4 pixels."""


class Patches(nn.Module):
    """[B, 3, 16, 16] to [B, 16, D], each with the row of its place."""

    def __init__(self, kind: str = "table") -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, SIDE, SIDE)
        self.places = nn.Parameter(0.1 * torch.randn(1, SIDE * SIDE, D)) if kind == "table" else None

    def forward(self, x: Tensor) -> Tensor:
        """One token for each patch."""
        tokens = self.patch(x).flatten(2).mT
        return tokens if self.places is None else tokens + self.places


class Attention(nn.Module):
    """Softmax attention from one projection to queries, keys and values; `bias` holds a row for each distance in a window."""

    def __init__(self, bias: int | None = None, values_per_query: int = 1) -> None:
        super().__init__()
        self.heads, self.shared = 2, values_per_query
        self.qkv, self.out = nn.Linear(D, D + 2 * D // values_per_query), nn.Linear(D, D)
        self.bias = None if bias is None else nn.Parameter(0.1 * torch.randn((2 * bias - 1) ** 2, self.heads))
        if bias is not None:
            places = torch.cartesian_prod(torch.arange(bias), torch.arange(bias))
            apart = places[:, None] - places[None] + bias - 1
            self.register_buffer("distance", apart[..., 0] * (2 * bias - 1) + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, D]."""
        q, k, v = self.qkv(x).split([D, D // self.shared, D // self.shared], -1)
        q, k, v = (part.unflatten(-1, (-1, D // self.heads)).transpose(1, 2) for part in (q, k, v))
        mask = None if self.bias is None else self.bias[self.distance].movedim(-1, 0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.shared > 1)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Window(nn.Module):
    """Attention inside windows of 2 × 2 patches, shifted by one patch or not."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.attention = shift, Attention(bias=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16, D]."""
        grid = x.unflatten(1, (SIDE, SIDE)).roll((-self.shift, -self.shift), (1, 2))
        windows = grid.unflatten(2, (2, 2)).unflatten(1, (2, 2)).transpose(2, 3)  # [B, 2, 2, 2, 2, D]
        mixed = self.attention(windows.flatten(3, 4).flatten(0, 2)).unflatten(0, (-1, 2, 2)).unflatten(3, (2, 2))
        grid = mixed.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return grid.roll((self.shift, self.shift), (1, 2)).flatten(1, 2)


class Linearised(nn.Module):
    """Attention without softmax: φ(q) (φ(k)ᵀ v), normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.out(q @ (k.mT @ v) / (q @ k.sum(1)[..., None]))


class Across(nn.Module):
    """An MLP over the tokens of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIDE * SIDE, 10), nn.Linear(10, SIDE * SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16, D]."""
        return self.down(F.gelu(self.up(x.mT))).mT


class SpatialGate(nn.Module):
    """gMLP: one half of the channels, mixed over the tokens, scales the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.LayerNorm(D), nn.Linear(D, D)
        self.mix = nn.Conv1d(SIDE * SIDE, SIDE * SIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16, D]."""
        scaled, gate = F.gelu(self.up(x)).chunk(2, -1)
        return self.down(scaled * self.mix(self.norm(gate)))


class Fourier(nn.Module):
    """A filter in frequencies: rfft over the grid, times trained complex numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(SIDE, SIDE // 2 + 1, D, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16, D]."""
        found = torch.fft.rfft2(x.unflatten(1, (SIDE, SIDE)), dim=(1, 2))
        changed = torch.fft.irfft2(found * torch.view_as_complex(self.filter), s=(SIDE, SIDE), dim=(1, 2))
        return changed.flatten(1, 2)


class Affine(nn.Module):
    """A scale and a shift for each channel, in place of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        return x * self.scale + self.shift


class Pooled(nn.Module):
    """Tokens, blocks and a head on the class token, or on the mean of all tokens."""

    def __init__(self, *blocks: nn.Module, class_token: bool = False, places: str = "table") -> None:
        super().__init__()
        self.patches, self.blocks, self.head = Patches(places), nn.ModuleList(blocks), nn.Linear(D, 5)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, D)) if class_token else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 16, 16] to [B, 5]."""
        x = self.patches(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1) if self.token is None else x[:, 0])


class Queries(nn.Module):
    """Trained queries, the same for all samples, read a picture by cross attention, as detectors and Perceivers do."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.queries = Patches(), nn.Parameter(torch.randn(3, D))
        self.decoder = nn.TransformerDecoderLayer(D, 2, 12, 0.0, batch_first=True)
        self.boxes = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 16, 16] to [B, 3, 4]."""
        return self.boxes(self.decoder(self.queries.expand(len(x), -1, -1), self.patches(x)))


class Described(nn.Module):
    """Two towers without a loss between samples: cosine of a picture's and a signal's embedding, with a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.signal = (
            Pooled(_block(Attention())),
            nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Flatten()),
        )
        self.project, self.scale = nn.LazyLinear(5), nn.Parameter(torch.tensor(1.0))
        self.project(torch.zeros(1, 6 * 254))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 16, 16] to [B, 1]."""
        pair = self.picture(x), self.project(self.signal(x.flatten(2)))
        return self.scale.exp() * F.cosine_similarity(*pair)[:, None]


def _block(mixer: nn.Module, norm: type[nn.Module] | None = None) -> nn.Module:
    def normed() -> nn.Module:
        return nn.LayerNorm(D) if norm is None else norm()

    mlp = nn.Sequential(normed(), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    return nn.Sequential(Residual(nn.Sequential(normed(), mixer)), Residual(mlp))


class Recurrent(nn.Module):
    """A recurrent layer over the patches of a picture."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.patches, self.rnn, self.head = (
            Patches(),
            kind(D, 6, batch_first=True, bidirectional=True),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 16, 16] to [B, 5]."""
        return self.head(self.rnn(self.patches(x))[0].mean(1))


class Grid(nn.Module):
    """Tokens back to a picture, for what follows with convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16, D] to [B, D, 4, 4]."""
        return x.mT.unflatten(2, (SIDE, SIDE))


class TiedAutoencoder(nn.Module):
    """Decodes with the encoder's weight, past its layer, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.shift = nn.Linear(3 * 16 * 16, 5), nn.Parameter(torch.zeros(3 * 16 * 16))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 16, 16] to [B, 768]."""
        return F.linear(self.encode(x.flatten(1)).tanh(), self.encode.weight.T, self.shift)


NETS = {
    "ViT": lambda: Pooled(_block(Attention()), _block(Attention()), class_token=True),
    "ViT nn.MultiheadAttention": lambda: Pooled(
        nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True), class_token=True
    ),
    "ViT grouped queries": lambda: Pooled(_block(Attention(values_per_query=2), lambda: nn.RMSNorm(D))),
    "ViT relative bias": lambda: Pooled(_block(Attention(bias=SIDE)), places="none"),
    "Swin": lambda: Pooled(_block(Window(0)), _block(Window(1)), places="none"),
    "CoAtNet": lambda: nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), nn.SiLU(), Patches(), _block(Attention(bias=SIDE)), Grid(), classifier(D)
    ),
    "linear attention": lambda: Pooled(_block(Linearised())),
    "MLP-Mixer": lambda: Pooled(_block(Across()), places="none"),
    "ResMLP": lambda: Pooled(_block(Across(), Affine), places="none"),
    "gMLP": lambda: Pooled(_block(SpatialGate())),
    "GFNet": lambda: Pooled(_block(Fourier())),
    "DETR": Queries,
    "two towers": Described,
    "tied autoencoder": TiedAutoencoder,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}
"""{name: how it is built}."""
