"""The sum of the per-sample gradients of several uses of one parameter (tied weights, a module called twice).

With g_k the gradient of use k, ‖Σ_k g_k‖² = Σ_k ‖g_k‖² + 2 Σ_{j<k} ⟨g_j, g_k⟩. Uses of the same form (two linear layers) are
concatenated along their tokens, so that no inner product has to be computed. For an embedding [V, D] tied to a linear head an
inner product costs 2·T²·D FLOPs per sample, and no gradient [V, D] is formed.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Self

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_bmm, wide_mm
from gramian.plan.norm_algorithm import Algorithm
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.grouped_indexed import GroupedIndexed
from gramian.taps.gradients.grouped_outer import GroupedOuter
from gramian.taps.gradients.grouped_rows import all_rows
from gramian.taps.gradients.grouped_sum import GroupedSum
from gramian.taps.gradients.indexed import Indexed
from gramian.taps.gradients.outer import Outer
from gramian.taps.gradients.per_sample_gradient import PerSampleGradient, flat
from gramian.taps.gradients.summed import Summed
from gramian.taps.units import Units

CANCELLED = 1e-2
"""If the squared norm of a sum of uses is below this fraction of the sum of the uses' squared norms, it is computed again from
the explicitly formed gradient."""


def join(parts: Sequence[PerSampleGradient]) -> PerSampleGradient:
    """One per-sample gradient for all uses (`parts`) of a parameter in one backward: a `Joined`, or their one common form."""
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    rows = [part for part in parts if isinstance(part, Indexed)]
    sums = [part for part in parts if isinstance(part, Summed)]
    known = Outer | Indexed | Summed | GroupedOuter | GroupedSum | GroupedIndexed
    merged = [part for part in parts if not isinstance(part, known)]
    stacks = [part for part in parts if isinstance(part, GroupedOuter)]
    vectors = [part for part in parts if isinstance(part, GroupedSum)]
    lookups = [part for part in parts if isinstance(part, GroupedIndexed)]
    if len(lookups) > 1:
        index_R, rows_RD = _cat([p.index_R for p in lookups], 0), _cat([p.rows_RD for p in lookups], 0)
        merged.append(GroupedIndexed(index_R, rows_RD, all_rows([p.rows for p in lookups]), lookups[0].shape[0]))
    if len(stacks) > 1:
        sides = _cat([p.left_RM for p in stacks], 0), _cat([p.right_RN for p in stacks], 0)
        merged.append(GroupedOuter(*sides, all_rows([p.rows for p in stacks]), stacks[0].shape, stacks[0].input_left))
    if len(vectors) > 1:
        rows_RN = _cat([p.rows_RN for p in vectors], 0)
        dtype = min((p.dtype for p in vectors), key=lambda dtype: dtype.itemsize)
        merged.append(GroupedSum(rows_RN, all_rows([p.rows for p in vectors]), vectors[0].shape, dtype))
    merged += [part for alike in (lookups, stacks, vectors) if len(alike) == 1 for part in alike]
    if len(outers) > 1:
        sides = _cat([p.left_BTM for p in outers]), _cat([p.right_BTN for p in outers])
        outers = [Outer(*sides, outers[0].input_left)]
    if len(rows) > 1:
        rows = [Indexed(_cat([p.index_BT for p in rows]), _cat([p.rows_BTD for p in rows]), rows[0].shape[0])]
    if len(sums) > 1:
        dtype = min((p.dtype for p in sums), key=lambda dtype: dtype.itemsize)
        sums = [Summed(_cat([p.tokens_BTN for p in sums]), sums[0].shape, dtype)]
    merged += [*outers, *rows, *sums]
    return merged[0] if len(merged) == 1 else Joined(merged)


class Joined(PerSampleGradient):
    """Per-sample gradients of a parameter whose uses have different forms: the sum of the uses' gradients, sample by sample."""

    def __init__(self, parts: Sequence[PerSampleGradient]) -> None:
        """Store the per-sample gradients of the uses (`parts`), all of one parameter and one batch."""
        self.parts = list(parts)
        self.batch, self.shape = parts[0].batch, parts[0].shape
        self.dtype = min((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        self.summed_wide = all(part.summed_wide for part in parts)

    def per_sample(self) -> Tensor:
        """The gradients [B, *shape]: the gradients of all uses, formed and summed sample by sample."""
        return torch.stack([part.per_sample() for part in self.parts]).sum(0)

    def total(self) -> Tensor:
        """Gradient summed over samples, of the parameter's shape: the sum of the uses' totals."""
        return _added(part.total() for part in self.parts)

    def token_squares(self) -> Tensor:
        """Σ over tokens of the squared gradient of a single token; every use of a token counts as a token of its own."""
        return _added(part.token_squares() for part in self.parts)

    def magnitude(self) -> Tensor:
        """Sum of the uses' upper bounds `magnitude()`, 0-dim: an upper bound of ‖total()‖."""
        return torch.stack([part.magnitude() for part in self.parts]).sum()

    def projected(self, directions: Directions) -> Tensor:
        """The projected terms [terms, K] of all uses on K directions, concatenated; their sum is the total's projection."""
        return torch.cat([part.projected(directions) for part in self.parts])

    def regroup(self, units: Units) -> PerSampleGradient:
        """The gradients of units (groups of rows or tokens) instead of rows: each use is regrouped by itself."""
        return Joined([part.regroup(units) for part in self.parts])

    def tensors(self) -> list[Tensor]:
        """The stored tensors of all uses, in one list."""
        return [t for part in self.parts for t in part.tensors()]

    def fingerprinted(self) -> list[tuple[str | None, Tensor]]:
        """What a row proof compares of all uses, in one list."""
        return [one for part in self.parts for one in part.fingerprinted()]

    def picked(self, samples: Tensor) -> Self:
        """The gradients of some samples, by their numbers [K], of every use."""
        return type(self)([part.picked(samples) for part in self.parts])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new `Joined` of the same uses with `function` applied to every tensor that a use stores."""
        return type(self)([part.mapped(function) for part in self.parts])

    def select(self, start: int, stop: int) -> Self:
        """The gradients of samples start … stop−1 only, of every use."""
        return type(self)([part.select(start, stop) for part in self.parts])

    @property
    def tokens(self) -> int:
        """Largest number of tokens per sample among the uses."""
        return max(part.tokens for part in self.parts)

    def weighted_total(self, weights_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i weights_B[i] · g_i: the uses' weighted totals added in float32 (float64 if a tensor is), then cast to `dtype`."""
        wide = torch.float64 if torch.float64 in (t.dtype for t in self.tensors()) else torch.float32
        return _added(part.weighted_total(weights_B, wide) for part in self.parts).to(dtype)

    def algorithm(self, choice: Algorithm) -> str:
        """Text that names the uses' norm algorithms and "cross" (inner products), joined by " + "; "direct" if `choice` is."""
        return (
            "direct" if choice == "direct" else " + ".join(part.algorithm(choice) for part in self.parts) + " + cross"
        )

    def squared_norms(self, choice: Algorithm = "auto") -> Tensor:
        """‖g_i‖² of every sample: [B]. Squared norms of the uses plus twice their inner products.

        With `choice` "direct", from the explicitly formed gradients.
        """
        if choice == "direct":
            return super().squared_norms()
        squares_B, doubtful_B = self.squares(choice)
        if bool(doubtful_B.any()):
            chosen = doubtful_B.nonzero()[:, 0]
            squares_B[chosen] = self.exact_squares(chosen)
        return squares_B

    def squares(self, choice: Algorithm = "auto") -> tuple[Tensor, Tensor]:
        """Squared norms [B], and a mask [B], True where digits may be lost (`exact_squares`). Does not wait for the device."""
        doubts, apart = [], []
        for part in self.parts:
            if isinstance(part, Outer | GroupedOuter):
                squares_B, doubtful_B = part.squares_by(part.algorithm(choice))
                doubts.append(doubtful_B)
                apart.append(squares_B)
            else:
                apart.append(part.squared_norms(choice))
        apart_B = torch.stack(apart).sum(0)
        squares_B = apart_B + 2 * sum(inner(left, right) for left, right in combinations(self.parts, 2))
        return squares_B, torch.stack([squares_B < CANCELLED * apart_B, *doubts]).any(0)

    def exact_squares(self, samples: Tensor) -> Tensor:
        """Squared norms of some samples [K], by their numbers, from their formed gradients, one at a time."""
        return torch.cat([super(Joined, self.select(i, i + 1)).squared_norms() for i in samples.tolist()])


def _added(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape that nobody else has, into the first: of a vocabulary's table no third one is made."""
    return functools.reduce(Tensor.add_, tensors)


def inner(left: PerSampleGradient, right: PerSampleGradient) -> Tensor:
    """Inner product ⟨g_i, h_i⟩ of sample i's gradients g_i in `left` and h_i in `right`, of one parameter: [B].

    Linear head (Σ_t l_t r_tᵀ) with an embedding (S lookups x_s, output gradients δ_s): Σ_s δ_s · Σ_t l_t[x_s] r_t, 2·B·T·S·D
    FLOPs and two buffers [B, S, ·]. The gradients of any other pair are formed, a chunk of samples at a time.
    """
    if isinstance(left, Outer) and isinstance(right, Indexed):
        index_BTS = right.index_BT[:, None, :].expand(-1, left.left_BTM.shape[1], -1)
        picked_BTS = left.left_BTM.gather(2, index_BTS)
        return (wide_bmm(picked_BTS.mT, left.right_BTN) * wide(right.rows_BTD)).sum((1, 2))
    if isinstance(left, GroupedOuter) and isinstance(right, GroupedIndexed) and len(left.shape) == 2:
        return _inner_of_segments(left, right)
    if isinstance(left, Indexed | GroupedIndexed) and isinstance(right, Outer | GroupedOuter):
        return inner(right, left)
    pairs = zip(left.chunks(), right.chunks(), strict=True)
    return torch.cat([flat(a.per_sample() * b.per_sample()).sum(1) for a, b in pairs])


def _inner_of_segments(left: GroupedOuter, right: GroupedIndexed) -> Tensor:
    """`inner` of a linear head with an embedding, one sample at a time, as their lengths differ. Waits for the device."""
    (order_R, offsets_S), (order_P, offsets_Q) = left.rows.order, right.rows.order
    ends_S, ends_Q = offsets_S.tolist(), offsets_Q.tolist()
    found = wide(right.rows_RD).new_zeros(left.batch)
    for b in range(left.batch):
        mine, looked_up = order_R[ends_S[b] : ends_S[b + 1]], order_P[ends_Q[b] : ends_Q[b + 1]]
        picked_TS = left.left_RM[mine][:, right.index_R[looked_up]]
        found[b] = (wide_mm(picked_TS.mT, left.right_RN[mine]) * wide(right.rows_RD[looked_up])).sum()
    return found


def _cat(tensors: Sequence[Tensor], axis: int = 1) -> Tensor:
    """Concatenate tensors [B, T_k, …] along an axis, by default that of tokens, in the widest of their dtypes."""
    dtype = max((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    return torch.cat([t.to(dtype) for t in tensors], dim=axis)
