"""Build the factors A and G of every block from the joined sums of a refresh, and average them with earlier refreshes.

Legend: N loss terms, a inputs and g output gradients of tokens, w token weights.

A = Σ w a aᵀ / Σ w and G = (1/N) Σ g gᵀ / w become low-rank, dense or diagonal factors, as the joined sums are stored; blocks
outside K-FAC are exact. `Placement` chooses the device on which a factor is stored; the damping of each block is computed.
"""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_keys
from gramian.curvature.blocks.block import PARTS, Block, Facts
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.damping import resolve
from gramian.curvature.options import Options
from gramian.curvature.refresh.join_sums import BlockTotals, Join, JoinedTotal
from gramian.linalg import WIDEST_DENSE, BlockDiagonal, Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.eigendecomposition import free_bytes
from gramian.linalg.factors.factor import fetch_traces
from gramian.linalg.factors.merging import merge
from gramian.linalg.factors.offload import Offload
from gramian.linalg.wide import exact_float32
from gramian.parallel.sharded_columns import ShardedColumns


class Builder:
    """Builds the factors of one refresh, block after block; blocks with the same inputs share one factor A."""

    def __init__(
        self,
        options: Options,
        terms: float,
        samples: int,
        estimate: str,
        local_samples: int,
        reduction: str,
        likelihood: str,
    ) -> None:
        """Set what all blocks share: numbers of loss `terms` and `samples` of all processes, `local_samples` of this one.

        `estimate` is "empirical" or "mc"; `reduction`: how sums outside K-FAC were joined, "dense", or "" for one process;
        `likelihood`: name of the distribution that the head's outputs stand for.
        """
        self.likelihood = likelihood
        self.options, self.terms, self.samples = options, terms, samples
        self.estimate, self.local_samples, self.reduction = estimate, local_samples, reduction
        self._inputs: list[tuple[JoinedTotal, Factor, str]] = []

    def kronecker(self, spec: Spec, sums: BlockTotals, place: "Placement") -> Block | None:
        """The K-FAC block of a weight from its joined sums; None without tokens. `place` moves its factors to their device."""
        started = time.perf_counter()
        exact = sums.probabilities or sums.deviations
        linear = sums.inputs is not None and (sums.gradients is not None or exact is not None)
        if not linear and sums.table_gradients is None:
            return None
        dtype = self.options.storage_dtype(spec.dtype)
        facts = Facts(terms=self.terms, estimate=self.estimate, sent=sums.sent)
        facts.most_columns = _most_columns(spec, sums)
        A: Factor | None = None
        G: Factor | None = None
        if linear:
            assert sums.inputs is not None
            _count_tokens(facts, sums.inputs)
            facts.reduction_A = sums.inputs.reduction
            A, facts.shares_A_with, facts.reason_A = self._input_factor(spec, sums.inputs, dtype, place)
            if exact is not None:
                G = self._softmax_factor(exact, dtype) if sums.probabilities else self._gradient_factor(exact, dtype)
                facts.estimate, facts.reason_G = f"exact {self.likelihood}", exact.reason
                facts.reduction_G = exact.reduction
            else:
                assert sums.gradients is not None
                G, facts.reason_G = self._gradient_factor(sums.gradients, dtype), sums.gradients.reason
                facts.reduction_G = sums.gradients.reduction
            G = place(G)
        if sums.table_gradients is not None:
            assert sums.counts_V is not None
            counts = Diagonal(sums.counts_V / sums.table_weight)
            gradients, reason = self._gradient_factor(sums.table_gradients, dtype), sums.table_gradients.reason
            if A is None or G is None:
                A, G = place(counts), place(gradients)
                _count_tokens(facts, sums.table_gradients)
                facts.reason_A, facts.reason_G = "token counts", reason
                facts.reduction_G = sums.table_gradients.reduction
                facts.reduction_A = "dense" if facts.reduction_G else ""
                if spec.layout != "table":  # tied to a head that took no part: its inputs are the table's outputs
                    A, G, facts.reason_A, facts.reason_G = G, A, facts.reason_G, facts.reason_A
                    facts.reduction_A, facts.reduction_G = facts.reduction_G, facts.reduction_A
            else:
                place.settle()
                A, G = _tied(A, G, gradients, counts)
                facts.reason_A = f"head ({facts.reason_A}) and table ({reason}), weighted by their traces"
                facts.reason_G = f"head ({facts.reason_G}) and token counts, weighted by their traces"
                A, G = place(A), place(G)
        assert A is not None and G is not None
        facts.seconds = time.perf_counter() - started
        return Block(spec, A, G, facts)

    def remainder(self, spec: Spec, total: Tensor, place: "Placement") -> Block:
        """The exact block or diagonal of a parameter outside K-FAC, from its joined sum; `place` moves it to its device."""
        dtype = self.options.storage_dtype(spec.dtype)
        reason = spec.why or "no matrix between tokens"
        facts = Facts(self.samples, self.samples, self.terms, reason_G=reason, estimate=self.estimate)
        facts.local_tokens, facts.reduction_G = self.local_samples, self.reduction
        mean = total / self.terms
        factor: Factor
        if spec.kind == "diagonal":
            factor = Diagonal(mean)
        else:
            factor = Dense.of(mean[0], dtype) if spec.rows == 1 else BlockDiagonal(mean)
        return Block(spec, None, place(factor), facts)

    def _input_factor(
        self, spec: Spec, total: JoinedTotal, dtype: torch.dtype, place: "Placement"
    ) -> tuple[Factor, str, str]:
        """(factor A of a block, name of the block it is shared with or "", reason why it is dense, low rank or diagonal)."""
        for other, factor, name in self._inputs:
            if other is total:
                return factor, name, "the same inputs"
        factor = place(self._moment_factor(total, dtype, 1.0 / total.weight))
        self._inputs.append((total, factor, spec.name))
        return factor, "", total.reason

    def _gradient_factor(self, total: JoinedTotal, dtype: torch.dtype) -> Factor:
        return self._moment_factor(total, dtype, _rescaling(total) / self.terms)

    def _moment_factor(self, total: JoinedTotal, dtype: torch.dtype, scale: float) -> Factor:
        if total.form == "diagonal":
            return Diagonal(total.data * scale)
        if total.form == "dense":
            return Dense.of(total.data * scale, dtype)
        assert total.columns is not None
        if total.exchange is None:
            return LowRank.of(total.columns, dtype, total.factor * scale**0.5)
        return LowRank(_sharded_columns(total, dtype).scaled(total.factor * scale**0.5))

    def _softmax_factor(self, total: JoinedTotal, dtype: torch.dtype) -> Factor:
        """The factor G = (1/N) Σ w (diag p − p pᵀ) of an exact softmax head, over tokens with probabilities p and weights w."""
        scale = _rescaling(total) / self.terms
        if total.form != "low rank":
            return self._moment_factor(total, dtype, scale)
        assert total.columns is not None
        if total.exchange is None:
            return DiagonalLowRank.softmax(total.columns, dtype, total.factor * scale**0.5)
        return DiagonalLowRank.softmax_of(_sharded_columns(total, dtype).scaled(total.factor * scale**0.5))


