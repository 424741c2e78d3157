"""Rows that belong to samples in any order, and inside a sample to groups: (token, expert) pairs of a mixture of experts.

R rows, B samples, G groups, D features. A segment is the rows of one sample in one group; segment number b·G + g. Each row has
an owner, sample · 2³² + token, which is −1 or behind all samples for rows that count nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.taps.units import Units

BITS = 32
"""Number of bits of an owner that count the token."""


@dataclass(frozen=True)
class GroupedRows:
    """Owner and group of each row, and the order in which the rows of a segment are next to each other."""

    owners_R: Tensor
    groups_R: Tensor | None
    """Group of each row; others than 0 … G−1 count nowhere. None: there is one group."""
    batch: int
    groups: int

    @cached_property
    def samples_R(self) -> Tensor:
        """Sample of each row."""
        return self.owners_R >> BITS

    @cached_property
    def segments_R(self) -> Tensor:
        """Segment of each row; B·G for rows that count nowhere."""
        none = self.batch * self.groups
        if self.groups_R is None:
            return torch.where(self.owners_R < 0, none, self.samples_R)
        groups_R = self.groups_R.long()
        counts = (groups_R >= 0) & (groups_R < self.groups) & (self.owners_R >= 0)
        return torch.where(counts, self.samples_R * self.groups + groups_R, none)

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """Row numbers by segment and token, and the offset [B·G + 1] of each segment among them. Never waits for the device."""
        keys_R = (self.segments_R << BITS) | (self.owners_R & ((1 << BITS) - 1))
        sorted_R, order_R = keys_R.sort(stable=True)
        numbers = torch.arange(self.batch * self.groups + 1, device=sorted_R.device)
        return order_R, torch.searchsorted(sorted_R, numbers << BITS)

    def of(self, samples: Tensor) -> tuple["GroupedRows", Tensor]:
        """The rows of some samples [K] alone, numbered anew 0 … K−1, and a mask [R] of them. Waits for the device."""
        places = self.owners_R.new_full((self.batch + 1,), -1)
        places[samples] = torch.arange(len(samples), device=places.device)
        new_R = places[self.samples_R.clamp(-1, self.batch)]
        mask_R = (new_R >= 0) & (self.owners_R >= 0)
        groups_R = None if self.groups_R is None else self.groups_R[mask_R]
        return GroupedRows(new_R[mask_R] << BITS, groups_R, len(samples), self.groups), mask_R

    def regrouped(self, units: Units) -> "GroupedRows":
        """The same rows, owned by units: by sample, or by token if `units` has an id for each token of a sample.

        Raises:
            GramianError: if the layer has other tokens than the ids.
        """
        ids, counts_R = units.ids.to(self.owners_R.device), (self.owners_R >= 0) & (self.samples_R < self.batch)
        samples_R = self.samples_R.where(counts_R, 0)
        if units.by_token:
            tokens_R = (self.owners_R & ((1 << BITS) - 1)).where(counts_R, 0)
            if len(tokens_R) and int(tokens_R.max()) >= ids.shape[1]:
                raise GramianError(
                    f"{units.field}: the layer sees token {int(tokens_R.max())} of a row, the ids have {ids.shape[1]}; "
                    "expected ids of shape [B], or a layer that sees every token once"
                )
            owners_R = ids[samples_R, tokens_R]
        else:
            owners_R = ids[samples_R]
        return GroupedRows((owners_R.long() << BITS).where(counts_R, -1), self.groups_R, units.count, self.groups)

    def sums(self, rows_RD: Tensor) -> Tensor:
        """Sum of the rows of each segment: [B, G, D], in the dtype of the rows; the same bits in every run."""
        order_R, offsets_S = self.order
        if not rows_RD.numel():
            return rows_RD.new_zeros(self.batch, self.groups, rows_RD.shape[1])
        found: Tensor = torch.segment_reduce(rows_RD[order_R], "sum", offsets=offsets_S, axis=0, unsafe=True, initial=0)
        return found.reshape(self.batch, self.groups, -1)

    def counts(self) -> Tensor:
        """Number of rows of each segment: [B, G]."""
        return self.order[1].diff().reshape(self.batch, self.groups)

    def digests(self, rows_RD: Tensor) -> Tensor:
        """K weighted sums of each sample's rows, [B, K, D], in the rows' dtype; weights depend on a row's place in its sample.

        They change with every row of the sample and with none of another, whatever the number of rows.
        """
        order_R, offsets_S = self.order
        starts_R = offsets_S[: -1 : self.groups][self.samples_R.clamp(0, max(self.batch - 1, 0))[order_R]]
        place_R = (torch.arange(len(order_R), device=order_R.device) - starts_R).double()
        parts = []
        for frequency in (0.37, 1.13, 2.71):
            weighted_RD = torch.zeros_like(rows_RD, dtype=torch.float64)
            weighted_RD[order_R] = torch.cos(place_R * frequency + 0.5)[:, None] * rows_RD[order_R].double()
            parts.append(self.sums(weighted_RD).sum(1))
        return torch.stack(parts, 1).to(rows_RD.dtype)


def all_rows(parts: Sequence[GroupedRows]) -> GroupedRows:
    """The rows of several uses of one parameter, one use after the other."""
    first = parts[0]
    groups = [torch.zeros_like(p.owners_R) if p.groups_R is None else p.groups_R.long() for p in parts]
    owners_R = torch.cat([p.owners_R for p in parts])
    return GroupedRows(owners_R, None if first.groups_R is None else torch.cat(groups), first.batch, first.groups)
