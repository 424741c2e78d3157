"""What is saved of one product or sum of rows with a weight, and the weight's gradients and tokens that follow from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.taps.gradients import GroupedOuter, GroupedRows, GroupedSum, Outer, PerSampleGradient, Summed
from gramian.taps.gradients.grouped_rows import BITS
from gramian.taps.products.banks import BankPart, BankSides, MatrixSides
from gramian.taps.products.parts import part_of
from gramian.taps.products.sides import Sides
from gramian.taps.sites.products.row_owners import Owners, on_device
from gramian.taps.sites.products.weight_use import WeightUse
from gramian.taps.sites.products.weight_views import WeightView


@dataclass(frozen=True)
class UseLayout:
    """What is needed in the backward of a use beside its saved tensors."""

    view: WeightView
    form: str
    out_first: bool
    columns: bool
    has_groups: bool
    tokens: int
    """Number of rows per sample, 0 if not known: samples may have different numbers."""
    sequence: int
    """Number of tokens of a sample that saved owners count; 0: not known."""
    in_place: bool
    """True if the weight was added in place, so that the observer must be put there in place, too."""
    order: str
    """"samples": the rows of a sample next to each other; "tokens": the first rows of all samples next to each other, then
    the second; "owners": as the saved owners say."""

    def matrix_sides(self, keys: Iterable[str], saved: list[Tensor], g: Tensor, batch: int) -> dict[str, MatrixSides]:
        """Inputs and output gradients by token of each matrix of the weight, from what `save` returned and g.

        `keys`: names of the weight, or of its parts. Waits for the device where samples have different numbers
        of rows: once for all matrices of a stack.
        """
        saved = list(saved)
        groups = saved.pop() if self.has_groups else None
        owners = saved.pop() if self.order == "owners" else None
        if self.form != "product":
            return dict.fromkeys(keys, "its layer adds it to rows, or scales them with it")
        g_RO, a_RI = ((t.squeeze(-1) if self.columns else t).flatten(0, -2) for t in (g, saved[0]))
        layout: Literal["out_in", "in_out"] = "out_in" if self.out_first else "in_out"
        found: dict[str, MatrixSides] = {}
        bank: BankSides | None = None
        for key in keys:
            rows = part_of(key)[1]
            if isinstance(rows, int):
                assert owners is not None and groups is not None
                bank = bank or BankSides.of(
                    a_RI, g_RO, owners, groups, batch, self.view.shape[0], layout, self.sequence
                )
                if bank.ends[rows] < bank.ends[rows + 1]:
                    found[key] = BankPart(bank, rows)
                continue
            here = slice(0, None) if rows is None else rows
            width = a_RI.shape[-1] if layout == "in_out" else g_RO.shape[-1]
            stop = self.view.shape[0] if here.stop is None else here.stop
            end = self.view.first + width
            if here.start >= end or stop <= self.view.first:
                continue
            if groups is not None or here.start < self.view.first or stop > end:
                found[key] = "a product of its layer is with some of its rows"
                continue
            part = slice(here.start - self.view.first, stop - self.view.first)
            a, g_part = (a_RI[:, part], g_RO) if layout == "in_out" else (a_RI, g_RO[:, part])
            if owners is not None:
                found[key] = BankSides.of(
                    a, g_part, owners, torch.zeros_like(owners), batch, 1, layout, self.sequence
                ).part(0)
            else:
                found[key] = Sides(self._by_sample(a, batch), self._by_sample(g_part, batch), layout=layout)
        return found

    def gradient(self, saved: list[Tensor], g: Tensor, batch: int) -> PerSampleGradient:
        """The per-sample gradients of the weight, of its shape, from what `save` returned and the output gradient g."""
        saved = list(saved)
        groups = saved.pop() if self.has_groups else None
        owners = saved.pop() if self.order == "owners" else None
        left = (g.squeeze(-1) if self.columns else g).flatten(0, -2)
        first, shape = self.view.first, self.view.shape
        right: Tensor | None = None
        if self.form == "product":
            x = saved[0].squeeze(-1) if self.columns else saved[0]
            right = x.flatten(0, -2)
        elif self.form == "scale":
            left = left * saved[0].flatten(0, -2)
        if first or (self.out_first and left.shape[-1] != shape[-2 if right is not None else -1]):
            left = F.pad(left, (first, shape[0] - first - left.shape[-1]))
        if right is not None and not self.out_first:
            left, right = right, left
        if owners is None and groups is None:
            left = self._by_sample(left, batch)
            return (
                Summed(left, shape) if right is None else Outer(left, self._by_sample(right, batch), not self.out_first)
            )
        assert owners is not None
        rows = GroupedRows(owners, groups, batch, 1 if groups is None else shape[0])
        if right is None:
            return GroupedSum(left, rows, shape)
        return GroupedOuter(left, right, rows, shape, input_left=not self.out_first)

    def _by_sample(self, rows: Tensor, batch: int) -> Tensor:
        if self.order == "samples":
            return rows.reshape(batch, self.tokens, rows.shape[-1])
        return rows.reshape(self.tokens, batch, rows.shape[-1]).transpose(0, 1)


def save(use: WeightUse, y: Tensor, owners: Owners, batch: int) -> tuple[list[Tensor], UseLayout]:
    """The tensors to save of a use for its backward, and how to read them; y is its result."""
    rows = owners.rows[..., 0] if use.columns else owners.rows
    saved = [] if use.form == "sum" else [use.x.to(y.dtype)]  # as autocast cast it
    order, tokens = "owners", 0
    if owners.fixed and rows.numel() and rows.numel() % batch == 0 and use.groups is None:
        samples, tokens = rows.flatten() >> BITS, rows.numel() // batch
        if torch.equal(samples, torch.arange(batch).repeat_interleave(tokens)):
            order = "samples"
        elif torch.equal(samples, torch.arange(batch).repeat(tokens)):
            order = "tokens"
    if order == "owners":
        saved.append(on_device(rows, use.x.device).flatten())
    if use.groups is not None:
        saved.append(use.groups.flatten())
    return saved, UseLayout(
        use.view,
        use.form,
        use.out_first,
        use.columns,
        use.groups is not None,
        tokens,
        owners.sequence,
        y is use.x,
        order,
    )