def _sharded_columns(total: JoinedTotal, dtype: torch.dtype) -> ShardedColumns:
    assert isinstance(total.columns, Tensor) and total.exchange is not None
    return ShardedColumns.of(total.columns, total.width, total.exchange, dtype)


class Placement:
    """Moves factors to their storage device: that of the option `woodbury_store_device`, or with "auto" the model's.

    With "auto", once the factors together exceed half of that device's free memory, further ones are stored on the CPU.
    """

    def __init__(self, options: Options, free: int | None) -> None:
        """Read the option; `free`: bytes free on the model's device, on the process with the fewest; None: no limit."""
        self._fixed = None if options.woodbury_store_device == "auto" else torch.device(options.woodbury_store_device)
        self._left = None if free is None or self._fixed is not None else free // 2
        self._offload = Offload()

    def __call__(self, factor: Factor) -> Factor:
        """Return the factor on its storage device; a copy from a GPU to the CPU is complete only after `settle`."""
        if self._fixed is not None:
            return self._moved(factor, self._fixed)
        if self._left is None:
            return factor
        self._left -= _most_bytes(factor)
        return factor if self._left >= 0 else self._moved(factor, torch.device("cpu"))

    def _moved(self, factor: Factor, device: torch.device) -> Factor:
        if factor.device.type == device.type:
            return factor
        away = factor.device.type == "cuda" and device.type == "cpu"
        return self._offload(factor) if away else factor.to(device)

    def settle(self) -> None:
        """Wait until every copy to the CPU is complete; call it before a factor is read."""
        self._offload.settle()


def _most_bytes(factor: Factor) -> int:
    """Bytes of a factor on the process that stores most of its rows, so that all processes compute the same number."""
    columns = factor.columns if isinstance(factor, LowRank | DiagonalLowRank) else None
    if not isinstance(columns, ShardedColumns):
        return factor.nbytes
    body = columns.stored.body
    most = max(part.stop - part.start for part in columns.others.features(columns.dim))
    return factor.nbytes + int((most - len(body)) * columns.count * body.element_size())


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, the allocator's cache included; None if the device is not a GPU."""
    return free_bytes(device) if device.type == "cuda" else None


