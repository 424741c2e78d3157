"""The gradient of a parameter that is added to every token, or multiplies it by a known factor: Σ_t g_t."""

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
    """g_i = Σ_t g_it, from tokens_BTN. The parameter may have any shape of N elements (norm layers over several axes)."""

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
        """Sum over tokens, never their norm per token. B·T·N additions."""
        return token_sums(self.tokens_BTN).reshape(self.batch, *self.shape)

    def total(self) -> Tensor:
        """Sum over tokens and samples."""
        return wide(self.tokens_BTN).sum((0, 1)).reshape(self.shape)

    def token_squares(self) -> Tensor:
        """Sum of squares over tokens and samples."""
        return wide(self.tokens_BTN).square().sum((0, 1)).reshape(self.shape)

    def magnitude(self) -> Tensor:
        """Σ ‖g_t‖."""
        return wide_norms(self.tokens_BTN).sum()

    def projected(self, directions: Directions) -> Tensor:
        """⟨u_k v_kᵀ, g_t⟩ for every token: [B·T, K]. 2·B·T·K·N FLOPs."""
        tokens = self.tokens_BTN.flatten(0, 1)
        if len(self.shape) != 1:  # products of entries have too many digits for half precision
            tokens = wide(tokens)
        left_MK, right_NK = directions.sides(tokens.dtype)
        return wide_mm(tokens, (left_MK[:, None] * right_NK).flatten(0, 1))

    def regroup(self, units: Units) -> "Summed":
        """Tokens laid out by unit."""
        return Summed(units.gather_tokens(self.tokens_BTN), self.shape, self.dtype)

    def tensors(self) -> list[Tensor]:
        """The tokens."""
        return [self.tokens_BTN]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The sum over tokens, mapped."""
        return type(self)(function(self.tokens_BTN), self.shape, self.dtype)

    @property
    def tokens(self) -> int:
        """T."""
        return self.tokens_BTN.shape[1]

    def squared_norms(self, choice: str = "auto") -> Tensor:
        """Norm of the sum over tokens, squared: [B]."""
        return wide_norms(flat(self.per_sample())).square()

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted sum of the samples' sums."""
        return weighted_sum(flat(self.per_sample()), weights_B, dtype).reshape(self.shape)

    def algorithm(self, choice: str) -> str:
        """There is one way."""
        return "sum"
