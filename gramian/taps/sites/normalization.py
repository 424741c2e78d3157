"""Sites of norm layers y = γ ⊙ x̂ + β: the gradients of γ and β are Σ_t g_t ⊙ x̂_t and Σ_t g_t, from output gradients g_t.

The normalised input x̂ is computed again in the backward, in float32 or float64, from the input that autograd saves anyway.
"""

import torch
from torch import Tensor, nn

from gramian.linalg.wide import wide
from gramian.taps.gradients import Normed, PerSampleGradient, Summed
from gramian.taps.sites.site import Site, by_sample, trains
from gramian.taps.sites.site_registry import register_site


class TrailingNorm(Site):
    """Site of `nn.LayerNorm`, `nn.RMSNorm` and Hugging Face RMSNorm classes: statistics over the last axes of each token."""

    kind = "norm"

    def __init__(self, centred: bool, in_float32: bool = False) -> None:
        """Set how the normalised input x̂ is formed.

        Args:
            centred: True if the mean is removed (LayerNorm), False for root-mean-square norms.
            in_float32: True if x̂ is formed in float32 and rounded to the input's dtype, whatever that is (Hugging Face).
        """
        self.centred, self.in_float32 = centred, in_float32

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """All axes but those that are normalised."""
        return output.dim() - len(module._parameters["weight"].shape)  # type: ignore[union-attr]

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: object
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of scale γ (`Normed`) and shift β (`Summed`), if these require a gradient."""
        shape = tuple(module._parameters["weight"].shape)  # type: ignore[union-attr]
        x_BTN, g_BTN = (_trailing_tokens(t, batch, shape) for t in (saved[0], output_gradients[0]))
        found: dict[str, PerSampleGradient] = {}
        if trains(module, "weight"):
            eps = _epsilon(module, saved[0].dtype)
            found["weight"] = Normed(x_BTN, g_BTN, shape, eps, self.centred, self.in_float32)
        if trains(module, "bias"):
            found["bias"] = Summed(g_BTN, shape, _narrowest(*saved, *output_gradients))
        return found


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
        return _channel_gradients(module, hat, g, batch, _narrowest(*saved, *output_gradients))


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
        return _channel_gradients(module, hat, g, batch, _narrowest(*saved, *output_gradients))


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


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    """The norm layer's ε, named `eps` or `variance_epsilon`; if it is None (`nn.RMSNorm`), that of the input's dtype."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(dtype).eps if eps is None else float(eps)


def _trailing_tokens(t: Tensor, batch: int, shape: tuple[int, ...]) -> Tensor:
    """Rows [B·k, …, *shape], k per sample, as [B, T, N] with the N elements of `shape` last."""
    split = by_sample(t, batch)
    count = torch.Size(split.shape[1 : split.dim() - len(shape)]).numel()
    return split.reshape(batch, count, torch.Size(shape).numel())


def _narrowest(*tensors: Tensor) -> torch.dtype:
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
register_site(nn.LayerNorm, TrailingNorm(centred=True))
register_site(nn.RMSNorm, TrailingNorm(centred=False))

HUGGING_FACE_RMS_NORMS = {
    "deepseek_v3": "DeepseekV3RMSNorm",
    "gemma": "GemmaRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "granite": "GraniteRMSNorm",
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "olmo2": "Olmo2RMSNorm",
    "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "smollm3": "SmolLM3RMSNorm",
    "t5": "T5LayerNorm",
}
"""{model family: its RMSNorm class} of classes with the site `TrailingNorm`; classes not listed use the generic site. They
multiply by γ or by 1+γ, which gives the same gradient of γ."""
for _family, _name in HUGGING_FACE_RMS_NORMS.items():
    register_site(
        f"transformers.models.{_family}.modeling_{_family}.{_name}", TrailingNorm(centred=False, in_float32=True)
    )
