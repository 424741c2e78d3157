"""Per-sample gradients of a norm layer's scale, Σ_t g_t ⊙ x̂_t over tokens t: output gradient times normalised input x̂."""

from collections.abc import Callable
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.token_sums import normed_sums
from gramian.linalg.wide import wide
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.summed import Summed


class Normed(Summed):
    """Per-sample gradients Σ_t g_t ⊙ x̂_t of a norm layer's scale, from its inputs and output gradients [B, T, N].

    g_t is the output gradient of token t and x̂_t its normalised input. The products [B, T, N] are formed only if asked for.
    """

    def __init__(
        self,
        inputs_BTN: Tensor,
        gradients_BTN: Tensor,
        shape: tuple[int, ...],
        eps: float,
        centred: bool,
        rounded: bool,
    ) -> None:
        """Store views; nothing is computed.

        Args:
            inputs_BTN: the layer's inputs.
            gradients_BTN: gradients of its outputs.
            shape: shape of the parameter, N elements.
            eps: the layer's ε.
            centred: True if the mean is removed (layer norm), False for root-mean-square norms.
            rounded: True if x̂ is formed in float32 and rounded to the input's dtype (Hugging Face).
        """
        self.inputs_BTN, self.gradients_BTN = inputs_BTN, gradients_BTN
        self.eps, self.centred, self.rounded = eps, centred, rounded
        self.batch, self.shape = inputs_BTN.shape[0], shape
        dtypes = (torch.float32 if rounded else wide(inputs_BTN[:0]).dtype, inputs_BTN.dtype, gradients_BTN.dtype)
        self.dtype = min(dtypes, key=lambda dtype: dtype.itemsize)

    @cached_property
    def tokens_BTN(self) -> Tensor:  # type: ignore[override]
        """Output gradient times normalised input, g_t ⊙ x̂_t, of every token: [B, T, N] in float32 or float64; cached."""
        x = self.inputs_BTN.float() if self.rounded else wide(self.inputs_BTN)
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        hat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return wide(self.gradients_BTN) * (wide(hat.to(self.inputs_BTN.dtype)) if self.rounded else hat)

    def per_sample(self) -> Tensor:
        """Gradient of the scale for every sample, Σ_t (output gradient ⊙ normalised input): [B, *shape].

        On CUDA one kernel computes it without storing the products [B, T, N] (not in float64).
        """
        if self.inputs_BTN.is_cuda and self.inputs_BTN.dtype != torch.float64:
            scale_BN, _ = normed_sums(self.inputs_BTN, self.gradients_BTN, self.eps, self.centred)
            return scale_BN.reshape(self.batch, *self.shape)
        return super().per_sample()

    @property
    def tokens(self) -> int:
        """Number T of tokens per sample."""
        return self.inputs_BTN.shape[1]

    def projected(self, directions: Directions) -> Tensor:
        """Terms ⟨u_k v_kᵀ, g_t ⊙ x̂_t⟩ [B·T, K] of each token, for K directions; their sum is ⟨u_k v_kᵀ, total()⟩."""
        products_BTN = self.mapped(lambda t: t).tokens_BTN
        return Summed(products_BTN, self.shape).projected(directions)

    def tensors(self) -> list[Tensor]:
        """The stored tensors: the layer's inputs and output gradients, both [B, T, N]."""
        return [self.inputs_BTN, self.gradients_BTN]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Normed` with `function` applied to the layer's inputs and to its output gradients."""
        tensors = function(self.inputs_BTN), function(self.gradients_BTN)
        return type(self)(*tensors, self.shape, self.eps, self.centred, self.rounded)
