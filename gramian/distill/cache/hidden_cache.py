"""Caches of final hidden states: the whole distribution at every temperature, for 2·D bytes a token in half precision.

Legend: B windows, T tokens, N tokens together, D width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_kind import pieces, wide
from gramian.distill.cache.layout import Column
from gramian.distill.cache.storage_errors import Errors, added
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import DenseSignal, Signal

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def stored_dtype(dtype: str, head: Head) -> str:
    """The type in which hidden states are stored.

    "auto" is bfloat16 for a head in bfloat16, which is then exact, and float16 else: it rounds eight times finer than bfloat16,
    and what does not fit into it is refused when it is met. "model" is the head's own.

    Raises:
        GramianError: if there is no such type.
    """
    own = str(head.weight_VD.dtype).removeprefix("torch.")
    if dtype == "auto":
        return "bfloat16" if own == "bfloat16" else "float16"
    if dtype == "model":
        return own
    if dtype not in DTYPES:
        raise GramianError(f"dtype: {dtype!r}; expected auto, model, {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True)
class Hidden:
    """Store final hidden states, and the head once."""

    dtype: str = "auto"
    """As of `stored_dtype`."""
    name = "hidden"

    def facts(self, head: Head) -> dict[str, Any]:
        """The type, and the head's own constants."""
        return {
            "width": head.weight_VD.shape[1],
            "vocabulary": head.weight_VD.shape[0],
            "hidden_dtype": stored_dtype(self.dtype, head),
            "scale": head.scale,
            "softcap": head.softcap,
        }

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """One."""
        return (Column("hidden", facts["hidden_dtype"], facts["width"]),)

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], Errors]:
        """Round, and measure what the rounding does to logits.

        With δ = h − rounded(h), |Δz| = |scale · W δ|; a soft cap only makes it smaller, since |tanh'| ≤ 1. Cost of measuring:
        one product with the head, in float32.
        """
        rounded_BTD = signal.hidden_BTD.to(getattr(torch, facts["hidden_dtype"]))
        errors = []
        if measure:
            head = wide(signal.head)
            delta_ND = (signal.hidden_BTD.to(head.weight_VD.dtype) - rounded_BTD.to(head.weight_VD.dtype)).flatten(0, 1)
            for piece in pieces(len(delta_ND), facts["vocabulary"]):
                errors.append(Errors.of({"logit": (delta_ND[piece] @ head.weight_VD.T).abs() * abs(head.scale)}))
        return {"hidden": rounded_BTD}, added(errors)

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> DenseSignal:
        """Hidden states in the type of the head."""
        assert head is not None
        return DenseSignal(stored["hidden"].to(head.weight_VD.dtype), head, layers)

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> Errors:
        """Of logits."""
        assert isinstance(stored, DenseSignal)
        heads = wide(stored.head), wide(live.head)
        found = []
        for piece in pieces(live.hidden_BTD.shape[0] * live.hidden_BTD.shape[1], facts["vocabulary"]):
            one_NV, other_NV = (
                head.logits(signal.hidden_BTD.flatten(0, 1)[piece].to(head.weight_VD.dtype))
                for head, signal in zip(heads, (stored, live), strict=True)
            )
            found.append(Errors.of({"logit": (one_NV - other_NV).abs()}))
        return added(found)
