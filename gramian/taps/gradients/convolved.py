"""Per-sample gradients of a convolution's weight, without copying its input into patches (unfolding).

Samples are folded into the groups of one convolution: with R images, C channels and O outputs in q groups, the weight
gradient of a convolution over [1, R·C, …] with R·q groups *is* the R per-sample gradients. No patch is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.scaled_rows import scaled_rows
from gramian.linalg.wide import exact_convolutions, wide, wide_norms
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.explicit import ExplicitGradient
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.units import Units


@dataclass(frozen=True)
class Geometry:
    """A convolution: the shape [O, C/groups, *kernel] of its weight, its stride, padding, dilation and groups."""

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Convolved(PerSampleGradient):
    """Per-sample gradients of a convolution's weight; each of B samples has K images of C channels, and the layer O outputs."""

    def __init__(self, images_BK: Tensor, gradients_BK: Tensor, geometry: Geometry) -> None:
        """Store images [B, K, C, …] and output gradients [B, K, O, …] as views; nothing is computed."""
        self.images_BK, self.gradients_BK, self.geometry = images_BK, gradients_BK, geometry
        self.batch = images_BK.shape[0]
        self.shape = geometry.weight_shape
        self.dtype = min(images_BK.dtype, gradients_BK.dtype, key=lambda dtype: dtype.itemsize)

    def per_sample(self) -> Tensor:
        """The B weight gradients [B, *shape], each summed over its sample's K images: one grouped convolution-backward."""
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
        """The weight gradient summed over all samples, of the weight's shape: one convolution-backward over all images."""
        images, gradients = wide(self.images_BK).flatten(0, 1), wide(self.gradients_BK).flatten(0, 1)
        return _weight_gradient(images, gradients, self.geometry) if images.shape[0] else images.new_zeros(self.shape)

    def token_squares(self) -> Tensor:
        """Σ_i g_i ⊙ g_i over the samples' gradients g_i: the "token" of a convolution is its entire sample."""
        return self.sum_of_squares()

    def magnitude(self) -> Tensor:
        """Upper bound of ‖total()‖: √(kernel positions) · Σ ‖image‖‖its output gradient‖ over all images, 0-dim."""
        taps = float(torch.Size(self.shape[2:]).numel() ** 0.5)
        bound: Tensor = (wide_norms(self.images_BK.flatten(2)) * wide_norms(self.gradients_BK.flatten(2))).sum()
        return taps * bound

    def projected(self, directions: Directions) -> Tensor:
        """Terms [images, K], one row per image, whose sum is u_kᵀ(Σ_i g_i)v_k for K directions u_k v_kᵀ.

        An image x with output gradients g_o gives ⟨x ∗ v_k, Σ_o u_ko g_o⟩: a convolution with K channels in each group.
        """
        images, gradients = wide(self.images_BK).flatten(0, 1), wide(self.gradients_BK).flatten(0, 1)
        left_OK, right_NK = directions.sides(images.dtype)
        if not images.shape[0]:
            return images.new_zeros(0, left_OK.shape[1])
        groups, (outputs, channels, *kernel) = self.geometry.groups, self.shape
        weight = right_NK.mT.reshape(-1, channels, *kernel).repeat(groups, 1, *(1 for _ in kernel))
        slide = (self.geometry.stride, self.geometry.padding, self.geometry.dilation, False, [0] * len(kernel), groups)
        with exact_convolutions():
            along_images = torch.convolution(images, weight, None, *slide)
        by_group = gradients.reshape(len(images), groups, outputs // groups, -1)
        along_outputs = torch.einsum("igop,gok->igkp", by_group, left_OK.reshape(groups, outputs // groups, -1))
        return (along_images.reshape(along_outputs.shape) * along_outputs).sum((1, 3))

    def regroup(self, units: Units) -> ExplicitGradient:
        """Gradients of units (groups of rows): the per-sample gradients [B, *shape], formed and summed by unit.

        Raises:
            GramianError: if units are groups of tokens.
        """
        return ExplicitGradient(units.sum_rows(self.per_sample()), self.dtype)

    def tensors(self) -> list[Tensor]:
        """The stored tensors: the images [B, K, C, …] and the output gradients [B, K, O, …]."""
        return [self.images_BK, self.gradients_BK]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Convolved` with `function` applied to the images and to the output gradients."""
        return type(self)(function(self.images_BK), function(self.gradients_BK), self.geometry)

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i over samples, in `dtype`: one convolution-backward on weighted output gradients."""
        weighted = scaled_rows(wide(self.gradients_BK), weights_B)
        return Convolved(self.images_BK, weighted, self.geometry).total().to(dtype)

    def algorithm(self, choice: str) -> str:
        """Name of the algorithm for squared norms: always "grouped convolution", whatever `choice` asks for."""
        return "grouped convolution"


def _weight_gradient(images: Tensor, gradients: Tensor, geometry: Geometry) -> Tensor:
    weight = images.new_empty(1).expand(geometry.weight_shape)  # only its shape is read
    slide = (geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.stride), geometry.groups)
    with exact_convolutions():  # sums stay in float32
        gradient: Tensor = torch.ops.aten.convolution_backward(
            _restrided(gradients), _restrided(images), weight, None, *slide, [False, True, False]
        )[1]
    return gradient


def _restrided(t: Tensor) -> Tensor:
    """A contiguous tensor with standard strides on axes of size 1; with others PyTorch assumes channels_last and fails."""
    return t.view(-1).view(t.shape) if t.is_contiguous() else t
