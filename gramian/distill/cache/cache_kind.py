"""What every kind of cache can do: say what it stores, make it of a teacher's signal, and read it back.

Legend: B windows, T tokens, V vocabulary, N tokens of a piece.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gramian.distill.cache.layout import Column
from gramian.distill.cache.storage_errors import Errors
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import DenseSignal, Signal

PIECE = 1 << 26
"""Logits that are held together: 256 MiB of float32."""


class Kind(Protocol):
    """Hidden states, the largest logits with a tail, or samples."""

    @property
    def name(self) -> str:
        """As in the manifest."""
        ...

    def facts(self, head: Head) -> dict[str, Any]:
        """What decides the bytes of a cache of this kind, beside teacher and windows; plain values for the manifest.

        Raises:
            GramianError: if an option does not fit the head.
        """
        ...

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """What is stored of a token."""
        ...

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], Errors]:
        """Values [B, T, width] of every column, and how far they are from the signal if that is to be measured."""
        ...

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> Signal:
        """The signal of columns [B, T, width]; the head where one is stored."""
        ...

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> Errors:
        """How far a signal that was read is from a live one."""
        ...


def wide(head: Head) -> Head:
    """The head in float32 or wider: what is stored should not carry the rounding of half-precision logits.

    Cost: a second copy of V·D numbers if the head is in half precision.
    """
    dtype = torch.promote_types(head.weight_VD.dtype, torch.float32)
    bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
    return Head(head.weight_VD.to(dtype), bias_V, head.scale, head.softcap)


def pieces(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices of so many tokens that their logits fit into `PIECE`."""
    size = max(1, PIECE // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, begin + size)
