"""Sites of norm layers y = γ ⊙ x̂ + β per channel: the gradients of γ and β are Σ_t g_t ⊙ x̂_t and Σ_t g_t over positions t.

g_t are output gradients. The normalised input x̂ is computed again in the backward, in float32 or float64, from the input that
autograd saves anyway.
"""

import torch
from torch import Tensor, nn

from gramian.linalg.wide import wide
from gramian.taps.gradients import PerSampleGradient, Summed
from gramian.taps.sites.site import Site, by_sample, trains
from gramian.taps.sites.site_registry import register_site


class ChannelNorm(Site):
    """Site of `nn.GroupNorm` and `nn.InstanceNorm*d`: statistics over groups of channels of one image, γ and β per channel."""

    kind = "norm"

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: object
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of scale γ and shift β, both as `Summed` over positions, if these require a gradient."""
        x, g = wide(saved[0]), wide(output_gradients[0])
        if isinstance(module, nn.GroupNorm):
            together = torch.Size(x.shape[1:]).numel() // module.num_groups
            hat = _standardise(x.reshape(x.shape[0], module.num_groups, together), module.eps).reshape(x.shape)
        elif module.training or not module.track_running_stats:
            hat = _standardise(x.flatten(2), float(module.eps)).reshape(x.shape)  # type: ignore[arg-type]
        else:
            hat = _running(module, x)
        return _channel_gradients(module, hat, g, batch, narrowest(*saved, *output_gradients))


class BatchNorm(Site):
    """Site of `nn.BatchNorm*d`: in training mode it mixes the samples of a batch and has no per-sample gradient."""

    kind = "norm"

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Error text if the layer uses batch statistics, which mix samples; None if it uses running statistics."""
        if module.training or getattr(module, "running_mean", None) is None:
            return "mixes the samples of a batch, so they have no gradient of their own; expected GroupNorm, or eval()"
        return None

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: object
    ) -> dict[str, PerSampleGradient]:
        """Gradients of scale γ and shift β, split by row, as `Summed` over positions; with batch or running statistics.

        With batch statistics the parts sum to autograd's gradient, but are not gradients of single samples.
        """
        x, g = wide(saved[0]), wide(output_gradients[0])
        if module.training or getattr(module, "running_mean", None) is None:
            hat = _standardise(x.transpose(0, 1).flatten(1), float(module.eps))  # type: ignore[arg-type]
            hat = hat.reshape(x.transpose(0, 1).shape).transpose(0, 1)
        else:
            hat = _running(module, x)
        return _channel_gradients(module, hat, g, batch, narrowest(*saved, *output_gradients))


def _standardise(x: Tensor, eps: float) -> Tensor:
    """`x` with zero mean and unit (biased) variance over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def _running(module: nn.Module, x: Tensor) -> Tensor:
    """`x` [B, C, …] normalised with the module's running mean and variance of each channel."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, variance = (getattr(module, name).to(x.dtype).reshape(shape) for name in ("running_mean", "running_var"))
    hat: Tensor = (x - mean) * torch.rsqrt(variance + float(module.eps))  # type: ignore[arg-type]
    return hat


def narrowest(*tensors: Tensor) -> torch.dtype:
    """The dtype with the fewest bytes of some tensors: it bounds the accuracy of a gradient that is computed from them."""
    return min((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)


def _channel_gradients(
    module: nn.Module, hat: Tensor, g: Tensor, batch: int, dtype: torch.dtype
) -> dict[str, PerSampleGradient]:
    found: dict[str, PerSampleGradient] = {}
    for name, t in (("weight", g * hat), ("bias", g)):
        if trains(module, name):
            split = by_sample(t.flatten(2) if t.dim() > 2 else t[..., None], batch)
            channels, positions = split.shape[2], split.shape[1] * split.shape[3]
            found[name] = Summed(split.transpose(2, 3).reshape(batch, positions, channels), dtype=dtype)
    return found


for _channel_norm in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm):
    register_site(_channel_norm, ChannelNorm())
for _batch_norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
    register_site(_batch_norm, BatchNorm())
