"""Small convolutional networks for pictures [B, 3, 16, 16], one for each way in which published ones are built."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Convolution, GroupNorm and, if `act`, SiLU."""
    layers = [nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.GroupNorm(2, outputs)]
    return nn.Sequential(*layers, *([nn.SiLU()] if act else []))


def classifier(width: int) -> nn.Sequential:
    """Mean over all places, and a linear layer to 5 classes."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Residual(nn.Module):
    """shortcut(x) + inner(x), then `after`."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.shortcut, self.after = inner, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C', H', W']."""
        return self.after(self.shortcut(x) + self.inner(x))


class Squeeze(nn.Module):
    """Squeeze and excitation: channels are scaled by a small network of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(means))))


class Branches(nn.Module):
    """Outputs of several branches, one after the other along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, sum of channels, H', W']."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Shuffle(nn.Module):
    """Half of the channels pass a branch; then both halves interleave."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(conv(half, half, 1), conv(half, half, groups=half, act=False), conv(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        kept, changed = x.chunk(2, 1)
        return torch.stack([kept, self.branch(changed)], 2).flatten(1, 2)


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1, times a trained gain."""

    def __init__(self, inputs: int, outputs: int, size: int = 3) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C', H, W]."""
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, self.gain * (self.weight - mean) / (variance + 1e-4).sqrt(), self.bias, padding=self.padding)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Scaled(nn.Module):
    """A block of ConvNeXt: depthwise 7 × 7, an MLP over the channels, and a scale for each of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        h = self.norm(self.depthwise(x).movedim(1, -1))
        return x + (self.scale * self.down(F.gelu(self.up(h)))).movedim(-1, 1)


class UNet(nn.Module):
    """Down by strides, up by transposed convolutions, with what is as large on the way down beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.deep = conv(3, 8), conv(8, 12, stride=2), conv(12, 16, stride=2)
        self.up, self.upper = nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(24, 8, 4, 2, 1)
        self.masks = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, 2, H, W]."""
        first = self.first(x)
        down = self.down(first)
        h = torch.cat([self.up(self.deep(down)), down], 1)
        return self.masks(torch.cat([self.upper(h), first], 1))


class Pyramid(nn.Module):
    """Feature pyramid: maps of three sizes, each added to the enlarged next, under one head that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 8, stride=2), conv(8, 12, stride=2), conv(12, 16, stride=2)])
        self.sides = nn.ModuleList([nn.Conv2d(width, 8, 1) for width in (8, 12, 16)])
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, 4 × places of all maps]."""
        maps = []
        for stage, side in zip(self.stages, self.sides, strict=True):
            maps.append((side, x := stage(x)))
        above, outputs = torch.zeros(()), []
        for side, features in reversed(maps):
            above = side(features) + (F.interpolate(above, scale_factor=2) if above.dim() else above)
            outputs.append(self.head(above).flatten(1))
        return torch.cat(outputs, 1)


class Dense(nn.Module):
    """A block of DenseNet: every layer takes what all before it made."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([conv(width + growth * k, growth) for k in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C + growth × layers, H, W]."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def _inverted(width: int, act: type[nn.Module], squeeze: bool) -> nn.Module:
    inner = [
        nn.Conv2d(width, 3 * width, 1),
        nn.GroupNorm(2, 3 * width),
        act(),
        conv(3 * width, 3 * width, groups=3 * width),
    ]
    return Residual(
        nn.Sequential(*inner, *([Squeeze(3 * width)] if squeeze else []), conv(3 * width, width, 1, act=False))
    )


