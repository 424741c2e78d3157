"""How each parameter's share of a private step is computed: by which norm, and what is held until the clip factors are known.

With B samples, T tokens per sample, a weight of M×N and e bytes per element, a linear layer may be handled in three ways.
All form the same weight gradient (2·B·T·M·N FLOPs) as an ordinary step; what they cost beyond that, and hold, is

| way | holds | extra work |
|---|---|---|
| gram | A and G: B·T·(M+N)·e | B·T·(T+128)·(M+N) FLOPs, and weighting: a pass over the narrower side, or a slower GEMM |
| direct | the same | 2·B·T·M·N FLOPs, and weighting |
| keep | per-sample gradients: B·M·N·e | three passes over them |

An ordinary step frees activations while the backward runs; what is held here takes their place, so a step that holds as much
as they were peaks where an ordinary one does. The fastest ways that together fit into the budget are taken: each parameter
starts with its fastest, and while the sum is too large, the one that frees the most bytes for the least time changes. Times
come from constants measured once (`MACHINES`), never from a clock, so a second run plans the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gramian.core.byte_amounts import format_bytes

Way = Literal["gram", "direct", "keep", "sum", "rows", "rank1", "parts"]
NormAlgorithm = Literal["auto", "gram", "direct"]
TILE = 128


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of device, per second."""

    product: float
    """FLOPs of a library GEMM."""
    weighted: float
    """FLOPs of the product that weights every sample in its accumulator; 0: a side is scaled before instead."""
    gram: float
    """FLOPs of the symmetric Gram kernel."""
    direct: float
    """FLOPs of the GEMM that ends in a sum of squares."""
    bandwidth: float
    """Bytes."""


MACHINES: dict[str, Machine] = {
    "cuda half": Machine(7.7e14, 5.5e14, 5.3e14, 6.8e14, 3.3e12),
    "cuda float": Machine(4.5e13, 0.0, 3.0e13, 3.0e13, 3.3e12),
    "cpu": Machine(1e11, 0.0, 5e10, 5e10, 1e10),
}
"""Measured on an H200 (`benchmarks/clip_kernels.py`); ratios on other GPUs are close enough to choose by."""


@dataclass(frozen=True)
class Share:
    """What is known of one parameter before a step: everything follows from shapes."""

    parameter: str
    form: str
    """"outer" (a matrix that meets every token), "sum" (biases, norms), "rows" (tables), or "other"."""
    batch: int
    tokens: int
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element in which gradients are kept."""
    held: int
    """Bytes of what a later weighted sum reads."""
    scaled: int = 0
    """Bytes of the narrower side."""

    @property
    def elements(self) -> int:
        """Of the parameter."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def kept(self) -> int:
        """Bytes of all per-sample gradients."""
        size = max(self.itemsize, 4) if self.form == "sum" else self.itemsize
        return self.batch * self.elements * size


@dataclass(frozen=True)
class ClippingRow:
    """One line of the plan."""

    parameter: str
    way: Way
    tokens: int
    shape: tuple[int, ...]
    held: int
    """Bytes."""
    seconds: float
    """Beyond an ordinary step."""


def ways(share: Share, machine: Machine, algorithm: NormAlgorithm, storage: str) -> list[ClippingRow]:
    """The ways open to a parameter, fastest first.

    Args:
        share: its shapes.
        machine: rates.
        algorithm: "auto", or the norm algorithm forced on linear layers.
        storage: "auto", "bookkeeping" (nothing is kept but what a weighted sum needs) or "keep".
    """

    def row(way: Way, held: int, seconds: float) -> ClippingRow:
        return ClippingRow(share.parameter, way, share.tokens, share.shape, held, seconds)

    keep = row("keep", share.kept, 3 * share.kept / machine.bandwidth)
    if share.form == "sum":
        return [row("sum", share.kept, share.held / machine.bandwidth)]
    if share.form == "rows":
        return [row("rows", share.held, 4 * share.held / machine.bandwidth)]
    if share.form == "parts":
        return [row("parts", share.held, 4 * share.held / machine.bandwidth)]
    if share.form != "outer":
        return [keep]
    rows, columns = share.shape
    products = 2 * share.batch * share.tokens * rows * columns
    scaling = 2 * share.scaled / machine.bandwidth
    if machine.weighted:
        scaling = products / machine.weighted - products / machine.product
    if share.tokens == 1:
        found = [row("rank1", share.held, scaling)]
    else:
        gram_flops = share.batch * share.tokens * (share.tokens + TILE) * (rows + columns)
        found = [
            row("gram", share.held, scaling + gram_flops / machine.gram),
            row("direct", share.held, scaling + products / machine.direct),
        ]
    if algorithm != "auto" and share.tokens > 1:
        found = [candidate for candidate in found if candidate.way == algorithm]
    if storage == "keep":
        return [keep]
    if storage == "auto" and algorithm == "auto":
        found.append(keep)
    return sorted(found, key=lambda candidate: (candidate.seconds, candidate.held))


