"""The sums of a refresh over all processes that share it, in the form that factors are made of.

Legend: W processes, T_r tokens of process r, ΣT of all, N width of a side (with the bias), N_r = N/W of it.

Every process has sums over its own tokens. What each of them holds is said first (`words`), and everything that follows is
decided from the words of all: which sides share their inputs, which tokens a keyed subset keeps, which form a side has, which
collectives come and in which order. Nothing that only one process knows decides a collective.

| reduction | what travels | bytes that leave a process | it then holds |
|---|---|---|---|
| dense | Σ_r of the products [N, N], an all-reduce | 2·N²·(W−1)/W entries | [N, N] |
| gather | the rows, an all-gather | (W−1)·T_r·N entries | [ΣT, N] |
| gram | the rows by features, an all-to-all | T_r·N·(W−1)/W entries | [ΣT, N_r] |

A side whose tokens of all processes are too many for low rank is always reduced densely. One process is the same with W = 1:
nothing travels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.representation import Representation, representation
from gramian.curvature.estimate.refresh_sums import BlockSums
from gramian.curvature.estimate.token_moments import Keep, TokenMoment, WeightedColumns, same_sums, smallest
from gramian.curvature.options import Options
from gramian.linalg import WIDEST_DENSE
from gramian.linalg.wide import wide, wide_dtype
from gramian.parallel.exchange import Exchange

ROLES = ("inputs", "gradients", "probabilities", "table_gradients")
FLAT = 2**22
"""Entries up to which sums travel together."""


@dataclass(frozen=True)
class RankReport:
    """What a process says of one side: plain values, in this order."""

    width: int
    seen: int
    kept: int
    weight: float
    """Σ w over the tokens kept."""
    weighted: bool
    keep: tuple[int, int | None, bool, str]
    dtype: str
    """Of sums and widened rows."""
    plain: tuple[str, float] | None
    """Dtype and factor of rows that can travel as they came."""
    group: int
    """The first block with the same inputs on this process."""


@dataclass
class JoinedTotal:
    """The sum of one side over all tokens, scaled by nothing yet."""

    form: Representation
    data: Tensor
    """The matrix [n, n] of "dense", [n] of "diagonal"; n counts the bias."""
    width: int
    seen: int
    kept: int
    weight: float
    """Σ w over the tokens kept."""
    keep: Keep
    reason: str
    local: int
    """Tokens of this process."""
    columns: Tensor | WeightedColumns | None = None
    """Of "low rank": one per token, [n, T]."""
    factor: float = 1.0
    """What columns are still to be multiplied by."""
    others: Exchange | None = None
    """Where columns are spread by features: who has the others."""
    reduction: str = ""
    """How processes were joined: "dense", "gather", "gram"; empty: they were not."""


@dataclass
class BlockTotals:
    """What all processes have seen of one K-FAC block."""

    inputs: JoinedTotal | None
    gradients: JoinedTotal | None
    probabilities: JoinedTotal | None
    table_gradients: JoinedTotal | None
    counts_V: Tensor | None
    table_weight: float
    sent: dict[str, int]
    """Bytes that left this process for it, by kind of collective."""


def word_of(kronecker: Mapping[str, BlockSums], remainder: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a process says of its sums, as JSON can say it. One wait for the device."""
    slots = [(name, role, getattr(block, role)) for name, block in kronecker.items() for role in ROLES]
    moments = [moment for _, _, moment in slots if moment is not None]
    tables = {name: block for name, block in kronecker.items() if block.counts_V is not None}
    numbers = [moment.kept_weight() for moment in moments] + [block.table_weight for block in tables.values()]
    fetched = _fetch(numbers)
    weights = {id(moment): weight for moment, weight in zip(moments, fetched, strict=False)}
    groups = _groups(kronecker)
    return {
        "sides": [
            None if moment is None else astuple(_said(moment, weights[id(moment)], groups.get(name, 0)))
            for name, _, moment in slots
        ],
        "tables": {
            name: [_name(block.counts_V.dtype), weight]
            for (name, block), weight in zip(tables.items(), fetched[len(moments) :], strict=True)
            if block.counts_V is not None
        },
        "remainder": {name: _name(total.dtype) for name, total in remainder.items()},
    }


