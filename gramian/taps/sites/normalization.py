"""Sites of norm layers y = γ ⊙ x̂ + β over the last axes: the gradients of γ and β are Σ_t g_t ⊙ x̂_t and Σ_t g_t.

g_t are output gradients of tokens t. The normalised input x̂ is computed again in the backward, in float32 or float64, from the
input that autograd saves anyway.
"""

import torch
from torch import Tensor, nn

from gramian.taps.gradients import Normed, PerSampleGradient, Summed
from gramian.taps.sites.channel_norms import narrowest
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
            found["bias"] = Summed(g_BTN, shape, narrowest(*saved, *output_gradients))
        return found


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    """The norm layer's ε, named `eps` or `variance_epsilon`; if it is None (`nn.RMSNorm`), that of the input's dtype."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(dtype).eps if eps is None else float(eps)


def _trailing_tokens(t: Tensor, batch: int, shape: tuple[int, ...]) -> Tensor:
    """Rows [B·k, …, *shape], k per sample, as [B, T, N] with the N elements of `shape` last."""
    split = by_sample(t, batch)
    count = torch.Size(split.shape[1 : split.dim() - len(shape)]).numel()
    return split.reshape(batch, count, torch.Size(shape).numel())


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
