"""The plan of K-FAC's memory: one row per block of the Fisher, and the totals of every device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gramian.core.byte_amounts import format_bytes
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.memory.block_footprint import Outline, SidePolicies, bound, outline
from gramian.curvature.memory.block_form import ANY_TOKENS, BlockForm, BlockTokens
from gramian.curvature.memory.plan_totals import STAGES, PlanTotal, add
from gramian.plan.plan_table import PlanTable

Keeps = Mapping[str, SidePolicies]
"""{K-FAC block: storage policies of the tokens of A, of G and of a table's gradients}."""


@dataclass(frozen=True)
class CurvatureRow:
    """One row of the memory plan: a block of the Fisher with the representation of its factors and their bytes."""

    layer: str
    inputs: int
    """m, the number of inputs of the layer, the bias included."""
    outputs: int
    """o, the number of outputs of the layer."""
    tokens: int | None
    """Number of tokens T of the refresh; None: any number."""
    A: str
    """Representation of the factor A, such as "dense", or "shared"; "" for a block that is not a Kronecker product."""
    G: str
    """Representation of the factor G, such as "low rank 512"."""
    why: str
    bytes: Mapping[str, Mapping[str, int]]
    """{stage: {device type: bytes}}.

    "collect": stored tokens; "build": on top, while factors are built; "rest": stored factors; "use": on top, while they are
    factorised; "apply": on top, while a vector is multiplied; "ready": operators that an optimizer keeps for its steps.
    """

    @property
    def representation(self) -> str:
        """Representations of both sides of the block as one text, such as "dense ⊗ low rank 512"."""
        return f"{self.A} ⊗ {self.G}" if self.A else self.G

    def cells(self, device: str = "") -> tuple[str, ...]:
        """The cells of this block's line in the plan's table; byte amounts name their device unless it is `device`."""
        tokens = "any" if self.tokens is None else f"{self.tokens:,}"
        amounts = []
        for stage in STAGES:
            found = {where: count for where, count in self.bytes[stage].items() if count}
            named = [format_bytes(n) + ("" if where == device else f" {where}") for where, n in found.items()]
            amounts.append(" + ".join(named) or "-")
        return (self.layer, f"{self.inputs:,}", f"{self.outputs:,}", tokens, self.A, self.G, *amounts, self.why)


@dataclass(frozen=True)
class CurvaturePlan:
    """Memory of a K-FAC refresh and of its use, per block and device; `str()` is a table.

    ```python
    plan = kfac.plan(model, tokens=8192)
    print(plan)
    plan.rows[0].representation, plan.total("cuda")
    ```
    """

    rows: tuple[CurvatureRow, ...]
    totals: Mapping[str, PlanTotal]
    """{device type: `PlanTotal` of all blocks}."""
    budget: int | None
    keeps: Keeps
    world_size: int = 1
    """Number of processes; all numbers are those of the process with the most bytes."""
    reduction: str = ""
    """How processes join their rows: "gram", "gather", "dense" or "none"; empty for one process."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Types of the devices that store or compute something, such as ("cuda", "cpu")."""
        return tuple(self.totals)

    def total(self, device: str | torch.device | None = None) -> int:
        """Peak of bytes on a device from the second refresh on; `device` None: on the device with the highest peak."""
        if device is None:
            return max(total.peak for total in self.totals.values())
        found = self.totals.get(torch.device(device).type)
        return 0 if found is None else found.peak

    def __str__(self) -> str:
        """The plan as a table: one line per block, then the totals of every device."""
        return str(self._table(self.rows))

    def grouped(self) -> str:
        """The plan as the text of a table with one line for all equal blocks."""
        return str(self.grouped_table())

    def grouped_table(self) -> PlanTable:
        """The plan as a table with one line for all equal blocks."""
        alike: dict[str, list[CurvatureRow]] = {}
        for row in self.rows:
            alike.setdefault(repr(replace(row, layer="", why="" if row.A == "shared" else row.why)), []).append(row)
        firsts = []
        for first, *more in alike.values():
            firsts.append(replace(first, layer=f"{first.layer} and {len(more):,} alike") if more else first)
        return self._table(firsts)

    def _table(self, rows: Sequence[CurvatureRow]) -> PlanTable:
        lines = [row.cells(next(iter(self.totals))) for row in rows]
        notes = []
        limit = "" if self.budget is None else f" of a budget of {format_bytes(self.budget)}"
        each = "" if self.world_size == 1 else f" on each of {self.world_size:,} processes ({self.reduction})"
        for device, total in self.totals.items():
            lines.append((f"all on {device}", "", "", "", "", "", *map(format_bytes, total.stages().values()), ""))
            peak, first = format_bytes(total.peak), format_bytes(total.first)
            notes.append(f"{device}: {peak} at most{limit}{each}; {first} in the first refresh")
        return PlanTable(("layer", "m", "o", "T", "A", "G", *STAGES, "why"), lines, notes)


def plan_row(
    spec: Spec,
    form: BlockForm,
    keeps: SidePolicies,
    home: str,
    stores: tuple[str, str],
    counts: BlockTokens | None = None,
    shared: str = "",
    on_cpu: bool = False,
) -> CurvatureRow:
    """The row of a block in the plan; `counts`: its numbers of tokens, None: the maximum of bytes over any number.

    The layer runs on the device type `home`, its A and G are stored on `stores`. `shared`: name of the block that stores its
    A, "" if it is its own; `on_cpu`: eigenvectors are computed on the CPU.
    """
    found = outline(form, keeps, counts or ANY_TOKENS)
    single: dict[str, PlanTotal] = {}
    add(single, bound(form, keeps) if counts is None else found.footprint, home, stores, form.averaged > 0)
    by_stage = {stage: {device: total.stages()[stage] for device, total in single.items()} for stage in STAGES}
    tokens = None if counts is None else counts.outputs or counts.table
    A, G = "shared" if shared else "" if found.A is None else str(found.A), str(found.G)
    if tokens is None:
        A, G = (text.rstrip("0123456789,").rstrip() for text in (A, G))
    why = _why(spec, keeps, found, shared, counts or BlockTokens(0, 0, 0), on_cpu)
    tokens = tokens if spec.kind == "kronecker" else 0
    return CurvatureRow(spec.name, spec.inputs, spec.outputs, tokens, A, G, why, by_stage)


def _why(spec: Spec, keeps: SidePolicies, found: Outline, shared: str, counts: BlockTokens, on_cpu: bool) -> str:
    """The text of the plan's column "why": a subset of tokens, a shared A, an exact head, or why there is no K-FAC."""
    if spec.kind != "kronecker":
        return spec.why or "no matrix between tokens"
    linear = len(spec.tables) < len(spec.layers)
    sides = [(keep, counts.outputs) for keep in keeps[:2] if linear] + [(keeps[2], counts.table)] * bool(spec.tables)
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