def _said(moment: TokenMoment, weight: float, group: int) -> RankReport:
    whole = moment.matrix if moment.matrix is not None else moment.diagonal_N
    plain = None
    if whole is None:
        one = len(moment.chunks) == 1 and moment.chunks[0].weights_T is None
        scale = moment.chunks[0].scale if moment.chunks else None
        if one and isinstance(scale, float):
            plain = (_name(moment.chunks[0].rows_TN.dtype), scale)
        dtypes = [wide_dtype(chunk.rows_TN) for chunk in moment.chunks] or [torch.float32]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    else:
        dtype = whole.dtype
    keep = moment.keep
    return RankReport(
        width=moment.width,
        seen=moment.seen,
        kept=moment.kept,
        weight=weight,
        weighted=any(chunk.weights_T is not None for chunk in moment.chunks),
        keep=(keep.rows_up_to, keep.limit, keep.diagonal, keep.why),
        dtype=_name(dtype),
        plain=plain,
        group=group,
    )


def _groups(kronecker: Mapping[str, BlockSums]) -> dict[str, int]:
    """{block: number of the first block whose inputs hold the same numbers}."""
    firsts: list[tuple[int, TokenMoment]] = []
    found: dict[str, int] = {}
    for number, (name, block) in enumerate(kronecker.items()):
        if block.inputs is not None:
            inputs = block.inputs
            found[name] = next((i for i, moment in firsts if same_sums(inputs, moment)), number)
            if found[name] == number:
                firsts.append((number, inputs))
    return found


def _read(values: Sequence[Any]) -> RankReport:
    """What was said, with tuples where JSON knows lists only."""
    plain: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return RankReport(*plain)


