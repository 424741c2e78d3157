"""Caches of the K largest logits, with a curve for the mass of all other ids (the tail) over a range of temperatures.

Logits are stored relative to the largest one, which does not change the softmax: float16 is then finest where the mass is, with
an error of at most 2⁻¹¹ of the distance from the largest. The tail is l(u) = log Σ exp(u z) over the logits z of the other ids
and its slope l'(u) = Σ z exp(u z) / Σ exp(u z), in float32 at Q values of u = 1/T (knots); `tail_at` interpolates. Without
slopes, or with the normaliser of all ids in place of the tail's, interpolation errors would be ten to a hundred times larger.

Legend: B windows, T tokens, N tokens that are encoded at once, V vocabulary, K stored ids of a token, Q knots.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_kind import logit_pieces, vocabulary_of, wide_head
from gramian.distill.cache.layout import Column, id_type
from gramian.distill.cache.storage_errors import StorageErrors
from gramian.distill.loss.head import Head
from gramian.distill.loss.sparse_tail import tail_at
from gramian.distill.teacher.signal import DenseSignal, Signal, SparseSignal, Tail

FURTHEST = -1e4
"""Lower bound of stored logits, relative to the largest: below it the mass is zero in float32 up to T = 96."""
GONE = -1e30
"""Logit that takes an id out of the tail's sum: stands for −∞, but 0 · z is 0, not NaN."""
BETWEEN = 4
"""Number of values of u = 1/T per interval between knots at which errors are measured."""


