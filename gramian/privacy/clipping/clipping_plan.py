"""Choose, for each parameter of a private step, how its per-sample norms and its clipped sum are computed.

With B samples, T tokens per sample, a weight of M×N and e bytes per element, a linear layer has three ways. All compute the
same weight gradient (2·B·T·M·N FLOPs) as an ordinary step; their extra work, and the bytes stored until the clip factors are
known:

| way | stores | extra work |
|---|---|---|
| gram | A and G: B·T·(M+N)·e | B·T·(T+128)·(M+N) FLOPs, and weighting: a pass over the narrower side, or a slower GEMM |
| direct | the same | 2·B·T·M·N FLOPs, and weighting |
| keep | per-sample gradients: B·M·N·e | three passes over them |

An ordinary step frees activations while the backward runs. The stored tensors take their place, so a step that stores as much
as the activations did has the memory peak of an ordinary one. `plan_clipping` gives each parameter its fastest way and, while
the sum exceeds the budget, changes the parameter that frees the most bytes for the least time. Times come from constants
measured once (`MACHINES`), never from a clock, so that every run makes the same plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from gramian.core.byte_amounts import format_bytes
from gramian.plan.budget import Budget
from gramian.plan.plan_table import PlanTable

Way = Literal["gram", "direct", "keep", "sum", "rows", "rank1", "parts"]
NormAlgorithm = Literal["auto", "gram", "direct"]
TILE = 128


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of device, per second."""

    product: float
    """FLOPs of a library GEMM."""
    weighted: float
    """FLOPs of the product that weights every sample in its accumulator; 0: one operand is scaled before the product."""
    gram: float
    """FLOPs of the symmetric Gram kernel."""
    direct: float
    """FLOPs of the GEMM that ends in a sum of squares."""
    bandwidth: float
    """Bytes of memory traffic."""


MACHINES: dict[str, Machine] = {
    "cuda half": Machine(7.7e14, 5.5e14, 5.3e14, 6.8e14, 3.3e12),
    "cuda float": Machine(4.5e13, 0.0, 3.0e13, 3.0e13, 3.3e12),
    "cpu": Machine(1e11, 0.0, 5e10, 5e10, 1e10),
}
"""Measured on an H200 (`benchmarks/clip_kernels.py`); ratios on other GPUs are close enough to choose by."""


@dataclass(frozen=True)
class Share:
    """Shapes of one parameter and of its part in a step, from which bytes and times follow."""

    parameter: str
    form: str
    """"outer" (a matrix that multiplies every token), "sum" (biases, norms), "rows" (tables), "parts", or "other"."""
    batch: int
    tokens: int
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element of a stored gradient."""
    held: int
    """Bytes of the tensors that a later weighted sum reads."""
    scaled: int = 0
    """Bytes of the narrower operand."""

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.shape)

    @property
    def kept(self) -> int:
        """Bytes of all per-sample gradients."""
        size = max(self.itemsize, 4) if self.form == "sum" else self.itemsize
        return self.batch * self.elements * size


@dataclass(frozen=True)
class ClippingRow:
    """The way of one parameter, with its cost."""

    parameter: str
    way: Way
    tokens: int
    shape: tuple[int, ...]
    held: int
    """Bytes stored until the clip factors are known."""
    seconds: float
    """Time beyond an ordinary step."""

    def cells(self) -> tuple[str, ...]:
        """The text of its line in the plan's table."""
        shape = "×".join(map(str, self.shape))
        time = f"{self.seconds * 1e3:.3f} ms"
        return self.parameter, shape, str(self.tokens), self.way, format_bytes(self.held), time


def ways(share: Share, machine: Machine, algorithm: NormAlgorithm, storage: str) -> list[ClippingRow]:
    """The ways that a parameter can be handled, fastest first.

    Args:
        share: the parameter's shapes.
        machine: rates of the device.
        algorithm: "auto", or the norm algorithm forced on linear layers.
        storage: "auto", "bookkeeping" (store only what a weighted sum reads) or "keep" (store per-sample gradients).
    """

    def row(way: Way, held: int, seconds: float) -> ClippingRow:
        return ClippingRow(share.parameter, way, share.tokens, share.shape, held, seconds)

    keep = row("keep", share.kept, 3 * share.kept / machine.bandwidth)
    if share.form == "sum":
        return [row("sum", share.kept, share.held / machine.bandwidth)]
    if share.form in ("rows", "parts"):
        way: Way = "rows" if share.form == "rows" else "parts"
        return [row(way, share.held, 4 * share.held / machine.bandwidth)]
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
    """The way of every parameter in a step of one shape; `str()` is the table.

    ```python
    loss.backward()  # of a model that `engine.make_private` returned
    print(engine.plan)
    ```
    """

    rows: tuple[ClippingRow, ...]
    budget: int | None
    """Bytes that may be stored; None: no limit."""
    two_pass: bool
    """True if not even the leanest ways fit: norms first, then a second backward, and nothing is stored."""
    proof: str = ""
    """A line on how the attribution of rows to samples was proven."""

    @property
    def held(self) -> int:
        """Bytes stored when the clip factors become known."""
        return 0 if self.two_pass else sum(row.held for row in self.rows)

    def __getitem__(self, parameter: str) -> ClippingRow:
        """The row of a parameter."""
        return self._by_name[parameter]

    def get(self, parameter: str) -> ClippingRow | None:
        """The row of a parameter, if it has one."""
        return self._by_name.get(parameter)

    @cached_property
    def _by_name(self) -> Mapping[str, ClippingRow]:
        return {row.parameter: row for row in self.rows}

    def __str__(self) -> str:
        """One line per parameter, and the sums."""
        seconds = sum(row.seconds for row in self.rows)
        mode = "two passes, nothing held" if self.two_pass else f"held {format_bytes(self.held)}"
        total = ("total", "", "", mode, f"budget {Budget(self.budget)}", f"{seconds * 1e3:.3f} ms")
        columns = ("parameter", "shape", "tokens", "way", "held", "extra time")
        return str(PlanTable(columns, [*self.rows, total], [self.proof] if self.proof else []))


def plan_clipping(
    shares: Sequence[Share],
    machine: Machine,
    budget: int | None,
    algorithm: NormAlgorithm = "auto",
    storage: str = "auto",
) -> ClippingPlan:
    """Choose the fastest ways that together fit into the budget.

    Args:
        shares: every trained parameter.
        machine: rates of the device.
        budget: bytes that may be stored; None: no limit.
        algorithm: norm algorithm forced on linear layers, or "auto".
        storage: "auto", "bookkeeping" or "keep".
    """
    options = [ways(share, machine, algorithm, storage) for share in shares]
    chosen = [open_ways[0] for open_ways in options]
    held = sum(row.held for row in chosen)
    while not Budget(budget).fits(held):
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
    """Bytes of every layer's inputs and output gradients, which replace the step's activations, and of one set of weights.

    Per-sample gradients that have to be formed (layers without a formula, biases) are counted in addition.
    """
    written = {"other", "sum"}
    return sum(
        (share.kept if share.form in written else share.held) + share.elements * share.itemsize for share in shares
    )
