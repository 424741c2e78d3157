"""Per-sample gradients that are sums Σ_t g_t of token gradients: of a bias, which is added to every token, or a scale γ."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.kernels.sums.token_sums import token_sums
from gramian.kernels.sums.weighted_sum import weighted_sum
from gramian.linalg.wide import wide, wide_mm, wide_norms
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient, flat
from gramian.taps.units import Units


class Summed(PerSampleGradient):
    """Per-sample gradients g_i = Σ_t tokens_BTN[i, t] over tokens t, of a parameter of N elements in any shape."""

    summed_wide = False

    def __init__(
        self, tokens_BTN: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Store a view of the tokens; nothing is computed.

        Args:
            tokens_BTN: a gradient per token.
            shape: shape of the parameter, [N] if left out.
            dtype: narrowest dtype that the tokens were formed from, if not their own.
        """
        self.tokens_BTN = tokens_BTN
        self.batch = tokens_BTN.shape[0]
        self.shape = (tokens_BTN.shape[2],) if shape is None else shape
        self.dtype = dtype or tokens_BTN.dtype

    def per_sample(self) -> Tensor:
        """The gradients [B, *shape]: the token gradients summed over each sample's tokens. B·T·N additions."""
        return token_sums(self.tokens_BTN).reshape(self.batch, *self.shape)

    def total(self) -> Tensor:
        """Gradient of the batch, of the parameter's shape: the sum over all tokens of all samples."""
        return wide(self.tokens_BTN).sum((0, 1)).reshape(self.shape)

    def token_squares(self) -> Tensor:
        """Σ over all tokens of the squared token gradient, of the parameter's shape."""
        return wide(self.tokens_BTN).square().sum((0, 1)).reshape(self.shape)

    def magnitude(self) -> Tensor:
        """Σ_t ‖g_t‖ over the gradients g_t of all tokens, 0-dim: an upper bound of ‖total()‖."""
        return wide_norms(self.tokens_BTN).sum()

    def projected(self, directions: Directions) -> Tensor:
        """Terms ⟨u_k v_kᵀ, g_t⟩ [B·T, K] of each token's gradient g_t, for K directions; their sum is ⟨u_k v_kᵀ, total()⟩."""
        tokens = self.tokens_BTN.flatten(0, 1)
        if len(self.shape) != 1:  # products of entries have too many digits for half precision
            tokens = wide(tokens)
        left_MK, right_NK = directions.sides(tokens.dtype)
        return wide_mm(tokens, (left_MK[:, None] * right_NK).flatten(0, 1))

    def regroup(self, units: Units) -> "Summed":
        """The gradients of units (groups of rows or tokens): the token gradients [B, T, N] grouped by unit."""
        return Summed(units.gather_tokens(self.tokens_BTN), self.shape, self.dtype)

    def tensors(self) -> list[Tensor]:
        """The one stored tensor: the token gradients [B, T, N]."""
        return [self.tokens_BTN]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Summed` with `function` applied to the token gradients [B, T, N]."""
        return type(self)(function(self.tokens_BTN), self.shape, self.dtype)

    @property
    def tokens(self) -> int:
        """Number T of tokens per sample."""
        return self.tokens_BTN.shape[1]

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """‖Σ_t g_t‖² of every sample: [B], the squared norm of the sum over its tokens; `choice` has no effect."""
        return wide_norms(flat(self.per_sample())).square()

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i, of the parameter's shape in `dtype`, from the samples' token sums g_i."""
        return weighted_sum(flat(self.per_sample()), weights_B, dtype).reshape(self.shape)

    def algorithm(self, choice: str) -> str:
        """Name of the algorithm for squared norms: always "sum", whatever `choice` asks for."""
        return "sum"
