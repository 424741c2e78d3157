"""Choose, for each parameter of a private step, how its per-sample norms and its clipped sum are computed.

With B samples, T tokens per sample, inputs A and output gradients G, a weight of M×N and e bytes per element, a linear layer
can be clipped in three ways. All compute the same weight gradient (2·B·T·M·N FLOPs) as an ordinary step. They differ in extra
work, and in the bytes stored until the clip factors are known:

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
"""How a parameter's norms and clipped sum are computed. From saved inputs and output gradients: "gram" (norms by Gram
matrices), "direct" (norms by per-sample gradients that are not stored), "rank1" (one token per sample), "rows" (embedding
tables), "parts" (convolutions, several uses). From saved per-sample gradients: "keep", and "sum" for biases and norm layers."""
NormAlgorithm = Literal["auto", "gram", "direct"]
TILE = 128


@dataclass(frozen=True)
class Machine:
    """Throughput of a device by type of kernel, from which the time of a clipped step is predicted."""

    product: float
    """FLOPs per second of a library GEMM."""
    weighted: float
    """FLOPs per second of the product that multiplies by the clip factors in its accumulator; 0: there is no such kernel, and
    one operand is scaled before the product."""
    gram: float
    """FLOPs per second of the symmetric Gram kernel."""
    direct: float
    """FLOPs per second of the GEMM that ends in a sum of squares."""
    bandwidth: float
    """Bytes of memory traffic per second."""


MACHINES: dict[str, Machine] = {
    "cuda half": Machine(7.7e14, 5.5e14, 5.3e14, 6.8e14, 3.3e12),
    "cuda float": Machine(4.5e13, 0.0, 3.0e13, 3.0e13, 3.3e12),
    "cpu": Machine(1e11, 0.0, 5e10, 5e10, 1e10),
}
"""{device and precision: throughputs}, of a GPU measured on an H200 (`benchmarks/clip_kernels.py`), of a CPU estimated."""


@dataclass(frozen=True)
class Share:
    """One parameter of a step as the planner sees it: form of its gradient, batch size, tokens per sample, shape, bytes."""

    parameter: str
    form: str
    """"outer" (a matrix that multiplies every token), "grouped" (a stack of them, of which each token uses some: experts),
    "sum" (biases, norm layers), "rows" (embedding tables), "parts" (convolutions, several uses of different forms), "other"."""
    batch: int
    tokens: int
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element of a stored per-sample gradient."""
    held: int
    """Bytes of the tensors (inputs, output gradients) that are stored if the clipped sum is computed from them later."""
    scaled: int = 0
    """Bytes of the smaller operand of the weight gradient's product, which may be scaled by the clip factors; 0: no product."""

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.shape)

    @property
    def kept(self) -> int:
        """Bytes of the parameter's per-sample gradients for the whole batch."""
        size = max(self.itemsize, 4) if self.form == "sum" else self.itemsize
        return self.batch * self.elements * size


@dataclass(frozen=True)
class ClippingRow:
    """How one parameter is clipped (`way`, one of `Way`), with the bytes stored and the extra time."""

    parameter: str
    way: Way
    tokens: int
    shape: tuple[int, ...]
    held: int
    """Bytes stored for the parameter until the clip factors are known."""
    seconds: float
    """Predicted time beyond an ordinary step, in seconds."""

    def cells(self) -> tuple[str, ...]:
        """Texts of the parameter's line in the plan's table."""
        shape = "×".join(map(str, self.shape))
        time = f"{self.seconds * 1e3:.3f} ms"
        return self.parameter, shape, str(self.tokens), self.way, format_bytes(self.held), time


