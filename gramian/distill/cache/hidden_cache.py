"""Caches of final hidden states: the full distribution at every temperature, in 2·D bytes per token in half precision.

Legend: B windows, T tokens, N tokens of which logits are computed at once, D width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_kind import logit_pieces, wide_head
from gramian.distill.cache.layout import Column
from gramian.distill.cache.storage_errors import StorageErrors
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import DenseSignal, Signal

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def stored_dtype(dtype: str, head: Head) -> str:
    """Name of the dtype in which hidden states are stored, for the option `dtype` ("auto", "model", "bf16", "fp16", "fp32").

    "auto" is bfloat16 for a head in bfloat16, which is then exact, and float16 otherwise: float16 rounds eight times finer than
    bfloat16, and values beyond its range raise when they are packed. "model" is the head's dtype. Another option raises.
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
    """Cache that stores the final hidden state of every token, and the teacher's head once.

    Example:
        >>> Hidden("bf16").name
        'hidden'
    """

    dtype: str = "auto"
    """Stored dtype: "bf16", "fp16", "fp32", "model" (that of the head), or "auto" (bfloat16 if the head is, else float16)."""
    name = "hidden"
    stores_head = True

    def facts(self, head: Head) -> dict[str, Any]:
        """Settings for the manifest: width and dtype of the hidden states, and vocabulary, scale and soft cap of the head."""
        return {
            "width": head.weight_VD.shape[1],
            "vocabulary": head.weight_VD.shape[0],
            "hidden_dtype": stored_dtype(self.dtype, head),
            "scale": head.scale,
            "softcap": head.softcap,
        }

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """The single column "hidden": final hidden states."""
        return (Column("hidden", facts["hidden_dtype"], facts["width"]),)

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], StorageErrors]:
        """Round hidden states to the stored dtype; returns {"hidden": [B, T, D]}, and with `measure` the errors of the logits.

        With δ = h − rounded(h) and head W, a logit moves by |scale · W δ|, or less with a soft cap. Cost of measuring: one
        product with the head, in float32.
        """
        rounded_BTD = signal.hidden_BTD.to(getattr(torch, facts["hidden_dtype"]))
        errors = []
        if measure:
            head = wide_head(signal.head)
            delta_ND = (signal.hidden_BTD.to(head.weight_VD.dtype) - rounded_BTD.to(head.weight_VD.dtype)).flatten(0, 1)
            for piece in logit_pieces(len(delta_ND), facts["vocabulary"]):
                logit_NV = (delta_ND[piece] @ head.weight_VD.T).abs() * abs(head.scale)
                errors.append(StorageErrors.of({"logit": logit_NV}))
        return {"hidden": rounded_BTD}, StorageErrors.combined(errors)

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> DenseSignal:
        """The signal of a batch: stored hidden states, converted to the dtype of the head, with the head."""
        assert head is not None
        return DenseSignal(stored["hidden"].to(head.weight_VD.dtype), head, layers)

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> StorageErrors:
        """Absolute differences between the logits from stored hidden states and those of the live teacher."""
        assert isinstance(stored, DenseSignal)
        heads = wide_head(stored.head), wide_head(live.head)
        found = []
        for piece in logit_pieces(live.hidden_BTD.shape[0] * live.hidden_BTD.shape[1], facts["vocabulary"]):
            one_NV, other_NV = (
                head.logits(signal.hidden_BTD.flatten(0, 1)[piece].to(head.weight_VD.dtype))
                for head, signal in zip(heads, (stored, live), strict=True)
            )
            found.append(StorageErrors.of({"logit": (one_NV - other_NV).abs()}))
        return StorageErrors.combined(found)
