"""Add the sums of a refresh over all processes that share it, in the form from which factors are built.

Legend: W processes, T_r tokens of process r, ΣT of all, N width of a side (with the bias), N_r = N/W features of one process.

Every process has sums over its own tokens. From the reports of all ranks (`process_report`) each process derives the same:
which blocks share their inputs, which tokens a random subset keeps, whether a side is dense, low rank or diagonal, and the
collectives in their order.

| reduction | data that is sent | entries that leave a process | a process then has |
|---|---|---|---|
| dense | Σ_r of the products [N, N], an all-reduce | 2·N²·(W−1)/W entries | [N, N] |
| gather | the rows, an all-gather | (W−1)·T_r·N entries | [ΣT, N] |
| gram | the rows by features, an all-to-all | T_r·N·(W−1)/W entries | [ΣT, N_r] |

A side with too many tokens on all processes for low rank is always reduced densely. With W = 1 nothing is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.representation import Representation, representation
from gramian.curvature.estimate.kronecker_sums import BlockSums
from gramian.curvature.estimate.token_moments import StoragePolicy, TokenMoment, WeightedColumns, smallest
from gramian.curvature.options import Options
from gramian.curvature.refresh.process_report import ROLES, RankReport, dtype_named, read_side
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import wide
from gramian.parallel.exchange import Exchange

FLAT = 2**22
"""Largest number of entries of a sum that is sent together with others in one all-reduce."""


@dataclass
class JoinedTotal:
    """Σ w x xᵀ over all tokens x of all processes with weights w, for one side of a block, not divided by Σ w or N yet."""

    form: Representation
    data: Tensor
    """The sum as a matrix [n, n] for "dense", or [n] for "diagonal"; n counts the bias."""
    width: int
    seen: int
    stored: int
    weight: float
    """Sum of the weights w of the tokens in the sum."""
    keep: StoragePolicy
    reason: str
    local: int
    """Number of tokens of this process."""
    columns: Tensor | WeightedColumns | None = None
    """For "low rank" in place of `data`: one column per token, [n, T]."""
    factor: float = 1.0
    """A number that `columns` are still to be multiplied by."""
    exchange: Exchange | None = None
    """The processes over which `columns` are sharded by features; None: all features are on this process."""
    reduction: str = ""
    """The reduction over processes: "dense", "gather", "gram"; empty: one process."""


@dataclass
class BlockTotals:
    """Sums of one K-FAC block over all processes, from which its factors are built."""

    inputs: JoinedTotal | None
    gradients: JoinedTotal | None
    probabilities: JoinedTotal | None
    deviations: JoinedTotal | None
    table_gradients: JoinedTotal | None
    counts_V: Tensor | None
    table_weight: float
    sent: dict[str, int]
    """{kind of collective: bytes that left this process to join this block}."""


class Join:
    """Adds the sums of a refresh over processes. Collective: all processes ask for the same blocks in the same order."""

    def __init__(
        self,
        options: Options,
        kronecker: Mapping[str, BlockSums],
        remainder: Mapping[str, Tensor],
        reports: Sequence[Mapping[str, Any]],
        exchange: Exchange | None,
    ) -> None:
        """Read the `reports` of all processes on their sums (`sums_report`, in the order of ranks).

        `kronecker` and `remainder` are this process's own sums; those of K-FAC blocks are freed once they are joined.
        `exchange`: the collectives of these processes; None: this process alone.
        """
        self._reduce = options.kfac_distributed_reduce
        self._kronecker, self._remainder, self.exchange = kronecker, remainder, exchange
        self._table_reports = [report["tables"] for report in reports]
        self._remainder_reports = [report["remainder"] for report in reports]
        slots = [(name, role) for name in kronecker for role in ROLES]
        read = [[None if side is None else read_side(side) for side in report["sides"]] for report in reports]
        self._side_reports = {slot: [sides[i] for sides in read] for i, slot in enumerate(slots)}
        self._rank = 0 if exchange is None else exchange.rank
        self._inputs: dict[Any, JoinedTotal] = {}
        self._problem = ""
        """Text of the first error on this process in joining sums, which `agree` reports to all; "": none."""

    def block(self, spec: Spec) -> BlockTotals:
        """The sums of one K-FAC block over all processes; this process's own sums are freed. Collective."""
        before = self._sent()
        sides = {role: self._side(spec, role) for role in ROLES}
        counts_V, table_weight = self._table(spec)
        if self.exchange is not None:
            for moment in self._kronecker[spec.name].moments():
                moment.chunks, moment.matrix = [], None  # the joined sums replace them
        sent = {kind: count - before[kind] for kind, count in self._sent().items() if count > before[kind]}
        return BlockTotals(**sides, counts_V=counts_V, table_weight=table_weight, sent=sent)

    def remainder(self, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
        """{block outside K-FAC: its sum over all processes}, for blocks of which some process has a sum. Collective.

        Small sums of a dtype are sent in one all-reduce.
        """
        if self.exchange is None:
            return dict(self._remainder)
        wanted: dict[str, Tensor] = {}
        for name, spec in specs.items():
            reported = [report[name] for report in self._remainder_reports if name in report]
            if reported:
                each = spec.outputs // spec.rows
                shape = (spec.outputs,) if spec.kind == "diagonal" else (spec.rows, each, each)
                mine, dtype = self._remainder.get(name), _widest(reported)
                wanted[name] = torch.zeros(*shape, dtype=dtype, device=spec.device) if mine is None else mine.to(dtype)
        return _sum_together(wanted, self.exchange)

    def agree(self, problem: str) -> str:
        """Gather one error text per process and return the first as "process r: text"; "" if no process has one.

        A process sends its first error in joining its sums, or else `problem`. Collective over the exchange.
        """
        problems = [problem] if self.exchange is None else self.exchange.gather_messages(self._problem or problem)
        return next((f"process {rank}: {text}" for rank, text in enumerate(problems) if text), "")

    def _sent(self) -> dict[str, int]:
        return {} if self.exchange is None else dict(self.exchange.sent)

    def _part(
        self, make: Callable[[], Tensor] | None, shape: Sequence[int], like: tuple[torch.dtype, torch.device]
    ) -> Tensor:
        """This process's tensor for a collective, made by `make`; zeros if `make` is None or fails (`agree` then reports it).

        Zeros have `shape` and the (dtype, device) `like`. Without other processes the error is raised.
        """
        try:
            if make is not None:
                return make()
        except Exception as error:  # whatever it is, other processes wait in the collective; `agree` raises it on all
            if self.exchange is None:
                raise
            self._problem = self._problem or f"{type(error).__name__}: {error}"
        return torch.zeros(*shape, dtype=like[0], device=like[1])

    def _side(self, spec: Spec, role: str) -> JoinedTotal | None:
        """One sum of a block (`role`, one of `ROLES`) over all processes; None if no token of any process reached it.

        A GramianError is raised if processes store their tokens by different policies or widths.
        """
        reports = self._side_reports[spec.name, role]
        with_tokens = [side for side in reports if side is not None and side.stored]
        if not with_tokens:
            return None
        if len({(side.keep, side.width) for side in with_tokens}) > 1:
            raise GramianError(
                f"{spec.name}: processes keep different parts of it; expected the same options and model"
            )
        if role != "inputs":
            return self._total(spec, role, reports, with_tokens[0])
        key = (spec.has_bias, *(None if side is None else side.group for side in reports))
        if key not in self._inputs:
            self._inputs[key] = self._total(spec, role, reports, with_tokens[0])
        return self._inputs[key]

    def _total(self, spec: Spec, role: str, reports: Sequence[RankReport | None], first: RankReport) -> JoinedTotal:
        keep, bias, softmax = StoragePolicy(*first.keep), role == "inputs" and spec.has_bias, role == "probabilities"
        width = first.width + bias
        moment: TokenMoment | None = getattr(self._kronecker[spec.name], role)
        seen = sum(side.seen for side in reports if side is not None)
        counts, weight = self._subset(moment, reports, keep, spec.device)
        stored = sum(counts)
        form = representation(keep, stored if keep.limit is None else min(stored, keep.limit))
        narrow = width <= WIDEST_DENSE and not keep.why  # a budget that wants low rank gets it
        as_matrix = form == "low rank" and self.exchange is not None and self._reduce == "dense" and narrow
        form = "dense" if as_matrix else form
        mine = moment if counts[self._rank] else None
        dtype = _widest([side.dtype for side in reports if side is not None])
        reason = _reason(form, softmax, width, keep, stored, seen, as_matrix)
        own = reports[self._rank]
        total = JoinedTotal(
            form, torch.empty(0), width, seen, stored, weight, keep, reason, 0 if own is None else own.seen
        )
        if form == "low rank":
            self._take_rows(total, mine, reports, counts, dtype, bias, spec.device)
        else:
            shape = (width,) if form == "diagonal" else (width, width)

            def product() -> Tensor:
                assert mine is not None
                return mine.product_diagonal(bias, softmax) if form == "diagonal" else mine.product(bias, softmax)

            total.data = self._part(None if mine is None else product, shape, (dtype, spec.device))
            if self.exchange is not None:
                total.data, total.reduction = self.exchange.sum(total.data.to(dtype)), "dense"
        return total

    def _subset(
        self,
        moment: TokenMoment | None,
        reports: Sequence[RankReport | None],
        keep: StoragePolicy,
        device: torch.device,
    ) -> tuple[list[int], float]:
        """(number of tokens that each process keeps, Σ w over all of these); drops this process's tokens outside the subset.

        Together the processes keep the `keep.limit` tokens with the smallest random keys. Keys are sent: 8 bytes a token.
        """
        counts = [0 if side is None else side.stored for side in reports]
        weight = sum(side.weight for side in reports if side is not None and side.stored)
        if keep.limit is None or sum(counts) <= keep.limit or self.exchange is None:
            return counts, weight
        mine = torch.zeros(0, dtype=torch.long, device=device)
        if moment is not None and counts[self._rank]:
            mine = moment.keys()
        keys = self.exchange.gather_rows(mine, counts)
        bound = smallest(keys, keep.limit)
        left = [int((part <= bound).sum()) for part in keys.split(counts)]
        here = 0.0
        if moment is not None and counts[self._rank]:
            moment.keep_keys(bound)
            here = float(moment.stored_weight())
        if any(side.weighted for side in reports if side is not None):
            return left, float(self.exchange.sum(torch.tensor([here], dtype=torch.float64, device=device)))
        return left, float(sum(left))

    def _take_rows(
        self,
        total: JoinedTotal,
        moment: TokenMoment | None,
        reports: Sequence[RankReport | None],
        counts: list[int],
        dtype: torch.dtype,
        bias: bool,
        device: torch.device,
    ) -> None:
        """Set `total.columns` to the tokens of all processes as columns: with all features, or this process's share ("gram").

        `counts`: number of tokens of each process; `dtype`: that in which rows are sent if they are not all alike.
        """
        if self.exchange is None:
            assert moment is not None
            total.columns = moment.columns(bias)
            total.factor = total.columns.factor
            return
        plain = {side.plain for side in reports if side is not None and side.stored}
        as_they_came = next(iter(plain)) if len(plain) == 1 else None
        if as_they_came is not None:
            dtype, total.factor = dtype_named(as_they_came[0]), as_they_came[1]

        def own_rows() -> Tensor:
            assert moment is not None
            rows, factor = moment.row_matrix(bias)
            return rows if as_they_came is not None else (wide(rows) * factor).to(dtype)

        shape = (counts[self._rank], total.width)
        rows = self._part(None if moment is None else own_rows, shape, (dtype, device))
        if self._reduce == "gram":
            rows, total.exchange, total.reduction = self.exchange.reshard(rows, counts), self.exchange, "gram"
        else:
            rows, total.reduction = self.exchange.gather_rows(rows, counts), "gather"
        total.columns = rows.mT

    def _table(self, spec: Spec) -> tuple[Tensor | None, float]:
        """(summed weights of lookups over all processes by table row [V], their total); (None, 0) without a table."""
        reports = [report[spec.name] for report in self._table_reports if spec.name in report]
        if not reports:
            return None, 0.0
        weight = float(sum(weight for _, weight in reports))
        counts_V = self._kronecker[spec.name].counts_V
        if self.exchange is not None:
            dtype = _widest([name for name, _ in reports])
            rows = spec.inputs if spec.layout == "table" else spec.outputs
            mine = torch.zeros(rows, dtype=dtype, device=spec.device) if counts_V is None else counts_V.to(dtype)
            counts_V = self.exchange.sum(mine)
        return counts_V, weight


def _reason(form: str, softmax: bool, width: int, keep: StoragePolicy, stored: int, seen: int, as_matrix: bool) -> str:
    """A text for the record that says why a side is dense, low rank or diagonal."""
    if form == "diagonal":
        why = keep.why or f"wider than {WIDEST_DENSE} and low rank is off"
        return f"exact, its diagonal: {why}" if softmax else why
    note = f", subset of {stored} of {seen} tokens" if stored < seen else ""
    note += f" ({keep.why})" if keep.why else ""
    if form == "dense":
        why = "added up over processes as a matrix" if as_matrix else "T does not allow low rank"
        return ("exact, " if softmax else "") + why + note
    if softmax:
        return "exact" + note
    return (f"wider than {WIDEST_DENSE}" if width > WIDEST_DENSE else f"T ≤ {keep.rows_up_to}") + note


def _sum_together(wanted: Mapping[str, Tensor], exchange: Exchange) -> dict[str, Tensor]:
    """{name: tensor summed over processes}; tensors of at most `FLAT` entries and one dtype share an all-reduce."""
    found: dict[str, Tensor] = {}
    small: dict[torch.dtype, list[str]] = {}
    for name, t in wanted.items():
        if t.numel() <= FLAT:
            small.setdefault(t.dtype, []).append(name)
        else:
            found[name] = exchange.sum(t)
    for names in small.values():
        flat = exchange.sum(torch.cat([wanted[name].reshape(-1) for name in names]))
        parts = flat.split([wanted[name].numel() for name in names])
        found.update({name: part.view_as(wanted[name]) for name, part in zip(names, parts, strict=True)})
    return found


def _widest(names: Sequence[str]) -> torch.dtype:
    return torch.float64 if "float64" in names else torch.float32
