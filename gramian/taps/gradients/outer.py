"""The gradient of a matrix that meets every token: Σ_t l_t r_tᵀ.

Legend: B samples, T tokens, M×N the parameter. `nn.Linear` has l = output gradient and r = input; Hugging Face `Conv1D`,
whose weight is stored transposed, has them the other way round.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares
from gramian.kernels.sums.scaled_rows import scaled_rows
from gramian.kernels.sums.weighted_product import weighted_product
from gramian.linalg.wide import wide, wide_bmm, wide_mm, wide_norms
from gramian.plan.norm_algorithm import Algorithm, choose
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient

GRAM_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Relative error of a squared norm above which the Gram form is not trusted."""


class Outer(PerSampleGradient):
    """g_i = Σ_t l_it r_itᵀ, from left_BTM and right_BTN."""

    def __init__(self, left_BTM: Tensor, right_BTN: Tensor) -> None:
        """Store views of both sides; nothing is computed."""
        self.left_BTM, self.right_BTN = left_BTM, right_BTN
        self._squares: dict[str, Tensor] = {}
        self.batch = left_BTM.shape[0]
        self.shape = (left_BTM.shape[2], right_BTN.shape[2])
        self.dtype = min(left_BTM.dtype, right_BTN.dtype, key=lambda dtype: dtype.itemsize)

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

    def projected(self, directions: Directions) -> Tensor:
        """(l_t·u_k)(r_t·v_k) for every token: [B·T, K]. 2·B·T·K·(M+N) FLOPs."""
        left, right = self.left_BTM.flatten(0, 1), self.right_BTN.flatten(0, 1)
        along_left = wide_mm(left, directions.sides(left.dtype)[0])
        return along_left * wide_mm(right, directions.sides(right.dtype)[1])

    def tensors(self) -> list[Tensor]:
        """Both sides."""
        return [self.left_BTM, self.right_BTN]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The outer products of both sides, mapped."""
        return type(self)(function(self.left_BTM), function(self.right_BTN))

    @property
    def tokens(self) -> int:
        """T."""
        return self.left_BTM.shape[1]

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_b c_b L_bᵀR_b. 2·B·T·M·N FLOPs.

        In half precision every sample's product is weighted in its accumulator: c·R, rounded to half, would not cancel over
        tokens where R does. In float32 and float64 the narrower side is scaled, one pass over it.
        """
        left, right = self.left_BTM, self.right_BTN
        if torch.float16 in (left.dtype, right.dtype) or torch.bfloat16 in (left.dtype, right.dtype):
            return weighted_product(left, right, weights_B, dtype)
        if self.shape[0] < self.shape[1]:
            left = scaled_rows(left, weights_B)
        else:
            right = scaled_rows(right, weights_B)
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        return wide_mm(left.mT, right).to(dtype)

    def algorithm(self, choice: Algorithm) -> str:
        """Rank one for a single token, else as forced, else the cheaper one."""
        tokens = self.left_BTM.shape[1]
        return choose(tokens, *self.shape) if choice == "auto" or tokens == 1 else choice

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖LᵀR‖² per sample by the algorithm of `self.algorithm(choice)`: [B], once however many statistics ask."""
        name = self.algorithm(choice)
        if name not in self._squares:
            self._squares[name] = self._squares_by(name)
        return self._squares[name]

    def _squares_by(self, name: str) -> Tensor:
        if name == "rank1":
            return (wide_norms(self.left_BTM.flatten(1)) * wide_norms(self.right_BTN.flatten(1))).square()
        if name == "direct":
            return direct_squares(self.left_BTM, self.right_BTN)
        squares_B, doubtful_B = gram_of([self])
        if bool(doubtful_B.any()):
            chosen = doubtful_B.nonzero()[:, 0]
            squares_B[chosen] = direct_squares(self.left_BTM[chosen], self.right_BTN[chosen])
        return squares_B


def gram_of(outers: Sequence[Outer]) -> tuple[Tensor, Tensor]:
    """Σ_k ‖L_kᵀR_k‖² of every sample as ⟨LLᵀ, RRᵀ⟩, for gradients that share a side: its Gram is formed once.

    Every entry of the two Grams carries an independent rounding error of ε‖x_s‖‖x_t‖, so the sum is off by about
    ε·Σ_t‖l_t‖²‖r_t‖². Where that is not small beside the result (large common activations, output gradients that cancel),
    digits are lost and the direct form is called for. B·T²·(M+N) FLOPs.

    Args:
        outers: one to four.

    Returns:
        squares [B], and True for samples to be done again directly [B]. Nobody waits for the device.
    """
    first = outers[0]
    if len(outers) > 1 and same_tensor(first.left_BTM, outers[1].left_BTM):
        sides, shared = [outer.right_BTN for outer in outers], first.left_BTM
    else:
        sides, shared = [outer.left_BTM for outer in outers], first.right_BTN
    squares_B, diagonal_B = gram_squares(sides, shared)
    return squares_B, _cancels(squares_B, diagonal_B)


def direct_of(outer: Outer) -> tuple[Tensor, Tensor]:
    """‖LᵀR‖² of every sample by the direct form, and where tokens cancel so much that sums in another order would differ."""
    squares_B = direct_squares(outer.left_BTM, outer.right_BTN)
    diagonal_B = (wide_norms(outer.left_BTM) * wide_norms(outer.right_BTN)).square().sum(1)
    return squares_B, _cancels(squares_B, diagonal_B)


def _cancels(squares_B: Tensor, diagonal_B: Tensor) -> Tensor:
    epsilon = torch.finfo(squares_B.dtype).eps
    return 4 * epsilon * diagonal_B > GRAM_TOLERANCE[squares_B.dtype] * squares_B


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """True for two views of the same memory in the same layout."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
