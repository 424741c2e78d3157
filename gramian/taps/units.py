"""Units: groups of rows or tokens of a batch (all rows of one user, one packed document) that count as one sample.

Shapes: B rows of the batch, T tokens per row, U units, L tokens of the largest unit.
"""

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramian.core.errors import GramianError

Result = TypeVar("Result")
MOST = 2**24
"""Exclusive upper bound of unit ids: results have one row for each id from 0 to the largest, so a huge id is an error."""


@dataclass
class Units:
    """Assignment of rows or tokens to units 0 … U-1: `ids` [B] has each row's unit, or [B, T] each token's; `count` is U.

    A unit with fewer tokens than the largest one is padded with zeros, which add nothing to any gradient, unless `ragged`.
    """

    ids: Tensor
    count: int
    padded: bool = False
    """True if the last unit is padding: rows or tokens of no unit, whose gradient must be zero."""
    field: str = "sample_ids"
    """Name of the user's argument that has the ids, for errors."""
    ragged: bool = False
    """True if tokens of a unit are not padded to the largest unit (`gradients.ragged`): memory then grows with tokens alone."""
    _found: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, sample_ids: Tensor, batch: int, *, padding: bool = False, field: str = "sample_ids", ragged: bool = False
    ) -> "Units":
        """Check `sample_ids` against the batch size; the number of units U is the largest id plus 1.

        Args:
            sample_ids: the unit of each row [B], or of each token of packed rows [B, T]; integers from 0.
            batch: number B of rows.
            padding: True to take −1 as well, for padding; it becomes a last unit of its own.
            field: name of the argument in errors.
            ragged: the field `ragged`.

        Returns:
            The assignment of rows or tokens to units.

        Raises:
            GramianError: for another shape, a dtype that is not an integer, or an id that is negative or not below MOST.
        """
        integers = not sample_ids.is_floating_point() and sample_ids.dtype != torch.bool
        if not integers or sample_ids.dim() not in (1, 2) or sample_ids.shape[0] != batch:
            raise GramianError(
                f"{field}: expected integers of shape [{batch}] or [{batch}, T], "
                f"got {sample_ids.dtype} of shape {list(sample_ids.shape)}"
            )
        least = -1 if padding else 0
        if sample_ids.numel() and int(sample_ids.min()) < least:
            raise GramianError(f"{field}: expected ids from {least}, got {int(sample_ids.min())}")
        if sample_ids.numel() and int(sample_ids.max()) >= MOST:
            raise GramianError(
                f"{field}: expected ids below {MOST}, counted within the batch, got {int(sample_ids.max())}"
            )
        count = int(sample_ids.max()) + 1 if sample_ids.numel() else 0
        padded = padding and bool((sample_ids < 0).any())
        ids = torch.where(sample_ids < 0, count, sample_ids) if padded else sample_ids
        return cls(ids, count + padded, padded, field, ragged)

    def of_rows(self, rows: slice) -> "Units":
        """The units of some of the rows, which have no rows outside of them, numbered in the same order from 0."""
        kept = self.ids[rows]
        found, numbers = torch.unique(kept, return_inverse=True)
        padded = self.padded and bool((found == self.count - 1).any())
        return Units(numbers.reshape(kept.shape), len(found), padded, self.field, self.ragged)

    @property
    def by_token(self) -> bool:
        """True if ids are given by token, so that several units may share a row."""
        return self.ids.dim() == 2

    @property
    def share_rows(self) -> bool:
        """True if some row has tokens of several units, padding aside."""
        if not self.by_token or not self.ids.numel():
            return False
        padding_BT = (self.ids == self.count - 1) & self.padded
        highest_B, lowest_B = (
            self.ids.masked_fill(padding_BT, -1).amax(1),
            self.ids.masked_fill(padding_BT, MOST).amin(1),
        )
        return bool((highest_B > lowest_B).any())

    def sum_rows(self, t_B: Tensor) -> Tensor:
        """Sum the rows of a tensor [B, …] by unit: [U, …]. Raises GramianError if ids are given by token ([B, T])."""
        if self.by_token:
            raise GramianError(f"{self.field}: tokens of this layer cannot be told apart; expected ids of shape [B]")
        return t_B.new_zeros(self.count, *t_B.shape[1:]).index_add_(0, self.ids.to(t_B.device), t_B)

    def gather_tokens(self, t_BT: Tensor) -> Tensor:
        """Group the tokens of a tensor [B, T, …] by unit: [U, L, …], with zeros where a unit has fewer than L tokens.

        Raises:
            GramianError: if ids are given by token ([B, T]) and the tensor has another number of tokens per row.
        """
        batch, tokens = t_BT.shape[:2]
        index_UL, valid_UL = self._plan(tokens, t_BT.device)
        out = t_BT.reshape(batch * tokens, *t_BT.shape[2:])[index_UL]
        return out * valid_UL.reshape(*valid_UL.shape, *[1] * (out.dim() - 2)).to(out.dtype)

    def of_tokens(self, tokens: int) -> Tensor:
        """The unit of each of the `tokens` tokens of each row, [B, `tokens`].

        Raises:
            GramianError: if ids are given by token, for another number of tokens per row.
        """
        ids = self.ids if self.by_token else self.ids[:, None].expand(-1, tokens)
        if ids.shape[1] != tokens:
            raise GramianError(
                f"{self.field}: the layer sees {tokens} tokens per row, the ids have {ids.shape[1]}; "
                "expected ids of shape [B], or a layer that sees every token once"
            )
        return ids

    def cached(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """`make()`, called once for each `key`: layers of as many tokens share what follows from the ids."""
        if key not in self._found:
            self._found[key] = make()
        found: Result = self._found[key]
        return found

    def _plan(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor]:
            flat = self.of_tokens(tokens).reshape(-1).to(device)
            order = torch.argsort(flat, stable=True)
            counts_U = torch.bincount(flat, minlength=self.count)
            position = torch.arange(flat.numel(), device=device) - (counts_U.cumsum(0) - counts_U)[flat[order]]
            length = int(counts_U.max()) if self.count else 0
            index_UL = torch.zeros(self.count, length, dtype=torch.long, device=device)
            valid_UL = torch.zeros(self.count, length, dtype=torch.bool, device=device)
            index_UL[flat[order], position] = order
            valid_UL[flat[order], position] = True
            return index_UL, valid_UL

        return self.cached(("padded", tokens, device), make)
