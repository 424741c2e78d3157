"""Site of `nn.Conv1d/2d/3d` with any groups, stride, dilation and padding mode; per-sample gradients without unfolding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.parallel.tensor_parallel import full_tensor
from gramian.taps.gradients import Convolved, PerSampleGradient, Summed
from gramian.taps.gradients.convolved import Geometry
from gramian.taps.products.contractions import windows
from gramian.taps.products.parts import SMALL, even_parts, view
from gramian.taps.products.sides import LayerForm, Sides
from gramian.taps.sites.linear import autocast
from gramian.taps.sites.site import Site, SiteRun, by_sample, first_tensor, trains
from gramian.taps.sites.site_registry import register_site


class Convolution(Site):
    """Site of convolutions: the gradient of the weight is a `Convolved`, that of the bias a `Summed` over positions."""

    kind = "conv"

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the layer on its input, cast as autocast would; saves that input if the weight trains.

        Raises:
            GramianError: if the input has no batch axis.
        """
        assert isinstance(module, _ConvNd)
        x = autocast(first_tensor(args, kwargs))
        if x.dim() != len(module.kernel_size) + 2:
            raise GramianError(
                f"saw an input of {x.dim()} axes; expected {len(module.kernel_size) + 2} with the batch first"
            )
        return forward(x), [x] if module.weight.requires_grad else [], None

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of the weight, without unfolding the images, and of the bias, summed over positions."""
        assert isinstance(module, _ConvNd)
        g_BK = by_sample(output_gradients[0], batch)
        found: dict[str, PerSampleGradient] = {}
        if saved:
            images, padding = _padded(module, saved[0])
            geometry = Geometry(tuple(module.weight.shape), module.stride, padding, module.dilation, module.groups)
            found["weight"] = Convolved(by_sample(images, batch), g_BK, geometry)
        if trains(module, "bias"):
            found["bias"] = Summed(_by_position(g_BK))
        return found

    def forms(self, module: nn.Module) -> dict[str, LayerForm]:
        """The matrix [O/groups, channels·kernel size] of each group, which maps patches of its channels, with its bias.

        None for several groups of at most `SMALL` elements (depthwise convolutions), which have exact blocks.
        """
        assert isinstance(module, _ConvNd)
        weights = even_parts("weight", module.out_channels, module.groups)
        biases = even_parts("bias", module.out_channels, module.groups)
        outputs, *rest = module.weight.shape
        inputs = torch.Size(rest).numel()
        if module.groups > 1 and module.weight.numel() <= SMALL * module.groups:
            return {}
        return {
            weight: LayerForm("kernel", inputs, outputs // module.groups, bias)
            for weight, bias in zip(weights, biases, strict=True)
        }

    def matrix_sides(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, Sides | str]:
        """For each group: patches [B, positions, channels·kernel size], output gradients [B, positions, O/groups], layer."""
        assert isinstance(module, _ConvNd)
        images, padding = _padded(module, saved[0])
        g_BTO, names = _by_position(by_sample(output_gradients[0], batch)), [*self.forms(module)]
        found: dict[str, Sides | str] = {}
        for name, x, g in zip(names, images.chunk(module.groups, 1), g_BTO.chunk(module.groups, 2), strict=True):
            rows = windows(x, torch.Size(module.kernel_size), module.stride, padding, module.dilation)
            found[name] = Sides(by_sample(rows, batch).flatten(1, 2), g, outputs=_outputs(module, name))
        return found


def _outputs(module: _ConvNd, weight: str) -> Callable[[Tensor], Tensor]:
    """The function that one group of the layer, whose weight has this name, applies to patches [T, channels·kernel size]."""

    def outputs(rows_TI: Tensor) -> Tensor:
        bias = None if module.bias is None else view(wide(full_tensor(module.bias.detach())), "bias" + weight[6:])
        matrix = view(wide(full_tensor(module.weight.detach())), weight).flatten(1)
        return F.linear(rows_TI.to(matrix), matrix, bias)

    return outputs


def _by_position(g_BK: Tensor) -> Tensor:
    """Output gradients [B, K, O, …] of K images per sample as [B, positions, O], the positions of all K images in a row."""
    positions = torch.Size((g_BK.shape[1], *g_BK.shape[3:])).numel()
    return g_BK.flatten(3).transpose(2, 3).reshape(g_BK.shape[0], positions, g_BK.shape[2])


def _padded(module: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(input, zero padding of each axis still to apply). Padding modes other than "zeros", and "same", are applied here."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, tuple(module.padding)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(module.stride)


for _layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_site(_layer, Convolution())
