"""The gradient of a stack of matrices [G, M, N], each of which multiplies some of the tokens: fused experts.

Sample b's gradient of matrix g is Σ_r l_r r_rᵀ over the rows r of segment (b, g): R rows in all, any number in each segment.
A single matrix [M, N] is a stack of one, for rows in another order than the samples'.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.norms.ragged_squares import ragged_direct_squares, ragged_gram_squares
from gramian.kernels.sums.ragged_products import ragged_products
from gramian.linalg.wide import wide, wide_norms
from gramian.plan.norm_algorithm import Algorithm, choose
from gramian.taps.gradients.grouped_rows import GroupedRows
from gramian.taps.gradients.outer import cancels
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient
from gramian.taps.units import Units


class GroupedOuter(PerSampleGradient):
    """Per-sample gradients of a stack of matrices [G, M, N], from vectors l and r of rows with samples and groups."""

    def __init__(
        self, left_RM: Tensor, right_RN: Tensor, rows: GroupedRows, shape: tuple[int, ...], input_left: bool = False
    ) -> None:
        """Store the sides; nothing is computed.

        Args:
            left_RM: vectors l.
            right_RN: vectors r.
            rows: sample and group of each.
            shape: [G, M, N], or [M, N] with one group.
            input_left: True if l are the layer's inputs and r its output gradients.
        """
        self.left_RM, self.right_RN, self.rows, self.input_left = left_RM, right_RN, rows, input_left
        self.batch, self.shape = rows.batch, shape
        self.dtype = min(left_RM.dtype, right_RN.dtype, key=lambda dtype: dtype.itemsize)
        self._squares: dict[str, tuple[Tensor, Tensor]] = {}

    def per_sample(self) -> Tensor:
        """The gradient of every sample, [B, *shape], segment by segment. Waits for the device; 2·R·M·N FLOPs."""
        order_R, offsets_S = self.rows.order
        dtype, ends = wide_dtype(self.left_RM, self.right_RN), offsets_S.tolist()
        found_SMN = self.left_RM.new_zeros((len(ends) - 1, *self.shape[-2:]), dtype=dtype)
        for s, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if begin < end:
                left, right = (t[order_R[begin:end]].to(dtype) for t in (self.left_RM, self.right_RN))
                torch.mm(left.mT, right, out=found_SMN[s])
        return found_SMN.reshape(self.batch, *self.shape)

    def total(self) -> Tensor:
        """Gradient summed over samples, of the parameter's shape: a product for each group. 2·R·M·N FLOPs."""
        dtype = wide_dtype(self.left_RM, self.right_RN)
        return self.weighted_total(torch.ones(self.batch, device=self.left_RM.device, dtype=dtype), dtype)

    def token_squares(self) -> Tensor:
        """Σ over all rows of (l_r r_rᵀ) ⊙ (l_r r_rᵀ), of the parameter's shape: as products of squares. 2·R·M·N FLOPs."""
        return self.mapped(lambda t: wide(t).square()).total()

    def magnitude(self) -> Tensor:
        """Σ_r ‖l_r‖‖r_r‖ over all rows, 0-dim: an upper bound of ‖total()‖."""
        return self._energy_R().sum()

    def tensors(self) -> list[Tensor]:
        """The stored sides: left [R, M] and right [R, N]."""
        return [self.left_RM, self.right_RN]

    def fingerprinted(self) -> list[tuple[str | None, Tensor]]:
        """Digests of each sample's inputs and output gradients [B, K, ·], and its number of rows in every group [B, G]."""
        names = ("input", "output gradient") if self.input_left else ("output gradient", "input")
        sides = [(name, self.rows.digests(t)) for name, t in zip(names, self.tensors(), strict=True)]
        return [*sides, ("input", self.rows.counts())]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `GroupedOuter` of the same rows with `function` applied to the sides."""
        return type(self)(function(self.left_RM), function(self.right_RN), self.rows, self.shape, self.input_left)

    def picked(self, samples: Tensor) -> Self:
        """The gradients of some samples, by their numbers [K]. Waits for the device."""
        rows, mask_R = self.rows.of(samples)
        return type(self)(self.left_RM[mask_R], self.right_RN[mask_R], rows, self.shape, self.input_left)

    def select(self, start: int, stop: int) -> Self:
        """The gradients of samples start … stop−1 only. Waits for the device."""
        return self.picked(torch.arange(start, stop, device=self.left_RM.device))

    def regroup(self, units: Units) -> "GroupedOuter":
        """The gradients of units (groups of rows of the batch, or of tokens) instead of samples; the same sides.

        Raises:
            GramianError: if units are groups of tokens, and the layer has other tokens.
        """
        return GroupedOuter(self.left_RM, self.right_RN, self.rows.regrouped(units), self.shape, self.input_left)

    @property
    def tokens(self) -> int:
        """Mean number of rows per sample, rounded up."""
        return -(-self.left_RM.shape[0] // max(self.batch, 1))

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_b c_b g_b over samples with the weights c = `weights_B`, of the parameter's shape in `dtype`. 2·R·M·N FLOPs."""
        return ragged_products(self.left_RM, self.right_RN, *self.rows.order, weights_B, dtype).reshape(self.shape)

    def algorithm(self, choice: Algorithm) -> str:
        """Name of the algorithm for squared norms: `choice`, or for "auto" the cheaper one if segments are equally long."""
        cheaper = choose(-(-self.tokens // self.rows.groups), *self.shape[-2:])
        return choice if choice != "auto" else "direct" if cheaper == "direct" else "gram"

    def squares_by(self, name: str) -> tuple[Tensor, Tensor]:
        """Squared norms [B] by the algorithm of this name, and a mask [B], True where digits are lost because rows cancel."""
        if name not in self._squares:
            if name == "gram":
                squares_S, diagonal_S = ragged_gram_squares(self.left_RM, self.right_RN, *self.rows.order)
            else:
                squares_S = ragged_direct_squares(self.left_RM, self.right_RN, *self.rows.order)
                diagonal_S = self.rows.sums(self._energy_R().square()[:, None])
            squares_B, diagonal_B = (t.reshape(self.batch, self.rows.groups).sum(1) for t in (squares_S, diagonal_S))
            self._squares[name] = squares_B, cancels(squares_B, diagonal_B)
        return self._squares[name]

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖g_b‖² of every sample, [B]: the sum over its segments; formed directly where the Gram form loses digits."""
        squares_B, doubtful_B = self.squares_by(name := self.algorithm(choice))
        if name == "gram" and bool(doubtful_B.any()):
            chosen = doubtful_B.nonzero()[:, 0]
            squares_B = squares_B.index_copy(0, chosen, self.picked(chosen).squares_by("direct")[0])
        return squares_B

    def _energy_R(self) -> Tensor:
        return wide_norms(self.left_RM) * wide_norms(self.right_RN)