def _bottleneck(width: int, groups: int, norm: type[nn.Module] | None = None) -> nn.Module:
    inner = [
        conv(width, width // 2, 1),
        conv(width // 2, width // 2, groups=groups),
        conv(width // 2, width, 1, act=False),
    ]
    return Residual(nn.Sequential(*inner, *([norm(width)] if norm else [])), after=nn.ReLU())


def _pooled(width: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(width, width, 1))


NETS = {
    "VGG": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(200, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
    ),
    "ResNet GroupNorm": lambda: nn.Sequential(
        conv(3, 8),
        Residual(
            nn.Sequential(conv(8, 12, stride=2), conv(12, 12, act=False)), conv(8, 12, 1, 2, act=False), nn.ReLU()
        ),
        classifier(12),
    ),
    "ResNet BatchNorm": lambda: nn.Sequential(conv(3, 8), _bottleneck(8, 1, nn.BatchNorm2d), classifier(8)),
    "ResNet BatchNorm frozen": lambda: nn.Sequential(
        conv(3, 8), _bottleneck(8, 1, nn.BatchNorm2d), classifier(8)
    ).eval(),
    "ResNeXt": lambda: nn.Sequential(conv(3, 16), _bottleneck(16, 4), classifier(16)),
    "DenseNet": lambda: nn.Sequential(conv(3, 8), Dense(8, 4, 3), conv(20, 10, 1), nn.AvgPool2d(2), classifier(10)),
    "Inception": lambda: nn.Sequential(
        conv(3, 8),
        Branches(
            conv(8, 4, 1),
            nn.Sequential(conv(8, 4, 1), conv(4, 6)),
            nn.Sequential(conv(8, 2, 1), conv(2, 4, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(8, 2, 1)),
        ),
        classifier(16),
    ),
    "SqueezeNet": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.ReLU(),
        Branches(nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 3, padding=1)),
        nn.ReLU(),
        nn.Conv2d(12, 5, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "ShuffleNet": lambda: nn.Sequential(conv(3, 8, stride=2), Shuffle(8), Shuffle(8), classifier(8)),
    "MobileNet": lambda: nn.Sequential(conv(3, 8, stride=2), conv(8, 8, groups=8), conv(8, 12, 1), classifier(12)),
    "MobileNet inverted": lambda: nn.Sequential(conv(3, 8, stride=2), _inverted(8, nn.Hardswish, True), classifier(8)),
    "MnasNet": lambda: nn.Sequential(conv(3, 8, stride=2), _inverted(8, nn.ReLU6, False), classifier(8)),
    "EfficientNet": lambda: nn.Sequential(conv(3, 8, stride=2), _inverted(8, nn.SiLU, True), classifier(8)),
    "RegNet": lambda: nn.Sequential(
        conv(3, 16, stride=2),
        Residual(
            nn.Sequential(conv(16, 16, 1), conv(16, 16, groups=4), Squeeze(16), conv(16, 16, 1, act=False)),
            after=nn.ReLU(),
        ),
        classifier(16),
    ),
    "NFNet": lambda: nn.Sequential(
        Standardised(3, 8), Residual(nn.Sequential(nn.SiLU(), Standardised(8, 8))), classifier(8)
    ),
    "RepVGG": lambda: nn.Sequential(
        conv(3, 8), Residual(conv(8, 8, act=False), conv(8, 8, 1, act=False), nn.ReLU()), classifier(8)
    ),
    "ConvNeXt": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        ChannelNorm(8),
        Scaled(8),
        ChannelNorm(8),
        nn.Conv2d(8, 12, 2, 2),
        Scaled(12),
        classifier(12),
    ),
    "ConvMixer": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        nn.GELU(),
        nn.GroupNorm(1, 8),
        Residual(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GELU(), nn.GroupNorm(1, 8))),
        conv(8, 8, 1),
        classifier(8),
    ),
    "PoolFormer": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        Residual(nn.Sequential(nn.GroupNorm(1, 8), _pooled(8))),
        Residual(nn.Sequential(nn.GroupNorm(1, 8), nn.Conv2d(8, 16, 1), nn.GELU(), nn.Conv2d(16, 8, 1))),
        classifier(8),
    ),
    "U-Net": UNet,
    "feature pyramid": Pyramid,
    "DeepLab": lambda: nn.Sequential(
        conv(3, 8),
        Branches(*(nn.Conv2d(8, 4, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(12, 2, 1),
    ),
    "super resolution": lambda: nn.Sequential(
        conv(3, 8), conv(8, 12), nn.PixelShuffle(2), nn.PReLU(3), nn.Conv2d(3, 3, 3, padding=1)
    ),
    "separable 1 × n": lambda: nn.Sequential(
        nn.Conv2d(3, 8, (1, 5), padding=(0, 2)),
        nn.ELU(),
        nn.Conv2d(8, 8, (5, 1), padding=(2, 0)),
        nn.InstanceNorm2d(8, affine=True),
        classifier(8),
    ),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8 * 196, 5)),
    ),
}
"""{name: how it is built}."""
