"""The gradient of a convolution's weight, without unfolding its input.

Samples are folded into the groups of one convolution: with R images, C channels and O outputs in q groups, the weight
gradient of a convolution over [1, R·C, …] with R·q groups *is* the R per-sample gradients. No patch is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.scaled_rows import scaled_rows
from gramian.linalg.wide import wide, wide_norms
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.explicit import ExplicitGradient
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.units import Units


@dataclass(frozen=True)
class Geometry:
    """Shape of the weight [O, C/groups, *kernel] and how it slides."""

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Convolved(PerSampleGradient):
    """g_i of a convolution, from images_BK [B, K, C, …] and output gradients [B, K, O, …]: K images per sample."""

    def __init__(self, images_BK: Tensor, gradients_BK: Tensor, geometry: Geometry) -> None:
        """Store views; nothing is computed."""
        self.images_BK, self.gradients_BK, self.geometry = images_BK, gradients_BK, geometry
        self.batch = images_BK.shape[0]
        self.shape = geometry.weight_shape
        self.dtype = min(images_BK.dtype, gradients_BK.dtype, key=lambda dtype: dtype.itemsize)

    def per_sample(self) -> Tensor:
        """One grouped convolution-backward, then the sum over a sample's K images: [B, *shape]."""
        images, gradients = wide(self.images_BK).flatten(0, 1), wide(self.gradients_BK).flatten(0, 1)
        count = images.shape[0]
        if not count:
            return images.new_zeros(self.batch, *self.shape)
        shape = self.geometry.weight_shape
        return (
            _weight_gradient(
                images.reshape(1, count * images.shape[1], *images.shape[2:]),
                gradients.reshape(1, count * gradients.shape[1], *gradients.shape[2:]),
                replace(
                    self.geometry, weight_shape=(count * shape[0], *shape[1:]), groups=count * self.geometry.groups
                ),
            )
            .reshape(self.batch, -1, *shape)
            .sum(1)
        )

    def total(self) -> Tensor:
        """One ordinary convolution-backward over all images."""
        images, gradients = wide(self.images_BK).flatten(0, 1), wide(self.gradients_BK).flatten(0, 1)
        return _weight_gradient(images, gradients, self.geometry) if images.shape[0] else images.new_zeros(self.shape)

    def token_squares(self) -> Tensor:
        """Not additive over patches without unfolding: the "token" of a convolution is the entire sample."""
        return self.sum_of_squares()

    def magnitude(self) -> Tensor:
        """Σ ‖x‖‖g‖ over images: each position of the kernel sees at most the entire image."""
        taps = float(torch.Size(self.shape[2:]).numel() ** 0.5)
        bound: Tensor = (wide_norms(self.images_BK.flatten(2)) * wide_norms(self.gradients_BK.flatten(2))).sum()
        return taps * bound

    def projected(self, directions: Directions) -> Tensor:
        """⟨x ∗ v_k, Σ_o u_ko g_o⟩ for every image: a convolution with K output channels in each group: [images, K]."""
        images, gradients = wide(self.images_BK).flatten(0, 1), wide(self.gradients_BK).flatten(0, 1)
        left_OK, right_NK = directions.sides(images.dtype)
        if not images.shape[0]:
            return images.new_zeros(0, left_OK.shape[1])
        groups, (outputs, channels, *kernel) = self.geometry.groups, self.shape
        weight = right_NK.mT.reshape(-1, channels, *kernel).repeat(groups, 1, *(1 for _ in kernel))
        slide = (self.geometry.stride, self.geometry.padding, self.geometry.dilation, False, [0] * len(kernel), groups)
        with torch.backends.cudnn.flags(allow_tf32=False):
            along_images = torch.convolution(images, weight, None, *slide)
        by_group = gradients.reshape(len(images), groups, outputs // groups, -1)
        along_outputs = torch.einsum("igop,gok->igkp", by_group, left_OK.reshape(groups, outputs // groups, -1))
        return (along_images.reshape(along_outputs.shape) * along_outputs).sum((1, 3))

    def regroup(self, units: Units) -> ExplicitGradient:
        """Rows summed by unit, written out."""
        return ExplicitGradient(units.sum_rows(self.per_sample()), self.dtype)

    def tensors(self) -> list[Tensor]:
        """Images and gradients."""
        return [self.images_BK, self.gradients_BK]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same convolution on images and gradients, mapped."""
        return type(self)(function(self.images_BK), function(self.gradients_BK), self.geometry)

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """One ordinary convolution-backward, its gradients weighted."""
        weighted = scaled_rows(wide(self.gradients_BK), weights_B)
        return Convolved(self.images_BK, weighted, self.geometry).total().to(dtype)

    def algorithm(self, choice: str) -> str:
        """There is one way."""
        return "grouped convolution"


def _weight_gradient(images: Tensor, gradients: Tensor, geometry: Geometry) -> Tensor:
    weight = images.new_empty(1).expand(geometry.weight_shape)  # only its shape is read
    slide = (geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.stride), geometry.groups)
    with torch.backends.cudnn.flags(allow_tf32=False):  # sums stay in float32
        gradient: Tensor = torch.ops.aten.convolution_backward(
            _restrided(gradients), _restrided(images), weight, None, *slide, [False, True, False]
        )[1]
    return gradient


def _restrided(t: Tensor) -> Tensor:
    """The usual strides on axes of one element, where any are right: PyTorch reads others as channels_last, and fails."""
    return t.view(-1).view(t.shape) if t.is_contiguous() else t
