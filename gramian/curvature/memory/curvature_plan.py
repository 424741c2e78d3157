"""What every block of the Fisher will be, and how many bytes it takes at which stage: before anything is allocated.

`keeps_of` decides what a block keeps while tokens arrive. A run asks it and a plan asks it, so they cannot differ.
It knows shapes and options only, no data and no free memory: all processes come to the same answer, whatever tokens they have.

Under `memory_budget` a model that could take more than that, with however many tokens, gives in step by step:
1. low rank: sides that would be written out keep L tokens instead, and as long as no more come nothing is lost;
2. fewer tokens: L is the largest number for which everything fits; of more tokens a keyed subset of L is kept, rescaled;
3. diagonal: where not even `FEWEST` tokens fit, the largest block becomes its diagonal, then the next largest;
4. refused, with the totals.
L is one number for all blocks, so a budget that the plan for T tokens fits into leaves T tokens as they are. With low rank
switched off the next step after dense is the diagonal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.representation import keep_for
from gramian.curvature.estimate.token_moments import Keep
from gramian.curvature.memory.block_footprint import (
    MANY,
    BlockUse,
    Counts,
    Footprint,
    Outline,
    StoredForm,
    bound,
    outline,
)
from gramian.curvature.memory.token_counts import Trace, trace
from gramian.curvature.options import Options
from gramian.linalg.factors.eigendecomposition import fits

Keeps = Mapping[str, Mapping[str, Keep]]
"""{block: {"A", "G" and, of a table's gradients, "table": what is kept of it}}."""
SIDES = ("A", "G", "table")
DIAGONAL = Keep(diagonal=True, why="memory_budget: its diagonal")
FEWEST = 32
"""Tokens below which a subset says less than a diagonal."""
STAGES = ("collect", "build", "rest", "use", "apply")


# ---- decisions -------------------------------------------------------------------------------------------------------


def keeps_of(
    specs: Mapping[str, Spec], options: Options, head: str | None, exact_head: bool, device: str | None = None
) -> Keeps:
    """What every K-FAC block keeps while tokens arrive, within the budget if there is one.

    Args:
        specs: the model's blocks.
        options: policy and budget.
        head: the layer whose outputs are the logits.
        exact_head: whether its Fisher is the exact one.
        device: where the model will run; None: where it is.

    Raises:
        GramianError: if not even diagonals fit.
    """
    policy = {name: _policy(spec, options, head) for name, spec in specs.items() if spec.kind == "kronecker"}
    if options.budget is None:
        return policy
    homes = {name: device or _type(spec.device) for name, spec in specs.items()}
    return _Budget(specs, options, head if exact_head else None, policy, homes).keeps()


def _policy(spec: Spec, options: Options, head: str | None) -> dict[str, Keep]:
    is_head = head in spec.layers
    return {
        "A": keep_for("A", spec.inputs, is_head, options),
        "G": keep_for("G", spec.outputs, is_head, options),
        "table": keep_for("G", spec.outputs if spec.layout == "table" else spec.inputs, False, options),
    }


class _Budget:
    """The search for what fits, over any number of tokens. Blocks of one form are looked at once."""

    def __init__(
        self, specs: Mapping[str, Spec], options: Options, exact: str | None, policy: Keeps, homes: Mapping[str, str]
    ) -> None:
        assert options.budget is not None
        self.options, self.policy, self.limit, self.specs = options, policy, options.budget, specs
        self.kinds: dict[_Kind, list[str]] = {}
        for name, spec in specs.items():
            form, home = form_of(spec, options, exact=exact in spec.layers), homes[name]
            kind = _Kind(form, _sides(policy.get(name, {})), home, _store(options, home))
            self.kinds.setdefault(kind, []).append(name)

    def keeps(self) -> Keeps:
        """The first step that fits."""
        if self._fits(None, 0):
            return self.policy
        most = min(self.options.kfac_auto_t_max, self.options.max_tokens or MANY)
        fewest, blocks = min(FEWEST, most), len(self.policy)
        flat = _first(blocks, lambda count: self._fits(fewest, count))
        if flat is None:
            raise self._refusal(fewest, blocks)
        fewer = _first(most - fewest, lambda less: self._fits(most - less, flat))
        return self._degraded(most - (most - fewest if fewer is None else fewer), flat)

    def _degraded(self, tokens: int, flat: int) -> Keeps:
        found: dict[str, Mapping[str, Keep]] = {}
        for kind, names, diagonals in self._split(flat, tokens):
            limited = dict(zip(SIDES, self._limited(kind, tokens), strict=True))
            for i, name in enumerate(names):
                found[name] = dict.fromkeys(SIDES, DIAGONAL) if i < diagonals else limited
        return {name: found[name] for name in self.policy}

    def _split(self, flat: int, tokens: int | None) -> Iterator[tuple["_Kind", list[str], int]]:
        """Every kind of Kronecker block with its blocks and how many of them are diagonal: the largest are, first."""
        kinds = [(kind, names) for kind, names in self.kinds.items() if names[0] in self.policy]
        if tokens is not None:
            kinds.sort(key=lambda pair: -_weight(pair[0].form, self._limited(pair[0], FEWEST)))
        for kind, names in kinds:
            diagonals = min(flat, len(names))
            flat -= diagonals
            yield kind, names, diagonals

    def _limited(self, kind: "_Kind", tokens: int) -> tuple[Keep, Keep, Keep]:
        """Every side as the policy has it, or on a subset of so many tokens: whichever takes less."""
        found = list(kind.policy)
        subset = Keep(tokens, tokens, why=f"memory_budget: at most {tokens} tokens")
        for i, (keep, width) in enumerate(zip(kind.policy, kind.form.widths, strict=True)):
            if self.options.low_rank and not keep.diagonal and tokens < width:
                trial = [*found[:i], subset, *found[i + 1 :]]
                found = min(found, trial, key=lambda keeps: _weight(kind.form, _three(keeps)))
        return _three(found)

    def _fits(self, tokens: int | None, flat: int) -> bool:
        return all(total.peak <= self.limit for total in self._totals(tokens, flat).values())

    def _totals(self, tokens: int | None, flat: int) -> dict[str, "PlanTotal"]:
        """Of all blocks; tokens None: as the policy has it."""
        totals: dict[str, PlanTotal] = {}
        counted = [(kind, kind.policy, len(names)) for kind, names in self.kinds.items() if names[0] not in self.policy]
        for kind, names, diagonals in self._split(flat, tokens):
            keeps = kind.policy if tokens is None else self._limited(kind, tokens)
            counted += [(kind, keeps, len(names) - diagonals), (kind, (DIAGONAL,) * 3, diagonals)]
        for kind, keeps, count in sorted(counted, key=lambda one: max(bound(one[0].form, one[1]).works)):
            if count:
                one = bound(kind.form, keeps)
                add(totals, one, kind.home, (kind.store,) * 2, bool(self.options.ema_decay), count)
        return totals

    def _refusal(self, tokens: int, flat: int) -> GramianError:
        """One line with the totals; the table of the least is a note to it."""
        totals = self._totals(tokens, flat)
        device, total = max(totals.items(), key=lambda pair: pair[1].peak)
        parts = ", ".join(f"{stage} {format_bytes(held)}" for stage, held in total.stages().items())
        error = GramianError(
            f"memory_budget: {format_bytes(self.limit)}, but curvature takes {format_bytes(total.peak)} on {device} "
            f"with the least that every block can keep ({parts}); expected at least {total.peak} bytes"
        )
        least = self._degraded(tokens, flat)
        rows = [
            _row(self.specs[name], kind.form, _sides(least.get(name, {})), kind.home, (kind.store,) * 2)
            for kind, names in self.kinds.items()
            for name in names
        ]
        error.add_note(CurvaturePlan(tuple(rows), totals, self.limit, least).grouped())
        return error


@dataclass(frozen=True)
class _Kind:
    """What blocks of the same bytes have in common."""

    form: StoredForm
    policy: tuple[Keep, Keep, Keep]
    home: str
    store: str


def _weight(form: StoredForm, keeps: tuple[Keep, Keep, Keep]) -> int:
    """Bytes by which blocks are compared: what a refresh of one alone takes."""
    one = bound(form, keeps)
    used = one.use_A.together + one.use_G.together
    return one.collect + one.rest + one.settled_A + one.settled_G + used


def _first(count: int, holds: Any) -> int | None:
    """The first of 0…count for which a condition that stays true once it is holds; None: for none."""
    if not holds(count):
        return None
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _sides(keeps: Mapping[str, Keep]) -> tuple[Keep, Keep, Keep]:
    return _three([keeps.get(side, Keep()) for side in SIDES])


def _three(keeps: Sequence[Keep]) -> tuple[Keep, Keep, Keep]:
    A, G, table = keeps
    return A, G, table


# ---- sums ------------------------------------------------------------------------------------------------------------


@dataclass
class PlanTotal:
    """Bytes of all blocks on one device: the fields of `Footprint`, added up or the largest of them, as `add` says."""

    averaged: bool
    collect: int = 0
    build: int = 0
    joined: int = 0
    rest: int = 0
    settled: int = 0
    apply: int = 0
    correcting: int = 0
    leaving: int = 0
    """Of the factor that is on its way elsewhere while the next is made."""
    uses: list[tuple[BlockUse, int]] = field(default_factory=list)
    """Of every factor, in the order of the blocks, and how many there are alike."""

    @property
    def held(self) -> int:
        """What stays of factorisations."""
        return sum(count * use.held for use, count in self.uses)

    @property
    def use(self) -> int:
        """While factors are bounded, then factorised, all of them before anyone waits; if alike, the last is the worst."""
        held = peak = 0
        for use, count in self.uses:
            held += count * use.gram
            peak = max(peak, held + use.bounding)
        for use, count in self.uses:
            held += count * (use.together - use.gram)
            peak = max(peak, held + use.work)
        return peak

    @property
    def first(self) -> int:
        """The most at any time of one refresh without factors from before, and of its use."""
        used = self.rest + max(self.use, self.held + self.apply)
        return max(self.collect + self.making + self.rest, used, self.rest + self.measuring)

    @property
    def peak(self) -> int:
        """The most at any time, when factors from before, and what their use holds, are there while new ones are made."""
        used = self.settled + max(self.use, self.held + self.apply)
        fresh = self.rest + (self.settled if self.averaged else 0)
        making = max(self.collect + self.making, self.measuring)
        return max(self.settled + self.held + making + fresh, used)

    @property
    def making(self) -> int:
        """While factors are made, on top of tokens and factors."""
        return self.joined + self.build + self.leaving

    @property
    def measuring(self) -> int:
        """While EK-FAC finds eigenvectors and measures, tokens still there; 0: it was not asked for."""
        return self.collect + max(self.use, self.held + self.correcting) if self.correcting else 0

    def stages(self) -> dict[str, int]:
        """As the table shows them."""
        found = (self.collect, self.making, self.rest, self.use, self.apply)
        return dict(zip(STAGES, found, strict=True))


def add(
    totals: dict[str, PlanTotal], one: Footprint, home: str, stores: tuple[str, str], averaged: bool, count: int = 1
) -> None:
    """Take one block, or several alike, into the totals of its devices.

    Args:
        totals: {device: sums so far}.
        one: the block's bytes.
        home: where its layer runs.
        stores: where A and G are kept.
        averaged: whether factors are averaged over refreshes.
        count: of such blocks.
    """
    here = totals.setdefault(home, PlanTotal(averaged=averaged))
    here.collect += count * one.collect
    sent = [rest for rest, store in zip((one.rest_A, one.rest_G), stores, strict=True) if store != home]
    here.joined += count * one.joined
    here.correcting = max(here.correcting, one.correcting)
    here.build, here.leaving = max(here.build, one.build + sum(sent)), max(here.leaving, *sent, 0)
    applying = max(one.apply, one.visiting) + one.fetched if sent else one.apply
    here.apply = max(here.apply, applying)
    for store, rest, settled, use in (  # in the order in which they are factorised
        (stores[1], one.rest_G, one.settled_G, one.use_G),
        (stores[0], one.rest_A, one.settled_A, one.use_A),
    ):
        there = totals.setdefault(store, PlanTotal(averaged=averaged))
        there.rest += count * rest
        there.settled += count * settled
        there.uses.append((use, count))
        there.apply = max(there.apply, one.apply)


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvatureRow:
    """One block."""

    layer: str
    inputs: int
    """m, the bias included."""
    outputs: int
    """o."""
    tokens: int | None
    """T of the refresh; None: any number."""
    A: str
    """Representation of the inputs' side; "" where the block has one side."""
    G: str
    why: str
    bytes: Mapping[str, Mapping[str, int]]
    """{stage: {device: bytes}}: "collect" while tokens arrive, "build" on top while factors are made, "rest", "use" on top
    while they are factorised, "apply" on top while a vector is multiplied."""

    @property
    def representation(self) -> str:
        """Both sides."""
        return f"{self.A} ⊗ {self.G}" if self.A else self.G


@dataclass(frozen=True)
class CurvaturePlan:
    """What a refresh and its use will hold; `str()` is the table."""

    rows: tuple[CurvatureRow, ...]
    totals: Mapping[str, PlanTotal]
    budget: int | None
    keeps: Keeps
    world_size: int = 1
    """Processes; all numbers are of the one that holds most."""
    reduction: str = ""
    """How they join their rows."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where anything is held."""
        return tuple(self.totals)

    def total(self, device: str | torch.device | None = None) -> int:
        """The most bytes at any time on a device, from the second refresh on; None: on the one that holds most."""
        if device is None:
            return max(total.peak for total in self.totals.values())
        found = self.totals.get(torch.device(device).type)
        return 0 if found is None else found.peak

    def __str__(self) -> str:
        """One line per block, then the totals of every device."""
        return self._table([(row, row.layer) for row in self.rows])

    def grouped(self) -> str:
        """The table with one line for all blocks alike."""
        alike: dict[str, list[CurvatureRow]] = {}
        for row in self.rows:
            alike.setdefault(repr(replace(row, layer="", why="" if row.A == "shared" else row.why)), []).append(row)
        counted = [(rows[0], len(rows) - 1) for rows in alike.values()]
        return self._table([(row, row.layer + (f" and {more:,} alike" if more else "")) for row, more in counted])

    def _table(self, named: Sequence[tuple[CurvatureRow, str]]) -> str:
        head = ("layer", "m", "o", "T", "A", "G", *STAGES, "why")
        lines: list[tuple[str, ...]] = [head]
        for row, name in named:
            tokens = "any" if row.tokens is None else f"{row.tokens:,}"
            cells = [_cell(row.bytes[stage], next(iter(self.totals))) for stage in STAGES]
            lines.append((name, f"{row.inputs:,}", f"{row.outputs:,}", tokens, row.A, row.G, *cells, row.why))
        for device, total in self.totals.items():
            sums = (format_bytes(held) for held in total.stages().values())
            lines.append((f"all on {device}", "", "", "", "", "", *sums, ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        for device, total in self.totals.items():
            limit = "" if self.budget is None else f" of a budget of {format_bytes(self.budget)}"
            each = "" if self.world_size == 1 else f" on each of {self.world_size:,} processes ({self.reduction})"
            table.append(
                f"{device}: {format_bytes(total.peak)} at most{limit}{each}; {format_bytes(total.first)} in the first refresh"
            )
        return "\n".join(table)


def _cell(held: Mapping[str, int], home: str) -> str:
    return " + ".join(
        format_bytes(count) + ("" if device == home else f" {device}") for device, count in held.items() if count
    ) or "-"  # fmt: skip


def plan(
    model: nn.Module,
    options: Options,
    tokens: int | Mapping[str, int] | None = None,
    *,
    inputs: Any = None,
    head: str | None = None,
    exact_head: bool = False,
    power: float = -1.0,
    algebra: torch.dtype = torch.float64,
    activations: torch.dtype | None = None,
    device: str | torch.device | None = None,
    free: int | None = None,
    world_size: int = 1,
) -> CurvaturePlan:
    """What K-FAC will hold for a model, from shapes alone: `KFACNaturalGradient.plan`, which says what each argument is.

    Here the model is unwrapped, `head` may still be unknown (None: the last linear layer), and `exact_head` says whether its
    Fisher is the exact one.

    Raises:
        GramianError: if memory_budget cannot be met, or an argument makes no sense.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise GramianError(f"world_size: expected an integer of at least 1, got {world_size!r}")
    if options.ekfac and tokens is None and inputs is None:
        raise GramianError("tokens: ekfac=True keeps every one of a refresh; expected how many there are, or inputs")
    alone = world_size == 1 or options.kfac_distributed_reduce == "none"
    specs = find_blocks(model, options)
    seen = _seen(model, specs, tokens, inputs)
    head = head if head is not None else _last_linear(specs, seen)
    runs_on = None if device is None else torch.device(device).type
    keeps = keeps_of(specs, options, head, exact_head, runs_on)
    shares = {} if seen is None or options.weight_sharing == "reduce" else _shared(specs, seen, keeps)
    exact = head if exact_head else None
    rows: list[CurvatureRow] = []
    totals: dict[str, PlanTotal] = {}
    left = None if free is None else free // 2
    for name, spec in specs.items():
        home = runs_on or _type(spec.device)
        form = form_of(
            spec,
            options,
            exact in spec.layers,
            shared=name in shares,
            powers=power != -1,
            activation=activations,
            algebra=algebra,
            processes=1 if alone else world_size,
        )
        mine = _sides(keeps.get(name, {}))
        counts = _counts(spec, tokens, seen, world_size if alone else 1, options.weight_sharing == "reduce", form.exact)
        found = outline(form, mine, counts or Counts(MANY, MANY, MANY))
        one = bound(form, mine) if counts is None else found.footprint
        stores = (_store(options, home),) * 2
        if left is not None and options.woodbury_store_device == "auto" and home == "cuda":
            after_A, left = left - one.rest_A, left - one.rest
            stores = (home if after_A >= 0 else "cpu"), (home if left >= 0 else "cpu")
        add(totals, one, home, stores, bool(options.ema_decay))
        elsewhere = power != -1 or options.damping_mode == "joint"
        on_cpu = elsewhere and free is not None and home == "cuda" and not _decomposes(found, free)
        rows.append(_row(spec, form, mine, home, stores, counts, shares.get(name, ""), on_cpu))
    reduction = "" if world_size == 1 else options.kfac_distributed_reduce
    return CurvaturePlan(tuple(rows), totals, options.budget, keeps, world_size, reduction)


def form_of(
    spec: Spec,
    options: Options,
    exact: bool,
    shared: bool = False,
    powers: bool = False,
    activation: torch.dtype | None = None,
    algebra: torch.dtype = torch.float64,
    processes: int = 1,
) -> StoredForm:
    """What the bytes of a block follow from."""
    activation = spec.dtype if activation is None or spec.dtype == torch.float64 else activation
    wide = 8 if activation == torch.float64 else 4
    linear = len(spec.tables) < len(spec.layers)
    return StoredForm(
        kind=spec.kind,
        inputs=spec.inputs,
        outputs=spec.outputs,
        bias=spec.has_bias,
        linear=linear,
        table=bool(spec.tables),
        transposed=bool(spec.tables) and spec.layout != "table",
        exact=exact and linear,
        shared=shared,
        activation=wide if options.weight_sharing == "reduce" else activation.itemsize,
        wide=wide,
        storage=options.storage_dtype(spec.dtype),
        algebra=8 if spec.dtype == torch.float64 else algebra.itemsize,
        averaged=options.kfac_auto_t_max if options.ema_decay else 0,
        decomposed=powers or options.damping_mode == "joint",
        processes=processes,
        reduction=options.kfac_distributed_reduce if processes > 1 else "",
        corrected=options.ekfac,
    )


def _seen(model: nn.Module, specs: Mapping[str, Spec], tokens: Any, inputs: Any) -> Trace | None:
    layers = [layer for spec in specs.values() if spec.kind == "kronecker" for layer in spec.layers]
    counts = list(tokens.values()) if isinstance(tokens, Mapping) else [] if tokens is None else [tokens]
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise GramianError(f"tokens: expected an integer of at least 1, or {{layer: tokens}}, got {count!r}")
    if isinstance(tokens, Mapping):
        missing = [layer for layer in layers if layer not in tokens]
        unknown = [layer for layer in tokens if layer not in layers]
        if missing or unknown:
            what = f"has no {missing[0]!r}" if missing else f"{unknown[0]!r} is no layer with factors"
            raise GramianError(f"tokens: {what}; expected every layer with factors, or one number for all")
    if inputs is None:
        return None
    if tokens is not None:
        raise GramianError("tokens: were given beside inputs, which tell them; expected one of the two")
    return trace(model, layers, inputs)


def _counts(spec: Spec, tokens: Any, seen: Trace | None, apart: int, reduced: bool, exact: bool) -> Counts | None:
    """Tokens that meet the weight, where so many processes go each its own way; None: any number.

    Args:
        spec: of the block.
        tokens: as told.
        seen: in a forward.
        apart: processes that do not join theirs.
        reduced: whether a sample's tokens are one, as far as the forward tells samples.
        exact: whether the head's probabilities, of all tokens, are G.
    """
    if spec.kind != "kronecker":
        return Counts(0, 0, 0)
    if tokens is None and seen is None:
        return None
    met, looked, samples = (0, 0), (0, 0), 0
    for layer in spec.layers:
        told = tokens[layer] if isinstance(tokens, Mapping) else tokens
        calls, count = (1, told) if seen is None else (len(seen.inputs.get(layer, ())), seen.tokens.get(layer, 0))
        if layer in spec.tables:
            looked = looked[0] + -(-count // apart), looked[1] + calls
        else:
            met = met[0] + -(-count // apart), met[1] + calls
            samples += -(-calls * seen.samples // apart) if seen is not None else 0
    means = samples if reduced and seen is not None else met[0]
    return Counts(means, met[0] if exact else means, looked[0], max(met[1], 1), max(looked[1], 1))


def _shared(specs: Mapping[str, Spec], seen: Trace, keeps: Keeps) -> dict[str, str]:
    """{block: the block whose A it uses}: the same inputs, kept alike and as rows or a matrix, with a bias or without."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, spec in specs.items():
        single = spec.kind == "kronecker" and not spec.tables and len(spec.layers) == 1 and spec.layout != "kernel"
        if single and not keeps[name]["A"].diagonal:
            key = (seen.inputs.get(spec.layers[0]), spec.has_bias, keeps[name]["A"])
            if key[0] is not None and first.setdefault(key, name) != name:
                found[name] = first[key]
    return found


def _last_linear(specs: Mapping[str, Spec], seen: Trace | None) -> str | None:
    linear = [
        layer
        for spec in specs.values()
        if spec.kind == "kronecker"
        for layer in spec.layers
        if layer not in spec.tables and spec.layout != "kernel"
    ]
    if seen is not None and seen.last in linear:
        return seen.last
    return linear[-1] if linear else None


def _decomposes(found: Outline, free: int) -> bool:
    """Whether the GPU does all eigendecompositions of a block."""
    shapes = [shape for shape in (found.A, found.G) if shape is not None and shape.kind != "diagonal"]
    return all(fits(shape.columns, 8, free) for shape in shapes)


def _why(
    spec: Spec,
    keeps: tuple[Keep, Keep, Keep],
    found: Outline,
    shared: str,
    counts: Counts | None,
    on_cpu: bool,
) -> str:
    if spec.kind != "kronecker":
        return spec.why or "no matrix between tokens"
    linear, told = len(spec.tables) < len(spec.layers), counts or Counts(0, 0, 0)
    sides = [(keep, told.outputs) for keep in keeps[:2] if linear] + [(keeps[2], told.table)] * bool(spec.tables)
    reasons = [keep.why for keep, _ in sides if keep.why]
    limits = [keep.limit for keep, count in sides if keep.limit is not None and count > keep.limit]
    if limits and not reasons:
        reasons.append(f"subset of {min(limits):,} tokens")
    if shared:
        reasons.append(f"A of {shared}")
    if found.G.kind == "diagonal minus low rank":
        reasons.append("exact head")
    if on_cpu:
        reasons.append("eigenvectors on the CPU")
    return "; ".join(dict.fromkeys(reasons))


def _row(
    spec: Spec,
    form: StoredForm,
    keeps: tuple[Keep, Keep, Keep],
    home: str,
    stores: tuple[str, str],
    counts: Counts | None = None,
    shared: str = "",
    on_cpu: bool = False,
) -> CurvatureRow:
    """A line of the table; without counts that of any number of tokens."""
    found = outline(form, keeps, counts or Counts(MANY, MANY, MANY))
    one = bound(form, keeps) if counts is None else found.footprint
    single: dict[str, PlanTotal] = {}
    add(single, one, home, stores, form.averaged > 0)
    by_stage = {stage: {device: total.stages()[stage] for device, total in single.items()} for stage in STAGES}
    tokens = None if counts is None else counts.outputs or counts.table
    A = "shared" if shared else "" if found.A is None else str(found.A)
    G = str(found.G)
    if tokens is None:
        A, G = (f"{text.rstrip('0123456789,').rstrip()}" for text in (A, G))
    why = _why(spec, keeps, found, shared, counts, on_cpu)
    return CurvatureRow(
        spec.name, spec.inputs, spec.outputs, tokens if spec.kind == "kronecker" else 0, A, G, why, by_stage
    )


def _type(device: torch.device) -> str:
    """Where a layer will run; a model that is only shapes is taken to be meant for a GPU."""
    return "cuda" if device.type == "meta" else device.type


def _store(options: Options, home: str) -> str:
    return home if options.woodbury_store_device == "auto" else options.woodbury_store_device
