"""Sites of Hugging Face's libraries: two tables of BART and mBART, and the adapter of a raw parameter in `peft`.

The tables are positions y_t = W[t + offset], and scaled tokens y = s·W[x]. The adapter (of a router's or experts' weights)
parametrizes the module that it wraps in each forward, weight + B A, and removes the parametrization afterwards. So neither the
wrapped module nor A and B, whose weights it reads beside them, can be tapped: the adapter runs again as a whole.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramian.taps.gradients import PerSampleGradient
from gramian.taps.products.sides import Sides
from gramian.taps.sites.embedding import Embedding
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site import SiteRun, first_tensor
from gramian.taps.sites.site_registry import register_site


class OffsetPositions(Embedding):
    """Site of `BartLearnedPositionalEmbedding`, which counts the tokens of its input and looks up their positions."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the layer and save the rows of its table: those of `position_ids`, or of every token of its input in turn."""
        given = dict(zip(("input_ids", "past_key_values_length", "position_ids"), args, strict=False)) | kwargs
        index, first = given.get("position_ids"), given.get("past_key_values_length") or 0
        if index is None:
            batch, tokens = first_tensor(args, kwargs).shape[:2]
            index = torch.arange(first, first + tokens, device=module.get_parameter("weight").device).expand(batch, -1)
        else:
            index = index.unsqueeze(0)
        return forward(*args, **kwargs), [index + module.offset], None


class ScaledTokens(Embedding):
    """Site of `BartScaledWordEmbedding`: the gradient of a row is that of its output times the constant `embed_scale`."""

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """The table's per-sample gradients as an `Indexed`, from the output gradients times the scale."""
        return super().gradients(module, saved, [output_gradients[0] * _scale(module)], batch, extra)

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Indices [B, T] and gradients [B, T, D] of the rows that were looked up, before they are scaled."""
        found = super().sides(module, saved, output_gradients, batch)
        return replace(found, gradients_BTO=found.gradients_BTO * _scale(module))


def _scale(module: nn.Module) -> float:
    scale: Any = module.embed_scale
    return float(scale)


for _family, _class in (("bart", "Bart"), ("mbart", "MBart")):
    _module = f"transformers.models.{_family}.modeling_{_family}.{_class}"
    register_site(f"{_module}LearnedPositionalEmbedding", OffsetPositions())
    register_site(f"{_module}ScaledWordEmbedding", ScaledTokens())
register_site("peft.tuners.lora.layer.ParamWrapper", Generic(whole=True))
