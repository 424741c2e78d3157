"""What every kind of cache implements: which columns it stores for a token, and how a signal is encoded and decoded.

Legend: B windows, T tokens, V vocabulary.
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
"""Number of logits (tokens × vocabulary) that are computed at once: 256 MiB of float32."""


class CacheKind(Protocol):
    """One way to store a teacher's signal; `kind_registry.KINDS` lists all of them."""

    @property
    def name(self) -> str:
        """Name of this kind of cache in the manifest, such as "topk"."""

    @property
    def stores_head(self) -> bool:
        """True if the teacher's output head is stored in the cache too."""

    def facts(self, head: Head) -> dict[str, Any]:
        """The settings of this kind as JSON values for the manifest: with teacher and windows they determine all stored bytes.

        Raises:
            GramianError: if an option does not fit the teacher's head.
        """

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns (name, dtype, width) that a cache with the settings `facts` stores for each token."""

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], StorageErrors]:
        """Encode a batch; returns {column: values [B, T, width]}, and the storage errors of these values.

        Without `measure` the errors are empty. `windows_B` are the window numbers, `facts` the settings in the manifest.
        """

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> Signal:
        """Rebuild the signal of a batch from the stored columns, {name: [B, T, width]}.

        `layers` {layer: [B, T, layer width]} are stored residual streams, `facts` the settings in the manifest, and `head` the
        teacher's head, None for a kind that does not store it.
        """

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> StorageErrors:
        """Errors of a signal read from a cache, relative to the live teacher's signal for the same windows (`windows_B`)."""


def wide_head(head: Head) -> Head:
    """A copy of the head in float32, or float64 if it is float64, so that logits have no half-precision rounding.

    Cost: a second copy of V·D numbers if the head is in half precision.
    """
    return head.to(dtype=torch.promote_types(head.weight_VD.dtype, torch.float32))


def logit_pieces(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices that cut `tokens` tokens into parts of at most 2²⁶ logits, `vocabulary` per token."""
    size = max(1, PIECE // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, begin + size)


def vocabulary_of(asked: int | None, head: Head) -> int:
    """The number of token ids of a cache: `asked`, or all ids of the head if it is None.

    Raises a GramianError unless `asked` is between 1 and the number of ids of the head.
    """
    rows = int(head.weight_VD.shape[0])
    if asked is not None and not 1 <= asked <= rows:
        raise GramianError(f"vocabulary: {asked}; expected 1 to the head's {rows}")
    return rows if asked is None else asked