def ways(share: Share, machine: Machine, algorithm: NormAlgorithm, storage: str) -> list[ClippingRow]:
    """The possible ways to compute a parameter's norms and clipped sum, each with its bytes and time, fastest first.

    Args:
        share: shapes and bytes of the parameter.
        machine: throughputs of the device.
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
    if share.form not in ("outer", "grouped"):
        return [keep]
    *stack, rows, columns = share.shape
    products = 2 * share.batch * share.tokens * rows * columns
    scaling = 2 * share.scaled / machine.bandwidth
    if machine.weighted:
        scaling = products / machine.weighted - products / machine.product
    if share.tokens == 1 and share.form == "outer":
        found = [row("rank1", share.held, scaling)]
    else:
        gram_flops = share.batch * share.tokens * (share.tokens / prod(stack) + TILE) * (rows + columns)
        found = [
            row("gram", share.held, scaling + gram_flops / machine.gram),
            row("direct", share.held, scaling + products / machine.direct),
        ]
    if algorithm != "auto" and len(found) > 1:
        found = [candidate for candidate in found if candidate.way == algorithm]
    if storage == "keep":
        return [keep]
    if storage == "auto" and algorithm == "auto" and share.form == "outer":
        found.append(keep)
    return sorted(found, key=lambda candidate: (candidate.seconds, candidate.held))


@dataclass(frozen=True)
class ClippingPlan:
    """How every parameter's norms and clipped sum are computed in a step of given shapes; `str()` is a table.

    ```python
    loss.backward()  # of a model that `engine.make_private` returned
    print(engine.plan)
    ```
    """

    rows: tuple[ClippingRow, ...]
    budget: int | None
    """Bytes that a backward may store; None: no limit."""
    two_pass: bool
    """True if nothing may be stored (option, or over budget): one backward computes the norms, a second one the sums."""
    proof: str = ""
    """One line of text on the row proof (the check that each row depends on its sample alone); may be empty."""

    @property
    def held(self) -> int:
        """Total bytes stored when the clip factors become known; 0 with two passes."""
        return 0 if self.two_pass else sum(row.held for row in self.rows)

    def __getitem__(self, parameter: str) -> ClippingRow:
        """The plan's line (`ClippingRow`) for the parameter of this name; KeyError if it has none."""
        return self._by_name[parameter]

    def get(self, parameter: str) -> ClippingRow | None:
        """The plan's line (`ClippingRow`) for the parameter of this name; None if it has none."""
        return self._by_name.get(parameter)

    @cached_property
    def _by_name(self) -> Mapping[str, ClippingRow]:
        return {row.parameter: row for row in self.rows}

    def __str__(self) -> str:
        """The plan as a table: one line per parameter, and the totals."""
        return str(self.table())

    def table(self) -> PlanTable:
        """The plan's lines, one per parameter, the totals, and the line on the row proof."""
        seconds = sum(row.seconds for row in self.rows)
        mode = "two passes, nothing held" if self.two_pass else f"held {format_bytes(self.held)}"
        total = ("total", "", "", mode, f"budget {Budget(self.budget)}", f"{seconds * 1e3:.3f} ms")
        columns = ("parameter", "shape", "tokens", "way", "held", "extra time")
        return PlanTable(columns, [*self.rows, total], [self.proof] if self.proof else [])


def plan_clipping(
    shares: Sequence[Share],
    machine: Machine,
    budget: int | None,
    algorithm: NormAlgorithm = "auto",
    storage: str = "auto",
) -> ClippingPlan:
    """Choose how each parameter is clipped: its fastest way, or one that stores less where all would exceed the budget.

    While the sum of stored bytes exceeds the budget, the parameter that frees the most bytes per second of extra time changes.
    If nothing is left to change, the plan has `two_pass` True.

    Args:
        shares: shapes and bytes of every trained parameter.
        machine: throughputs of the device.
        budget: bytes that may be stored; None: no limit.
        algorithm: norm algorithm forced on linear layers, or "auto".
        storage: "auto", "bookkeeping" (store only what a weighted sum reads) or "keep" (store per-sample gradients).
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
    """Default memory budget in bytes: every layer's inputs and output gradients, and one set of weights.

    These replace the step's activations. For layers without a formula and for biases, whose per-sample gradients have to be
    formed, the bytes of these gradients count instead of inputs and output gradients.
    """
    written = {"other", "sum"}
    return sum(
        (share.kept if share.form in written else share.held) + share.elements * share.itemsize for share in shares
    )
