"""The gradient of a matrix [M, N] that multiplies every token: Σ_t l_t r_tᵀ over the tokens of a sample.

B samples, T tokens. `nn.Linear` has l = output gradient and r = input; Hugging Face `Conv1D`, whose weight is stored
transposed, has them the other way round.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares_of_layers
from gramian.kernels.sums.scaled_rows import scaled_rows
from gramian.kernels.sums.weighted_product import weighted_product, weighted_products
from gramian.linalg.wide import wide, wide_bmm, wide_mm, wide_norms
from gramian.plan.norm_algorithm import Algorithm, choose
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient

GRAM_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""By dtype: relative error of a squared norm above which its Gram form ⟨LLᵀ, RRᵀ⟩ is replaced by the direct ‖LᵀR‖²."""


class Outer(PerSampleGradient):
    """Per-sample gradients g_i = Σ_t l_it r_itᵀ = L_iᵀR_i of a matrix [M, N], from left_BTM (l) and right_BTN (r)."""

    def __init__(self, left_BTM: Tensor, right_BTN: Tensor, input_left: bool | None = None) -> None:
        """Store the vectors l_t [B, T, M] and r_t [B, T, N] of the gradients Σ_t l_t r_tᵀ as views; nothing is computed.

        `input_left`: True if l are inputs of the layer and r its output gradients; False: the other way round; None: not known.
        """
        self.left_BTM, self.right_BTN, self.input_left = left_BTM, right_BTN, input_left
        self._squares: dict[str, Tensor] = {}
        self.batch = left_BTM.shape[0]
        self.shape = (left_BTM.shape[2], right_BTN.shape[2])
        self.dtype = min(left_BTM.dtype, right_BTN.dtype, key=lambda dtype: dtype.itemsize)

    def per_sample(self) -> Tensor:
        """LᵀR of every sample, with L [T, M] and R [T, N] its two sides: [B, M, N]. 2·B·T·M·N FLOPs."""
        return wide_bmm(self.left_BTM.mT, self.right_BTN)

    def total(self) -> Tensor:
        """Gradient summed over samples, [M, N]: one product LᵀR over all tokens of all samples. 2·B·T·M·N FLOPs."""
        return wide_mm(self.left_BTM.flatten(0, 1).mT, self.right_BTN.flatten(0, 1))

    def token_squares(self) -> Tensor:
        """Σ over all tokens of (l_t r_tᵀ) ⊙ (l_t r_tᵀ), [M, N]: as one product (L⊙L)ᵀ(R⊙R). 2·B·T·M·N FLOPs."""
        return wide(self.left_BTM).square().flatten(0, 1).mT @ wide(self.right_BTN).square().flatten(0, 1).to(
            wide_dtype(self.left_BTM)
        )

    def magnitude(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖ over the left and right vectors of all tokens, 0-dim: an upper bound of ‖total()‖."""
        return (wide_norms(self.left_BTM) * wide_norms(self.right_BTN)).sum()

    def projected(self, directions: Directions) -> Tensor:
        """Terms (l_t·u_k)(r_t·v_k) [B·T, K] of each token's vectors l_t, r_t for K directions u_k v_kᵀ.

        Their sum over tokens is u_kᵀ total() v_k.
        """
        left, right = self.left_BTM.flatten(0, 1), self.right_BTN.flatten(0, 1)
        along_left = wide_mm(left, directions.sides(left.dtype)[0])
        return along_left * wide_mm(right, directions.sides(right.dtype)[1])

    def tensors(self) -> list[Tensor]:
        """The stored tensors: left [B, T, M] and right [B, T, N]."""
        return [self.left_BTM, self.right_BTN]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Outer` with `function` applied to the left tensor [B, T, M] and to the right tensor [B, T, N]."""
        return type(self)(function(self.left_BTM), function(self.right_BTN), self.input_left)

    def fingerprinted(self) -> list[tuple[str | None, Tensor]]:
        """The two sides, as input and output gradient if it is known which is which."""
        names = {True: ("input", "output gradient"), False: ("output gradient", "input"), None: (None, None)}
        return list(zip(names[self.input_left], self.tensors(), strict=True))

    @property
    def tokens(self) -> int:
        """Number T of tokens per sample."""
        return self.left_BTM.shape[1]

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i c_i L_iᵀR_i over samples with the weights c = `weights_B`: [M, N] in `dtype`. 2·B·T·M·N FLOPs.

        In half precision every sample's product is weighted in its accumulator: c·R, rounded to half, would not cancel over
        tokens where R does. In float32 and float64 the side with fewer features is scaled, one pass over it.
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
        """Name of the algorithm for squared norms: "rank1" for one token per sample, else `choice`; "auto": the cheaper one."""
        tokens = self.left_BTM.shape[1]
        return choose(tokens, *self.shape) if choice == "auto" or tokens == 1 else choice

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖L_iᵀR_i‖² of every sample: [B], by the algorithm `self.algorithm(choice)`; cached for later calls."""
        name = self.algorithm(choice)
        if name not in self._squares:
            self._squares[name] = self._squares_by(name)
        return self._squares[name]

    def squares_by(self, name: str) -> tuple[Tensor, Tensor]:
        """Squared norms [B] by the algorithm of this name, and a mask [B], True where digits are lost as tokens cancel."""
        if name == "rank1":
            squares_B = (wide_norms(self.left_BTM.flatten(1)) * wide_norms(self.right_BTN.flatten(1))).square()
            return squares_B, torch.zeros_like(squares_B, dtype=torch.bool)
        if name == "direct":
            return direct_of(self)
        squares_KB, doubtful_KB = gram_of([self])
        return squares_KB[0], doubtful_KB[0]

    def _squares_by(self, name: str) -> Tensor:
        if name == "direct":
            return direct_squares(self.left_BTM, self.right_BTN)
        squares_B, doubtful_B = self.squares_by(name)
        if name == "gram" and bool(doubtful_B.any()):
            chosen = doubtful_B.nonzero()[:, 0]
            squares_B[chosen] = direct_squares(self.left_BTM[chosen], self.right_BTN[chosen])
        return squares_B


def gram_of(outers: Sequence[Outer]) -> tuple[Tensor, Tensor]:
    """‖LᵀR‖² of every sample as ⟨LLᵀ, RRᵀ⟩, for gradients whose sides have one layout in all of them.

    Every entry (s, t) of the two Gram matrices has an independent rounding error of ε‖x_s‖‖x_t‖, x = l or r, so the sum has one
    of about ε·Σ_t‖l_t‖²‖r_t‖². If that is not small beside the result (large common activations, output gradients that cancel),
    digits are lost, and the direct form, which forms LᵀR, is needed. B·T²·(M+N) FLOPs each, one kernel launch for all.

    Returns:
        The squared norms [gradients, B], and a mask [gradients, B], True for samples to be computed again by the direct form.
        Does not wait for the device.
    """
    squares_KB, diagonals_KB = gram_squares_of_layers([(outer.left_BTM, outer.right_BTN) for outer in outers])
    return squares_KB, cancels(squares_KB, diagonals_KB)


def direct_of(outer: Outer) -> tuple[Tensor, Tensor]:
    """‖LᵀR‖² of every sample [B], with LᵀR formed, and a mask [B], True if tokens cancel so much that digits are lost."""
    squares_B = direct_squares(outer.left_BTM, outer.right_BTN)
    diagonal_B = (wide_norms(outer.left_BTM) * wide_norms(outer.right_BTN)).square().sum(1)
    return squares_B, cancels(squares_B, diagonal_B)


def cancels(squares_B: Tensor, diagonal_B: Tensor) -> Tensor:
    """Mask, True where rounding of `diagonal_B`, the sum of squared norms of tokens, is not small beside `squares_B`."""
    epsilon = torch.finfo(squares_B.dtype).eps
    return 4 * epsilon * diagonal_B > GRAM_TOLERANCE[squares_B.dtype] * squares_B


def weighted_totals(outers: Sequence[Outer], weights_B: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """`Outer.weighted_total` of several gradients with the same weights, whose sides have one layout in all of them."""
    if len(outers) == 1:
        return [outers[0].weighted_total(weights_B, dtype)]
    lefts, rights = [outer.left_BTM for outer in outers], [outer.right_BTN for outer in outers]
    return weighted_products(lefts, rights, weights_B, dtype)


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """True for two tensors with the same memory address, shape, strides, dtype and device."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