@dataclass(frozen=True)
class ClippingPlan:
    """What every parameter does in a step of one shape; `str()` is the table."""

    rows: tuple[ClippingRow, ...]
    budget: int | None
    two_pass: bool
    """True if not even the leanest ways fit, so that nothing may be held: norms first, then a second backward."""
    proof: str = ""
    """What was shown of the attribution of rows, in words."""

    @property
    def held(self) -> int:
        """Bytes held when the clip factors become known."""
        return 0 if self.two_pass else sum(row.held for row in self.rows)

    def __getitem__(self, parameter: str) -> ClippingRow:
        """The row of a parameter."""
        return self._by_name[parameter]

    def get(self, parameter: str) -> ClippingRow | None:
        """The row of a parameter, if it has one."""
        return self._by_name.get(parameter)

    @property
    def _by_name(self) -> Mapping[str, ClippingRow]:
        found = self.__dict__.get("_names")
        if found is None:
            found = {row.parameter: row for row in self.rows}
            object.__setattr__(self, "_names", found)
        return found

    def __str__(self) -> str:
        """One line per parameter, and the sums."""
        lines = [("parameter", "shape", "tokens", "way", "held", "extra time")]
        for row in self.rows:
            shape = "×".join(map(str, row.shape))
            lines.append(
                (row.parameter, shape, str(row.tokens), row.way, format_bytes(row.held), f"{row.seconds * 1e3:.3f} ms")
            )
        total = sum(row.seconds for row in self.rows)
        budget = "none" if self.budget is None else format_bytes(self.budget)
        mode = "two passes, nothing held" if self.two_pass else f"held {format_bytes(self.held)}"
        lines.append(("total", "", "", mode, f"budget {budget}", f"{total * 1e3:.3f} ms"))
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*table, *([self.proof] if self.proof else [])])


def plan_clipping(
    shares: Sequence[Share],
    machine: Machine,
    budget: int | None,
    algorithm: NormAlgorithm = "auto",
    storage: str = "auto",
) -> ClippingPlan:
    """The fastest ways that together fit into the budget.

    Args:
        shares: every parameter that is trained.
        machine: rates.
        budget: bytes that may be held; None: no limit.
        algorithm: forced norm algorithm of linear layers, or "auto".
        storage: "auto", "bookkeeping" or "keep".
    """
    options = [ways(share, machine, algorithm, storage) for share in shares]
    chosen = [open_ways[0] for open_ways in options]
    held = sum(row.held for row in chosen)
    while budget is not None and held > budget:
        changes = [
            ((row.held - other.held) / max(other.seconds - row.seconds, 1e-12), i, other)
            for i, (row, open_ways) in enumerate(zip(chosen, options, strict=True))
            for other in open_ways
            if other.held < row.held
        ]
        if not changes:
            return ClippingPlan(tuple(chosen), budget, two_pass=True)
        _, i, other = max(changes, key=lambda change: (change[0], -change[1]))
        held += other.held - chosen[i].held
        chosen[i] = other
    return ClippingPlan(tuple(chosen), budget, two_pass=False)


def default_budget(shares: Iterable[Share]) -> int:
    """Inputs and output gradients of every layer, which take the place of the step's activations, and one set of weights.

    Per-sample gradients that there is no other way than to write down (layers without a formula, biases) come on top.
    """
    written = {"other", "sum"}
    return sum(
        (share.kept if share.form in written else share.held) + share.elements * share.itemsize for share in shares
    )
