"""Inputs and output gradients of all matrices of a bank (fused experts), by row, in one order for all of them.

Legend: R rows, K of them that count, E matrices, B samples, T tokens.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gramian.taps.gradients.grouped_rows import BITS
from gramian.taps.products.sides import Sides


@dataclass(frozen=True)
class BankSides:
    """Inputs a_r and output gradients g_r of rows; the gradient of matrix e is Σ_r g_r a_rᵀ over its rows r."""

    inputs_RI: Tensor
    gradients_RO: Tensor
    order_K: Tensor
    """Numbers of the rows by matrix, then by sample and token."""
    owners_K: Tensor
    """Of each of these, sample · 2³² + token."""
    ends: tuple[int, ...]
    """[E + 1]: matrix e has the rows `order_K[ends[e] : ends[e + 1]]`."""
    batch: int
    layout: Literal["out_in", "in_out"]
    sequence: int
    """Number of tokens of a sample that owners count; 0: not known."""

    @classmethod
    def of(
        cls,
        inputs_RI: Tensor,
        gradients_RO: Tensor,
        owners_R: Tensor,
        groups_R: Tensor,
        batch: int,
        count: int,
        layout: Literal["out_in", "in_out"],
        sequence: int,
    ) -> "BankSides":
        """The rows of `count` matrices; those of no sample, or of no matrix, are left out. Waits for the device once."""
        counts_R = (owners_R >= 0) & (owners_R < batch << BITS) & (groups_R >= 0) & (groups_R < count)
        groups_R = torch.where(counts_R, groups_R.long(), count)
        by_owner_R = owners_R.argsort(stable=True)
        order_R = by_owner_R[groups_R[by_owner_R].argsort(stable=True)]
        lengths = torch.bincount(groups_R, minlength=count + 1)[:count].tolist()
        ends = (0, *itertools.accumulate(lengths))
        order_K = order_R[: ends[-1]]
        return cls(inputs_RI, gradients_RO, order_K, owners_R[order_K], ends, batch, layout, sequence)

    def only(self, mask_K: Tensor) -> "BankSides":
        """The rows where a mask is True. Waits for the device once."""
        before = torch.cat([mask_K.new_zeros(1, dtype=torch.long), mask_K.cumsum(0)]).tolist()
        ends = tuple(before[end] for end in self.ends)
        return replace(self, order_K=self.order_K[mask_K], owners_K=self.owners_K[mask_K], ends=ends)

    def span(self, number: int) -> tuple[int, int]:
        """(begin, end) of the rows of one matrix."""
        return self.ends[number], self.ends[number + 1]

    def part(self, number: int) -> Sides:
        """The rows of one matrix as tokens [B, T, ·], T the most of a sample, with their positions. Waits for the device."""
        here = slice(*self.span(number))
        rows_K, owners_K = self.order_K[here], self.owners_K[here]
        samples_K, positions_K = owners_K >> BITS, owners_K & ((1 << BITS) - 1)
        counts_B = torch.bincount(samples_K, minlength=self.batch)
        place_K = torch.arange(len(rows_K), device=rows_K.device) - (counts_B.cumsum(0) - counts_B)[samples_K]
        tokens = int(counts_B.max()) if len(rows_K) else 0

        def padded(rows: Tensor) -> Tensor:
            return rows.new_zeros(self.batch, tokens, *rows.shape[1:]).index_put((samples_K, place_K), rows)

        counted_BT = padded(torch.ones_like(samples_K, dtype=torch.bool))
        inputs_BTI, gradients_BTO = padded(self.inputs_RI[rows_K]), padded(self.gradients_RO[rows_K])
        full = None if bool(counted_BT.all()) else counted_BT
        return Sides(
            inputs_BTI,
            gradients_BTO,
            full,
            positions_BT=padded(positions_K),
            sequence=self.sequence or None,
            layout=self.layout,
        )


@dataclass(frozen=True)
class BankPart:
    """One matrix of a bank, in place of its `Sides`."""

    bank: BankSides
    number: int
    recorded = False

    @property
    def layout(self) -> Literal["out_in", "in_out"]:
        """How the matrices were seen to be stored."""
        return self.bank.layout


MatrixSides = Sides | BankPart | str
"""Inputs and output gradients of one matrix in one call, or why a matrix of an assumed form is none."""
