"""Site of `nn.Linear`, y = x Wᵀ + b, and of Hugging Face `Conv1D`, y = x W + b, for any number of leading axes of x."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.linalg.wide import wide
from gramian.parallel.tensor_parallel import full_tensor
from gramian.taps.gradients import Outer, PerSampleGradient, Summed
from gramian.taps.products.sides import LayerForm, Sides
from gramian.taps.sites.site import Site, SiteRun, first_tensor, tokens, trains
from gramian.taps.sites.site_registry import register_site


class Linear(Site):
    """Site of linear layers: the gradient of the weight is an `Outer`, that of the bias a `Summed`."""

    kind = "linear"

    def __init__(self, transposed: bool = False) -> None:
        """Set the orientation of the stored weight.

        Args:
            transposed: True if the weight is stored as [in, out] (Hugging Face `Conv1D`).
        """
        self.transposed = transposed

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the layer on its input, cast as autocast would; saves that input if the weight trains."""
        x = autocast(first_tensor(args, kwargs))
        return forward(x), [x] if trains(module, "weight") else [], None

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """All axes but the features."""
        return output.dim() - 1

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients, with inputs a_t and output gradients g_t: Σ_t g_t a_tᵀ of the weight, Σ_t g_t of the bias."""
        g_BTO = tokens(output_gradients[0], batch)
        found: dict[str, PerSampleGradient] = {}
        if saved:
            a_BTI = tokens(saved[0], batch)
            found["weight"] = Outer(a_BTI, g_BTO) if self.transposed else Outer(g_BTO, a_BTI)
        if trains(module, "bias"):
            found["bias"] = Summed(g_BTO)
        return found

    def form(self, module: nn.Module) -> LayerForm:
        """Size of the weight as a matrix [out, in], and whether it is stored so ("out_in") or transposed ("in_out")."""
        first, second = module._parameters["weight"].shape  # type: ignore[union-attr]
        return LayerForm("in_out", first, second) if self.transposed else LayerForm("out_in", second, first)

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Inputs [B, T, in], output gradients [B, T, out], and a function that applies the layer to rows of inputs."""

        def outputs(rows_TI: Tensor) -> Tensor:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            matrix = wide(full_tensor(weight.detach()))
            matrix = matrix.mT if self.transposed else matrix
            return F.linear(rows_TI.to(matrix), matrix, None if bias is None else wide(full_tensor(bias.detach())))

        return Sides(tokens(saved[0], batch), tokens(output_gradients[0], batch), outputs=outputs)


def autocast(x: Tensor) -> Tensor:
    """The tensor, cast to the dtype to which the current autocast state would cast an operand of a matrix product."""
    device = x.device.type
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


register_site(nn.Linear, Linear())
register_site("transformers.pytorch_utils.Conv1D", Linear(transposed=True))