def _tied(A: Factor, G: Factor, table_G: Factor, counts: Factor) -> tuple[Factor, Factor]:
    """(A, G) of one Kronecker product for a weight that is head and embedding table: F ≈ G ⊗ A + diag(counts) ⊗ G_table.

    A sum of two Kronecker products is not one, so this approximates: each side is the mean of the two uses' sides, scaled to
    equal traces and weighted by the traces of the two products. The total trace is preserved, and if one use has trace zero,
    the result is exact.
    """
    traces = [float(f.trace()) for f in (A, G, table_G, counts)]
    head, table = traces[0] * traces[1], traces[2] * traces[3]
    if not head > 0 or not table > 0:
        return (A, G) if head >= table else (table_G, counts)
    total = head + table
    inputs = merge(A, table_G, head / total, table / total * traces[0] / traces[2])
    outputs = merge(G, counts, 1.0, table / head * traces[1] / traces[3])
    return inputs, outputs


def make_blocks(
    options: Options,
    specs: Mapping[str, Spec],
    builder: Builder,
    join: Join,
    place: Placement,
    before: Mapping[str, Block],
) -> dict[str, Block]:
    """{name: block} for every block that data reached, averaged with the old blocks `before`, with its damping. Collective.

    `join` adds the sums of all processes, `builder` makes factors of them, `place` moves these to their device. An error on
    one process is raised on all; `NotFinite` names the first block whose sums are not finite.
    """
    fresh: dict[str, Block] = {}
    with torch.no_grad(), exact_float32():
        problem: Exception | None = None
        remainder = join.remainder({name: spec for name, spec in specs.items() if spec.kind != "kronecker"})
        for name, spec in specs.items():
            totals = join.block(spec) if spec.kind == "kronecker" else None
            if problem is not None:
                continue  # the other processes still join theirs
            try:
                rest = remainder.pop(name, None)
                if totals is not None:
                    block = builder.kronecker(spec, totals, place)
                else:
                    block = None if rest is None else builder.remainder(spec, rest, place)
            except Exception as error:  # of any kind (no memory, a solver's): raised when all processes know of it
                problem = error
            else:
                fresh.update({} if block is None else {name: block})
        place.settle()
        anywhere = join.agree("" if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if anywhere:
            raise GramianError(f"{anywhere}; expected every process to make its factors")
        merged: Merged = {}
        decay, columns = options.ema_decay, options.kfac_auto_t_max
        averaged = {name: average(before.get(name), block, decay, columns, merged) for name, block in fresh.items()}
        _refuse_not_finite(fresh, averaged)
        settle_damping(averaged.values(), options)
    return averaged


class NotFinite(GramianError):
    """The error for sums of a refresh that contain NaN or infinity."""


def _refuse_not_finite(fresh: Mapping[str, Block], averaged: Mapping[str, Block]) -> None:
    """Raise `NotFinite` for the first block whose new factors are not finite; waits for the device once.

    A matrix or diagonal is so if its average is; of columns, an average may have left out those that are not finite.
    """
    factors: dict[str, list[Factor]] = {}
    for name, block in fresh.items():
        whole = [
            factor for factor in block.factors.values() if not isinstance(factor, Dense | Diagonal | BlockDiagonal)
        ]
        factors[name] = [*averaged[name].factors.values(), *whole]
    traces = fetch_traces([factor for several in factors.values() for factor in several])
    for name, several in factors.items():
        if not all(math.isfinite(traces[id(factor)]) for factor in several):
            raise NotFinite(f"{name}: its sums are not finite")


def settle_damping(blocks: Collection[Block], options: Options) -> None:
    """Set `damping` (λ_A, λ_G and π) and `parts` of blocks from the options and the traces, which waits for the device."""
    traces = fetch_traces([factor for block in blocks for factor in block.factors.values()])
    for block in blocks:
        A, G = block.A, block.G
        means = None if A is None else (traces[id(A)] / A.dim, traces[id(G)] / G.dim)
        block.damping = resolve(options.damping_mode, options.lambdas, options.max_condition, means)
        block.parts = 1 if options.budget is None else PARTS


Merged = dict[tuple[int, int], tuple[Factor, float]]
"""{(id of the old factor, id of the new one): (their average, trace lost in it)}, so that a shared A is averaged once."""


def average(old: Block | None, new: Block, decay: float, most_columns: int, merged: Merged) -> Block:
    """The new block averaged with the old one: a debiased moving average with decay β over refreshes of this block.

    β is `decay`. The new estimate has weight (1-β)/(1-β^k) at the k-th refresh, so nothing is scaled at k = 1. The average
    starts anew if `old` is None, β is 0 or the kind of estimate changed (empirical, drawn, exact).

    The average of low-rank sides has the columns of both. If these are as many as the rows, or more than `most_columns`, it is
    a dense matrix. If the side is too wide for that, or memory_budget limits its columns, it is a random subset of
    `most_columns` (or that limit), drawn at each refresh from old and new ones in proportion to their weights and rescaled: the
    average is unbiased, and the weight of a single column does not grow.

    `merged` collects the averages, so that blocks which share an A share its average.
    """
    if old is not None and old.facts.estimate != new.facts.estimate:
        old = None
    k = 1 if old is None or decay == 0 else old.facts.refreshes + 1
    if old is None or decay == 0:
        return new.with_factors(new.A, new.G, replace(new.facts, refreshes=k))
    share = (1 - decay) / (1 - decay**k)
    sides: dict[str, Factor] = {}
    lost: dict[str, Any] = {}
    for side, factor in new.factors.items():
        before, limits = old.factors[side], new.facts.most_columns
        pair = (id(before), id(factor))
        if pair not in merged:
            columns, free = limits.get(side, most_columns), side not in limits
            merged[pair] = _mixed(before.to(factor.device), factor, share, columns, k, may_be_dense=free)
        sides[side], lost[f"discarded_trace_{side}"] = merged[pair]
    return new.with_factors(sides.get("A"), sides["G"], replace(new.facts, refreshes=k, **lost))


def _mixed(
    before: Factor, factor: Factor, share: float, most_columns: int, key: int, may_be_dense: bool
) -> tuple[Factor, float]:
    """(1-share)·before + share·factor, and the trace lost by a subset of at most `most_columns` columns (on average 0).

    `key` seeds the random subset; `may_be_dense`: use a dense matrix in place of a subset where the side is narrow enough.
    """
    thin = isinstance(before, LowRank | DiagonalLowRank) and isinstance(factor, LowRank | DiagonalLowRank)
    if not thin or before.rank + factor.rank <= most_columns:
        return merge(before, factor, 1 - share, share), 0.0
    if factor.dim <= WIDEST_DENSE and may_be_dense:
        return Dense.summed(before, factor, 1 - share, share, factor.storage_dtype), 0.0
    assert isinstance(before, LowRank | DiagonalLowRank) and isinstance(factor, LowRank | DiagonalLowRank)
    room = max(1, min(factor.rank, round(share * most_columns)))
    of_before = min(before.rank, most_columns - room)
    room = min(factor.rank, most_columns - of_before)
    old = before.thin(_subset(before.rank, of_before, key, before.device)) if of_before else None
    fresh = factor.thin(_subset(factor.rank, room, -key, factor.device))
    total = fresh if old is None else merge(old, fresh, 1 - share, share)
    whole_trace = (1 - share) * float(before.trace()) + share * float(factor.trace())
    return total, whole_trace - float(total.trace())


def _subset(columns: int, count: int, key: int, device: torch.device) -> Tensor:
    """Sorted indices of `count` of `columns` columns, drawn at random with the seed `key`."""
    keys = token_keys(key, torch.zeros(1, dtype=torch.long), columns)[0]
    return keys.topk(count, largest=False).indices.sort().values.to(device)


def _most_columns(spec: Spec, sums: BlockTotals) -> dict[str, int]:
    """{"A" or "G": largest number of columns of its moving average} for the sides on which memory_budget sets a limit."""
    totals = [("A", sums.inputs), ("G", sums.gradients), ("G", sums.probabilities)]
    totals.append(("G" if spec.layout == "table" else "A", sums.table_gradients))
    found: dict[str, int] = {}
    for side, total in totals:
        if total is not None and total.keep.why and total.keep.limit is not None:
            found[side] = total.keep.limit
    return found


def _count_tokens(facts: Facts, total: JoinedTotal) -> None:
    facts.tokens, facts.kept_tokens, facts.local_tokens = total.seen, total.stored, total.local


def _rescaling(total: JoinedTotal) -> float:
    """The factor that turns a sum over a random subset of tokens into an estimate of that over all; 1 without a subset."""
    return total.seen / max(total.stored, 1) if total.keep.limit is not None else 1.0