class Join:
    """Gives the totals of one block after another. Collective: all processes ask for the same blocks in the same order."""

    def __init__(
        self,
        options: Options,
        kronecker: Mapping[str, BlockSums],
        remainder: Mapping[str, Tensor],
        words: Sequence[Mapping[str, Any]],
        others: Exchange | None,
    ) -> None:
        """Read the words.

        Args:
            options: for `kfac_distributed_reduce`.
            kronecker: this process's sums of K-FAC blocks; what was joined is let go.
            remainder: its sums of the others.
            words: what each process said of its sums (`word_of`), in the order of ranks.
            others: the processes; None: this one alone.
        """
        self._reduce = options.kfac_distributed_reduce
        self._kronecker, self._remainder, self.others = kronecker, remainder, others
        self._tables = [word["tables"] for word in words]
        self._remainders = [word["remainder"] for word in words]
        slots = [(name, role) for name in kronecker for role in ROLES]
        read = [[None if side is None else _read(side) for side in word["sides"]] for word in words]
        self._said = {slot: [sides[i] for sides in read] for i, slot in enumerate(slots)}
        self._rank = 0 if others is None else others.rank
        self._inputs: dict[Any, JoinedTotal] = {}
        self._problem = ""
        """What went wrong here while the others count on this process's part."""

    def block(self, spec: Spec) -> BlockTotals:
        """What all processes have seen of a block."""
        before = self._sent()
        sides = {role: self._side(spec, role) for role in ROLES}
        counts_V, table_weight = self._table(spec)
        if self.others is not None:
            for moment in self._kronecker[spec.name].moments():
                moment.chunks, moment.matrix = [], None  # those of all processes are enough
        sent = {kind: count - before[kind] for kind, count in self._sent().items() if count > before[kind]}
        return BlockTotals(**sides, counts_V=counts_V, table_weight=table_weight, sent=sent)

    def remainder(self, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
        """Sums of the blocks outside K-FAC: of each that some process has, small ones in one all-reduce."""
        if self.others is None:
            return dict(self._remainder)
        wanted: dict[str, Tensor] = {}
        for name, spec in specs.items():
            said = [_dtype(word[name]) for word in self._remainders if name in word]
            if said:
                shape = (spec.outputs,) if spec.kind == "diagonal" else (spec.outputs, spec.outputs)
                mine = self._remainder.get(name)
                wanted[name] = _widest_zeros(shape, said, spec.device) if mine is None else mine.to(_widest(said))
        return _sum_together(wanted, self.others)

    def agree(self, problem: str) -> str:
        """The first problem that a process has, with its sums or otherwise; "" if none has one. A collective."""
        said = [problem] if self.others is None else self.others.tell(self._problem or problem)
        return next((f"process {rank}: {text}" for rank, text in enumerate(said) if text), "")

    def _sent(self) -> dict[str, int]:
        return {} if self.others is None else dict(self.others.sent)

    def _part(self, make: Callable[[], Tensor], instead: Callable[[], Tensor]) -> Tensor:
        """This process's part of a collective; where it cannot be made (no memory), zeros, and `agree` raises on all."""
        if self.others is None:
            return make()
        try:
            return make()
        except Exception as error:
            self._problem = self._problem or f"{type(error).__name__}: {error}"
            return instead()

    # ---- sides -----------------------------------------------------------------------------------------------------

    def _side(self, spec: Spec, role: str) -> JoinedTotal | None:
        """The total of a side; None if no token of any process reached it."""
        said = self._said[spec.name, role]
        with_tokens = [side for side in said if side is not None and side.kept]
        if not with_tokens:
            return None
        if len({(side.keep, side.width) for side in with_tokens}) > 1:
            raise GramianError(
                f"{spec.name}: processes keep different parts of it; expected the same options and model"
            )
        if role != "inputs":
            return self._total(spec, role, said, with_tokens[0])
        key = (spec.has_bias, *(None if side is None else side.group for side in said))
        if key not in self._inputs:
            self._inputs[key] = self._total(spec, role, said, with_tokens[0])
        return self._inputs[key]

    def _total(self, spec: Spec, role: str, said: Sequence[RankReport | None], first: RankReport) -> JoinedTotal:
        keep, bias, softmax = Keep(*first.keep), role == "inputs" and spec.has_bias, role == "probabilities"
        width = first.width + bias
        moment: TokenMoment | None = getattr(self._kronecker[spec.name], role)
        seen = sum(side.seen for side in said if side is not None)
        counts, weight = self._subset(moment, said, keep, spec.device)
        kept = sum(counts)
        form = representation(keep, kept if keep.limit is None else min(kept, keep.limit))
        narrow = width <= WIDEST_DENSE and not keep.why  # a budget that wants low rank gets it
        as_matrix = form == "low rank" and self.others is not None and self._reduce == "dense" and narrow
        form = "dense" if as_matrix else form
        mine = moment if counts[self._rank] else None
        dtype = _widest([_dtype(side.dtype) for side in said if side is not None])
        reason = _reason(form, softmax, width, keep, kept, seen, as_matrix)
        own = said[self._rank]
        total = JoinedTotal(
            form, torch.empty(0), width, seen, kept, weight, keep, reason, 0 if own is None else own.seen
        )
        if form == "low rank":
            self._take_rows(total, mine, said, counts, dtype, bias, spec.device)
        else:
            shape = (width,) if form == "diagonal" else (width, width)

            def nothing() -> Tensor:
                return torch.zeros(shape, dtype=dtype, device=spec.device)

            def product() -> Tensor:
                assert mine is not None
                return mine.product_diagonal(bias, softmax) if form == "diagonal" else mine.product(bias, softmax)

            total.data = nothing() if mine is None else self._part(product, nothing)
            if self.others is not None:
                total.data, total.reduction = self.others.sum(total.data.to(dtype)), "dense"
        return total

    def _subset(
        self, moment: TokenMoment | None, said: Sequence[RankReport | None], keep: Keep, device: torch.device
    ) -> tuple[list[int], float]:
        """Tokens that each process keeps, and Σ w over all of them; this process lets go of the others.

        Together they keep the `limit` tokens with the smallest keys of all processes. The keys travel: 8 bytes a token.
        """
        counts = [0 if side is None else side.kept for side in said]
        weight = sum(side.weight for side in said if side is not None and side.kept)
        if keep.limit is None or sum(counts) <= keep.limit or self.others is None:
            return counts, weight
        mine = torch.zeros(0, dtype=torch.long, device=device)
        if moment is not None and counts[self._rank]:
            mine = moment.keys()
        keys = self.others.gather_rows(mine, counts)
        bound = smallest(keys, keep.limit)
        kept = [int((part <= bound).sum()) for part in keys.split(counts)]
        here = 0.0
        if moment is not None and counts[self._rank]:
            moment.keep_keys(bound)
            here = float(moment.kept_weight())
        if any(side.weighted for side in said if side is not None):
            return kept, float(self.others.sum(torch.tensor([here], dtype=torch.float64, device=device)))
        return kept, float(sum(kept))

    def _take_rows(
        self,
        total: JoinedTotal,
        moment: TokenMoment | None,
        said: Sequence[RankReport | None],
        counts: list[int],
        dtype: torch.dtype,
        bias: bool,
        device: torch.device,
    ) -> None:
        """The rows of all processes: all of their features, or this process's share of them."""
        if self.others is None:
            assert moment is not None
            total.columns = moment.columns(bias)
            total.factor = total.columns.factor
            return
        plain = {side.plain for side in said if side is not None and side.kept}
        as_they_came = next(iter(plain)) if len(plain) == 1 else None
        if as_they_came is not None:
            dtype, total.factor = _dtype(as_they_came[0]), as_they_came[1]

        def nothing() -> Tensor:
            return torch.zeros(counts[self._rank], total.width, dtype=dtype, device=device)

        def written() -> Tensor:
            assert moment is not None
            rows, factor = moment.row_matrix(bias)
            return rows if as_they_came is not None else (wide(rows) * factor).to(dtype)

        rows = nothing() if moment is None else self._part(written, nothing)
        if self._reduce == "gram":
            rows, total.others, total.reduction = self.others.reshard(rows, counts), self.others, "gram"
        else:
            rows, total.reduction = self.others.gather_rows(rows, counts), "gather"
        total.columns = rows.mT

    def _table(self, spec: Spec) -> tuple[Tensor | None, float]:
        """Σ w per row of a table, and Σ w."""
        said = [word[spec.name] for word in self._tables if spec.name in word]
        if not said:
            return None, 0.0
        weight = float(sum(weight for _, weight in said))
        counts_V = self._kronecker[spec.name].counts_V
        if self.others is not None:
            dtype = _widest([_dtype(name) for name, _ in said])
            rows = spec.inputs if spec.layout == "table" else spec.outputs
            mine = torch.zeros(rows, dtype=dtype, device=spec.device) if counts_V is None else counts_V.to(dtype)
            counts_V = self.others.sum(mine)
        return counts_V, weight


def _reason(form: str, softmax: bool, width: int, keep: Keep, kept: int, seen: int, as_matrix: bool) -> str:
    """Why a side has its form, in words."""
    if form == "diagonal":
        why = keep.why or f"wider than {WIDEST_DENSE} and low rank is off"
        return f"exact, its diagonal: {why}" if softmax else why
    note = f", subset of {kept} of {seen} tokens" if kept < seen else ""
    note += f" ({keep.why})" if keep.why else ""
    if form == "dense":
        why = "added up over processes as a matrix" if as_matrix else "T does not allow low rank"
        return ("exact, " if softmax else "") + why + note
    if softmax:
        return "exact" + note
    return (f"wider than {WIDEST_DENSE}" if width > WIDEST_DENSE else f"T ≤ {keep.rows_up_to}") + note


def _sum_together(wanted: Mapping[str, Tensor], others: Exchange) -> dict[str, Tensor]:
    """Σ over processes of every tensor: small ones of a dtype in one all-reduce."""
    found: dict[str, Tensor] = {}
    small: dict[torch.dtype, list[str]] = {}
    for name, t in wanted.items():
        if t.numel() <= FLAT:
            small.setdefault(t.dtype, []).append(name)
        else:
            found[name] = others.sum(t)
    for names in small.values():
        flat = others.sum(torch.cat([wanted[name].reshape(-1) for name in names]))
        parts = flat.split([wanted[name].numel() for name in names])
        found.update({name: part.view_as(wanted[name]) for name, part in zip(names, parts, strict=True)})
    return found


def _fetch(values: Sequence[float | Tensor]) -> list[float]:
    """Numbers, those on a device all at once."""
    waiting = [value.double() for value in values if isinstance(value, Tensor)]
    fetched = iter(torch.stack([value.to(waiting[0].device) for value in waiting]).tolist() if waiting else [])
    return [next(fetched) if isinstance(value, Tensor) else float(value) for value in values]


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _widest_zeros(shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Tensor:
    return torch.zeros(*shape, dtype=_widest(dtypes), device=device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
