"""Units: groups of rows or tokens of a batch (all rows of one user, one packed document) that count as one sample.

Shapes: B rows of the batch, T tokens per row, U units, L tokens of the largest unit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.core.errors import GramianError

MOST = 2**24
"""Exclusive upper bound of unit ids: results have one row for each id from 0 to the largest, so a huge id is an error."""


@dataclass
class Units:
    """Assignment of rows or tokens to units 0 … U-1: `ids` [B] has each row's unit, or [B, T] each token's; `count` is U.

    A unit with fewer tokens than the largest one is padded with zeros, which add nothing to any gradient.
    """

    ids: Tensor
    count: int
    _plans: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sample_ids: Tensor, batch: int) -> "Units":
        """Check `sample_ids` against the batch size; the number of units U is the largest id plus 1.

        Args:
            sample_ids: the unit of each row [B], or of each token of packed rows [B, T]; integers from 0.
            batch: number B of rows.

        Returns:
            The assignment of rows or tokens to units.

        Raises:
            GramianError: for another shape, a dtype that is not an integer, or an id that is negative or not below MOST.
        """
        integers = not sample_ids.is_floating_point() and sample_ids.dtype != torch.bool
        if not integers or sample_ids.dim() not in (1, 2) or sample_ids.shape[0] != batch:
            raise GramianError(
                f"sample_ids: expected integers of shape [{batch}] or [{batch}, T], "
                f"got {sample_ids.dtype} of shape {list(sample_ids.shape)}"
            )
        if sample_ids.numel() and int(sample_ids.min()) < 0:
            raise GramianError(f"sample_ids: expected ids from 0, got {int(sample_ids.min())}")
        if sample_ids.numel() and int(sample_ids.max()) >= MOST:
            raise GramianError(
                f"sample_ids: expected ids below {MOST}, counted within the batch, got {int(sample_ids.max())}"
            )
        return cls(sample_ids, int(sample_ids.max()) + 1 if sample_ids.numel() else 0)

    def sum_rows(self, t_B: Tensor) -> Tensor:
        """Sum the rows of a tensor [B, …] by unit: [U, …]. Raises GramianError if ids are given by token ([B, T])."""
        if self.ids.dim() != 1:
            raise GramianError("sample_ids: tokens of this layer cannot be told apart; expected ids of shape [B]")
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

    def _plan(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if tokens not in self._plans:
            ids = self.ids if self.ids.dim() == 2 else self.ids[:, None].expand(-1, tokens)
            if ids.shape[1] != tokens:
                raise GramianError(
                    f"sample_ids: the layer sees {tokens} tokens per row, the ids have {ids.shape[1]}; "
                    "expected ids of shape [B], or a layer that sees every token once"
                )
            flat = ids.reshape(-1).to(device)
            order = torch.argsort(flat, stable=True)
            counts_U = torch.bincount(flat, minlength=self.count)
            position = torch.arange(flat.numel(), device=device) - (counts_U.cumsum(0) - counts_U)[flat[order]]
            length = int(counts_U.max()) if self.count else 0
            index_UL = torch.zeros(self.count, length, dtype=torch.long, device=device)
            valid_UL = torch.zeros(self.count, length, dtype=torch.bool, device=device)
            index_UL[flat[order], position] = order
            valid_UL[flat[order], position] = True
            self._plans[tokens] = (index_UL, valid_UL)
        return self._plans[tokens]
