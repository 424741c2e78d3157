"""Caches of samples: an unbiased estimate of the teacher at one temperature, in few bytes per token.

n ids are drawn from p = softmax(logits / T) by systematic sampling: with one U in [0, 1) per token, the points (j + U) / n, j <
n, are looked up in the cumulative distribution. Each point is uniform on its interval, so E[count_i] = n p_i and the weights
count_i / n are unbiased; a count is the floor or the ceiling of n p_i, so their variance is at most that of independent draws.
U is a function of (seed, window, position), independent of processes and batches.

Legend: B windows, T tokens, N tokens that are drawn at once, V vocabulary, K draws of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_uniforms
from gramian.distill.cache.cache_kind import logit_pieces, vocabulary_of, wide_head
from gramian.distill.cache.layout import Column, id_type
from gramian.distill.cache.storage_errors import StorageErrors
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import DenseSignal, SampledSignal, Signal

MOST_DRAWS = 65_535


@dataclass(frozen=True)
class Samples:
    """Cache that stores, for every token, distinct ids drawn from the teacher, and how often each was drawn.

    Per token: draws · (2 or 4 + 1) bytes; 36 at the defaults and a vocabulary up to 65,536.

    Example:
        >>> Samples(draws=24, temperature=2.0).name
        'sampled'
    """

    draws: int = 12
    temperature: float = 1.0
    seed: int = 0
    vocabulary: int | None = None
    """Number of token ids; larger ids of the head are never drawn. None: all ids of the head."""
    name = "sampled"
    stores_head = False

    def facts(self, head: Head) -> dict[str, Any]:
        """Settings for the manifest: vocabulary, draws, temperature and seed; raises if a number is out of range."""
        if not 1 <= self.draws <= MOST_DRAWS:
            raise GramianError(f"draws: {self.draws}; expected 1 to {MOST_DRAWS}")
        if not 0.0 < self.temperature < float("inf"):
            raise GramianError(f"temperature: {self.temperature:g}; expected a number above 0")
        vocabulary = vocabulary_of(self.vocabulary, head)
        return {
            "vocabulary": vocabulary,
            "draws": self.draws,
            "temperatures": [self.temperature, self.temperature],
            "seed": self.seed,
        }

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns "ids" (the drawn ids) and "counts" (how often each was drawn)."""
        counts = "uint8" if facts["draws"] < 2**8 else "uint16"
        return (Column("ids", id_type(facts["vocabulary"]), facts["draws"]), Column("counts", counts, facts["draws"]))

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], StorageErrors]:
        """Draw ids for every token; returns {"ids", "counts": [B, T, draws]}, and empty errors, also with `measure`.

        Raises a GramianError if logits are NaN. Cost: a product with the head, and a cumulative sum in float64.
        """
        head = wide_head(signal.head)
        B, T, _ = signal.hidden_BTD.shape
        hidden_ND = signal.hidden_BTD.flatten(0, 1).to(head.weight_VD.dtype)
        uniform_N = token_uniforms(facts["seed"], windows_B.to(hidden_ND.device), T).flatten()
        ids, counts = [], []
        for piece in logit_pieces(B * T, head.weight_VD.shape[0]):
            logits_NV = head.logits(hidden_ND[piece])[:, : facts["vocabulary"]]
            if bool(logits_NV.isnan().any()):  # draws from NaN would be valid ids
                raise GramianError("cache: logits are not a number; expected a teacher without NaN")
            found = draw((logits_NV.double() / facts["temperatures"][0]).softmax(-1), uniform_N[piece], facts["draws"])
            ids.append(found[0])
            counts.append(found[1])
        return {"ids": torch.cat(ids).view(B, T, -1), "counts": torch.cat(counts).view(B, T, -1)}, StorageErrors()

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> SampledSignal:
        """The signal of a batch: drawn ids, and weights count / draws in float32; unused positions have id 0 and weight 0."""
        return SampledSignal(stored["ids"], stored["counts"].float() / facts["draws"], facts["temperatures"][0], layers)

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> StorageErrors:
        """The error "drawn" of each token: the fraction of its draws that fall on other ids if the live teacher draws again."""
        assert isinstance(stored, SampledSignal)
        values, _ = self.encode(live, windows_B, facts, False)
        again = self.decode(values, {}, facts, None)
        moved_BT = torch.zeros_like(stored.weights_BTK[..., 0])
        for one, other in ((stored, again), (again, stored)):
            same_BTKK = one.ids_BTK.unsqueeze(-1) == other.ids_BTK.unsqueeze(-2)
            there_BTK = (same_BTKK * other.weights_BTK.unsqueeze(-2)).sum(-1)
            moved_BT += (one.weights_BTK - there_BTK).clamp(min=0.0).sum(-1) / 2
        return StorageErrors.of({"drawn": moved_BT})


def draw(p_NV: Tensor, uniform_N: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Draw `draws` ids per token from probabilities p [N, V] by systematic sampling with one uniform number per token.

    Returns the distinct ids in ascending order and their counts, both [N, draws], padded with zeros.
    """
    edges_NV = p_NV.cumsum(-1)
    points_NK = (torch.arange(draws, device=p_NV.device, dtype=p_NV.dtype) + uniform_N.to(p_NV.dtype)[:, None]) / draws
    # Scaled to the rounded total; right=True, so that an id without mass is never drawn.
    found_NK = torch.searchsorted(edges_NV, points_NK * edges_NV[:, -1:], right=True).clamp(max=p_NV.shape[1] - 1)
    begins_NK = torch.ones_like(found_NK, dtype=torch.bool)
    begins_NK[:, 1:] = found_NK[:, 1:] != found_NK[:, :-1]
    place_NK = begins_NK.long().cumsum(-1) - 1
    zeros_NK = torch.zeros_like(found_NK)
    return zeros_NK.scatter(-1, place_NK, found_NK), zeros_NK.scatter_add(-1, place_NK, torch.ones_like(found_NK))