@dataclass(frozen=True)
class TopK:
    """Cache that stores the k largest logits of every token, and a curve for the mass of all other ids (the tail).

    Per token: k · (2 or 4 + 2) bytes and 8 for each knot; 304 at the defaults and a vocabulary up to 65,536.

    Example:
        >>> TopK(k=16, temperatures=(1.0, 4.0)).name
        'topk'
    """

    k: int = 64
    knots: int = 6
    temperatures: tuple[float, float] = (1.0, 5.0)
    """Lowest and highest temperature between which the tail's curve is valid."""
    vocabulary: int | None = None
    """Number of token ids; larger ids, such as the padding of a head, are left out. None: all ids of the head."""
    name = "topk"
    stores_head = False

    def facts(self, head: Head) -> dict[str, Any]:
        """Settings for the manifest: vocabulary, k, temperatures, and the knots u = 1/T of the tail's curve.

        Raises a GramianError if k, the knots or the temperatures are out of range.
        """
        vocabulary = vocabulary_of(self.vocabulary, head)
        if not 1 <= self.k <= vocabulary:
            raise GramianError(f"k: {self.k}; expected 1 to the vocabulary of {vocabulary}")
        knots = [] if self.k == vocabulary else place_knots(self.knots, *self.temperatures)
        return {"vocabulary": vocabulary, "k": self.k, "knots": knots, "temperatures": list(self.temperatures)}

    def columns(self, facts: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns "ids" and "logits" and, unless all ids are stored, "tail_values" and "tail_slopes" of the tail curve."""
        largest = (Column("ids", id_type(facts["vocabulary"]), facts["k"]), Column("logits", "float16", facts["k"]))
        count = len(facts["knots"])
        curves = (Column("tail_values", "float32", count), Column("tail_slopes", "float32", count))
        return largest + (curves if count else ())

    def encode(
        self, signal: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any], measure: bool
    ) -> tuple[dict[str, Tensor], StorageErrors]:
        """Select the k largest logits of every token and compute the tail's curve; returns {column: values} and their errors.

        Without `measure` the errors are empty. Cost: the product with the head in float32, and a pass over tokens × vocabulary
        per knot; measuring adds one pass per measured temperature.
        """
        parts: list[dict[str, Tensor]] = []
        errors = []
        for _, shifted_NV in _logits(signal, facts["vocabulary"]):
            largest = shifted_NV.topk(facts["k"])
            part = {"ids": largest.indices, "logits": largest.values.half()}
            tail = None
            if facts["knots"]:
                rest_NV = shifted_NV.scatter(-1, largest.indices, GONE)
                part["tail_values"], part["tail_slopes"] = fit_tail(rest_NV, facts["knots"])
                tail = Tail(part["tail_values"], part["tail_slopes"], torch.tensor(facts["knots"], dtype=torch.float32))
            if measure:
                errors.append(_measured(SparseSignal(part["ids"], part["logits"], tail), shifted_NV))
            parts.append(part)
        B = len(signal.hidden_BTD)
        values = {name: torch.cat([part[name] for part in parts]).unflatten(0, (B, -1)) for name in parts[0]}
        return values, StorageErrors.combined(errors)

    def decode(
        self, stored: Mapping[str, Tensor], layers: Mapping[int, Tensor], facts: Mapping[str, Any], head: Head | None
    ) -> SparseSignal:
        """The signal of a batch: logits in float32, relative to the largest, and the tail curve, with its knots on the CPU."""
        tail = None
        if facts["knots"]:
            tail = Tail(stored["tail_values"], stored["tail_slopes"], torch.tensor(facts["knots"], dtype=torch.float32))
        return SparseSignal(stored["ids"], stored["logits"].float(), tail, layers)

    def compare(self, stored: Signal, live: DenseSignal, windows_B: Tensor, facts: Mapping[str, Any]) -> StorageErrors:
        """Errors of stored logits, log-normaliser and tail mass, relative to the logits of the live teacher."""
        assert isinstance(stored, SparseSignal)
        return StorageErrors.combined(
            _measured(stored.tokens(piece), shifted_NV) for piece, shifted_NV in _logits(live, facts["vocabulary"])
        )


def place_knots(count: int, lowest: float, highest: float) -> list[float]:
    """The points u = 1/T at which the tail curve l(u) = log Σ exp(u z) is stored.

    `count` ascending numbers from 1/highest to 1/lowest temperature, evenly spaced in √u, so closer at high temperatures, where
    l is more curved. Raises if `count` is below 2, or not 0 < lowest < highest < ∞.
    """
    if count < 2:
        raise GramianError(f"knots: {count}; expected at least 2")
    if not 0.0 < lowest < highest < math.inf:
        raise GramianError(f"temperatures: {lowest:g} to {highest:g}; expected two numbers above 0, the lower first")
    begin, end = highest**-0.5, lowest**-0.5
    # As float32, the dtype of the stored knots.
    return [float(torch.tensor((begin + (end - begin) * i / (count - 1)) ** 2)) for i in range(count)]


def fit_tail(rest_NV: Tensor, knots: Sequence[float]) -> tuple[Tensor, Tensor]:
    """l(u) = log Σ exp(u z) over the ids outside the top k and its slope l'(u), [N, Q] each, at the Q knots u = 1/T.

    `rest_NV` are the logits z, with `GONE` for the top k ids, which are stored separately.
    """
    values, slopes = [], []
    for u in knots:
        scaled_NV = rest_NV * u
        values.append(scaled_NV.logsumexp(-1))
        slopes.append((scaled_NV.softmax(-1) * rest_NV).sum(-1))
    return torch.stack(values, -1).float(), torch.stack(slopes, -1).float()


def places_between(knots: Sequence[float]) -> list[float]:
    """The values of u = 1/T at which errors are measured: the knots, and points inside every interval."""
    inside = [a + (b - a) * i / BETWEEN for a, b in zip(knots, knots[1:], strict=False) for i in range(BETWEEN)]
    return [*inside, knots[-1]]


def _logits(signal: DenseSignal, vocabulary: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens, and the logits [N, V] of each slice, relative to each token's largest one."""
    head = wide_head(signal.head)
    hidden_ND = signal.hidden_BTD.flatten(0, 1).to(head.weight_VD.dtype)
    for piece in logit_pieces(len(hidden_ND), head.weight_VD.shape[0]):
        logits_NV = head.logits(hidden_ND[piece])[:, :vocabulary]
        yield piece, (logits_NV - logits_NV.amax(-1, keepdim=True)).clamp(min=FURTHEST)


def _measured(stored: SparseSignal, shifted_NV: Tensor) -> StorageErrors:
    """Errors of stored logits and, at several u = 1/T, of the log-normaliser log Σ exp(u z) and of the tail's mass."""
    exact_NK, stored_NK = shifted_NV.gather(-1, stored.ids_BTK), stored.logits_BTK.to(shifted_NV.dtype)
    found = [StorageErrors.of({"logit": (stored_NK - exact_NK).abs()})]
    if stored.tail is None:
        return found[0]
    rest_NV = shifted_NV.scatter(-1, stored.ids_BTK, GONE)
    for u in places_between(stored.tail.knots_Q.tolist()):
        rest_N, curve_N = (rest_NV * u).logsumexp(-1), tail_at(stored.tail, u)[0]
        all_N = torch.logaddexp((exact_NK * u).logsumexp(-1), rest_N)
        stored_all_N = torch.logaddexp((stored_NK * u).logsumexp(-1), curve_N)
        mass_N, stored_mass_N = (rest_N - all_N).exp(), (curve_N - stored_all_N).exp()
        errors = {"log_normaliser": (stored_all_N - all_N).abs(), "tail_mass": (stored_mass_N - mass_N).abs()}
        found.append(StorageErrors.of(errors))
    return StorageErrors.combined(found)
