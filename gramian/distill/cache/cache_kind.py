"""What every kind of cache implements: which columns it stores, and how a teacher's signal is encoded and decoded.

Legend: B windows, T tokens, V vocabulary, N tokens of a piece.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.cache.layout import Column
from gramian.distill.cache.storage_errors import StorageErrors
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import DenseSignal, Signal

PIECE = 1 << 26
"""Logits that are computed at once: 256 MiB of float32."""


class CacheKind(Protocol):
    """One way to store a signal; `kind_registry.KINDS` lists all of them."""

    @property
    def name(self) -> str:
        """The name in the manifest."""

    @property
    def stores_head(self) -> bool:
        """True if the teacher's head is stored in the cache too."""

    def facts(self, head: Head) -> dict[str, Any]:
        """The settings that, with teacher and windows, decide the bytes of a cache; JSON values for the manifest.

        Raises:
            GramianError: if an option does not fit the head.
        """

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns that are stored for each token."""

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], StorageErrors]:
        """Values [B, T, width] of every column and, with `measure`, their errors relative to the signal."""

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> Signal:
        """The signal, from columns [B, T, width], layers of the residual stream, and the head if it is stored."""

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> StorageErrors:
        """The errors of a signal read from a cache, relative to that of the live teacher."""


def wide_head(head: Head) -> Head:
    """The head in float32 or wider, so that stored values are free of half-precision rounding of logits.

    Cost: a second copy of V·D numbers if the head is in half precision.
    """
    return head.to(dtype=torch.promote_types(head.weight_VD.dtype, torch.float32))


def logit_pieces(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices of tokens whose logits fit into `PIECE`."""
    size = max(1, PIECE // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, begin + size)


def vocabulary_of(asked: int | None, head: Head) -> int:
    """The number of ids of a cache: `asked`, which the head must have, or all of the head."""
    rows = int(head.weight_VD.shape[0])
    if asked is not None and not 1 <= asked <= rows:
        raise GramianError(f"vocabulary: {asked}; expected 1 to the head's {rows}")
    return rows if asked is None else asked
