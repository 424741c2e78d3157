"""The gradient of a matrix that meets every token: Σ_t l_t r_tᵀ.

Legend: B samples, T tokens, M×N the parameter. `nn.Linear` has l = output gradient and r = input; Hugging Face `Conv1D`,
whose weight is stored transposed, has them the other way round.
"""

from functools import cached_property

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_bmm, wide_dtype, wide_mm, wide_norms
from gramian.plan.norms import Algorithm, choose
from gramian.taps.gradients.base import PerSampleGradient
from gramian.taps.units import Units

GRAM_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative error of a squared norm above which the Gram form is not trusted."""


class Outer(PerSampleGradient):
    """g_i = Σ_t l_it r_itᵀ, from left_BTM and right_BTN."""

    def __init__(self, left_BTM: Tensor, right_BTN: Tensor) -> None:
        """Keep views of both sides; nothing is computed."""
        self.left_BTM, self.right_BTN = left_BTM, right_BTN
        self.batch = left_BTM.shape[0]
        self.shape = (left_BTM.shape[2], right_BTN.shape[2])
        self.dtype = min(left_BTM.dtype, right_BTN.dtype, key=lambda dtype: dtype.itemsize)

    @cached_property
    def left_gram_BTT(self) -> Tensor:
        """L Lᵀ per sample, computed once however many statistics ask. 2·B·T²·M FLOPs."""
        return wide_bmm(self.left_BTM, self.left_BTM.mT)

    @cached_property
    def right_gram_BTT(self) -> Tensor:
        """R Rᵀ per sample, computed once however many statistics ask. 2·B·T²·N FLOPs."""
        return wide_bmm(self.right_BTN, self.right_BTN.mT)

    def per_sample(self) -> Tensor:
        """LᵀR per sample: [B, M, N]. 2·B·T·M·N FLOPs."""
        return wide_bmm(self.left_BTM.mT, self.right_BTN)

    def total(self) -> Tensor:
        """One product over all tokens of all samples. 2·B·T·M·N FLOPs."""
        return wide_mm(self.left_BTM.flatten(0, 1).mT, self.right_BTN.flatten(0, 1))

    def token_squares(self) -> Tensor:
        """(L⊙L)ᵀ(R⊙R): a token's gradient is of rank one, so its square is too. 2·B·T·M·N FLOPs."""
        return wide(self.left_BTM).square().flatten(0, 1).mT @ wide(self.right_BTN).square().flatten(0, 1).to(
            wide_dtype(self.left_BTM)
        )

    def magnitude(self) -> Tensor:
        """Σ ‖l_t‖‖r_t‖."""
        return (wide_norms(self.left_BTM) * wide_norms(self.right_BTN)).sum()

    def select(self, start: int, stop: int) -> "Outer":
        """Samples start … stop-1."""
        return Outer(self.left_BTM[start:stop], self.right_BTN[start:stop])

    def regroup(self, units: Units) -> "Outer":
        """Tokens laid out by unit."""
        return Outer(units.gather_tokens(self.left_BTM), units.gather_tokens(self.right_BTN))

    def copy(self) -> "Outer":
        """Own both sides."""
        return Outer(self.left_BTM.clone(), self.right_BTN.clone())

    def algorithm(self, choice: Algorithm) -> str:
        """Rank one for a single token, else as forced, else the cheaper one."""
        tokens = self.left_BTM.shape[1]
        return choose(tokens, *self.shape) if choice == "auto" or tokens == 1 else choice

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖LᵀR‖² per sample by the algorithm of `self.algorithm(choice)`: [B]."""
        name = self.algorithm(choice)
        if name == "rank1":
            return (wide_norms(self.left_BTM.flatten(1)) * wide_norms(self.right_BTN.flatten(1))).square()
        return self._gram() if name == "gram" else super().squared_norms()

    def _gram(self) -> Tensor:
        """⟨LLᵀ, RRᵀ⟩, and the direct form for samples in which it would cancel.

        Every entry of the two Grams carries an independent rounding error of ε‖x_s‖‖x_t‖, so the sum is off by about
        ε·Σ_t‖l_t‖²‖r_t‖². Where that is not small beside the result (large common activations, output gradients that
        cancel), digits are lost and the sample is done again directly. Cost: 2·B·T²·(M+N) FLOPs, one host check.
        """
        squares_B = (self.left_gram_BTT * self.right_gram_BTT).sum((1, 2))
        diagonal_B = (self.left_gram_BTT.diagonal(dim1=1, dim2=2) * self.right_gram_BTT.diagonal(dim1=1, dim2=2)).sum(1)
        epsilon = torch.finfo(squares_B.dtype).eps
        doubtful_B = 4 * epsilon * diagonal_B > GRAM_TOLERANCE[squares_B.dtype] * squares_B
        if bool(doubtful_B.any()):
            chosen = doubtful_B.nonzero()[:, 0]
            again = Outer(self.left_BTM[chosen], self.right_BTN[chosen])
            squares_B[chosen] = PerSampleGradient.squared_norms(again)
        return squares_B
