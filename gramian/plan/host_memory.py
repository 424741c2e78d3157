"""Host memory that copies of a run's state take, from shapes alone.

A copy holds the weights (P bytes), the s numbers that the optimizer keeps per weight, and the factors of K-FAC (K bytes, whole
on every process). With n processes of which h share a host:

| | bytes of a copy on a process | copies on a process | copies on a host |
|---|---|---|---|
| one, ddp | P·(1 + s) + K | `checkpoint.snapshots`, one more on rank 0 while a checkpoint is written | h·snapshots + 1 |
| fsdp2 | P·(1 + s)/n + K | `checkpoint.snapshots`, one more while a checkpoint is written | h·(snapshots + 1) |

Tensors lie one behind the other in pieces of at most `PIECE` bytes, or alone. Copies of a GPU's tensors are page-locked, and
torch rounds such a piece up to a power of two. Left out: scalars of the optimizer, buffers, projectors of feature losses; and
what is not a copy: the interpreter, CUDA's context, data workers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from gramian.core.byte_amounts import format_bytes

PIECE = 2**28
"""Most bytes of a piece of host memory that holds several tensors."""
LEAST = 2
"""Copies that a run cannot do without: one to go back to while the next one waits to be judged."""
USABLE = 0.9
"""Share of the available host memory that is planned with."""


def packed(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors of these bytes share a piece, by index: as many as fit, in order."""
    pieces: list[list[int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if not pieces or filled + size > PIECE:
            pieces.append([])
            filled = 0
        pieces[-1].append(i)
        filled += size
    return pieces


def allocated(sizes: Sequence[int], pinned: bool) -> int:
    """Bytes of host memory for tensors of these bytes, of one device and dtype."""
    pieces = (sum(sizes[i] for i in piece) for piece in packed(sizes))
    return sum(1 << (size - 1).bit_length() if pinned and size else size for size in pieces)


def copy_bytes(
    shapes: Iterable[Sequence[int]],
    itemsize: int,
    states: int,
    *,
    shards: int = 1,
    pinned: bool = False,
    factors: int = 0,
) -> int:
    """Host memory of one copy of a run's state on one process, the one that holds most.

    Args:
        shapes: of the parameters, shared ones once.
        itemsize: bytes of a stored number.
        states: numbers that the optimizer keeps per parameter.
        shards: processes that FSDP2 spreads the rows of every parameter over.
        pinned: the state is on a GPU.
        factors: bytes of K-FAC's factors at rest.
    """
    found = [tuple(shape) for shape in shapes]
    order = sorted(found, key=lambda shape: len(shape) < 2)  # of the optimizer: matrices, then the others
    repeated = [shape for shape in order for _ in range(states)]
    rows = [(ceil(shape[0] / shards), *shape[1:]) if shape else shape for shape in [*found, *repeated]]
    return allocated([prod(shape) * itemsize for shape in rows], pinned) + (
        allocated([factors], pinned) if factors else 0
    )


@dataclass(frozen=True)
class HostPlan:
    """Copies of the state in the memory of one host; `str()` is a line."""

    copy: int
    """Bytes of one, on one process."""
    snapshots: int
    """Copies that a rollback can go to."""
    wish: int
    """As many were asked for."""
    processes: int
    """On this host."""
    writers: int
    """Of them that hold one more copy while a checkpoint is written."""
    usable: int | None
    """Bytes of the host that are planned with; None: not known."""

    @property
    def process(self) -> int:
        """Most bytes of copies on a process."""
        return (self.snapshots + 1) * self.copy

    @property
    def host(self) -> int:
        """Bytes of copies on the host."""
        return (self.processes * self.snapshots + self.writers) * self.copy

    @property
    def fits(self) -> bool:
        """Whether they fit, as far as is known."""
        return self.usable is None or self.host <= self.usable

    @property
    def refusal(self) -> str:
        """Why it does not fit, in a line."""
        usable = 0 if self.usable is None else self.usable
        return (
            f"checkpoint.snapshots: not even {self.snapshots} and the one being written fit: {format_bytes(self.copy)} each, "
            f"{format_bytes(self.host)} on a host of {self.processes} processes, {format_bytes(usable)} can be used; "
            "expected more host memory, fewer processes on a host, or parallel.strategy=fsdp2 over more of them"
        )

    def __str__(self) -> str:
        """What is held where."""
        many = f"{self.snapshots} snapshots and one being written, {format_bytes(self.copy)} each: {format_bytes(self.process)}"
        where = f" on a host of {self.processes:,} processes" if self.processes > 1 else ""
        total = f", {format_bytes(self.host)}{where}" if where else ""
        room = "" if self.usable is None else f" of {format_bytes(self.usable)}"
        lowered = f"; checkpoint.snapshots={self.wish} would take too much" if self.snapshots < self.wish else ""
        return f"host memory: {many} on a process{total}{room}{lowered}"


def plan_host(copy: int, wish: int, processes: int, sharded: bool, available: int | None) -> HostPlan:
    """As many snapshots as were asked for, or as fit, at least `LEAST`.

    Args:
        copy: bytes of one on a process.
        wish: `checkpoint.snapshots`.
        processes: on the host.
        sharded: whether every process writes its own part of a checkpoint.
        available: bytes of the host; None: not known.
    """
    usable = None if available is None else int(USABLE * available)
    writers = processes if sharded else 1
    plans = [HostPlan(copy, count, wish, processes, writers, usable) for count in range(wish, LEAST - 1, -1)]
    return next((plan for plan in plans if plan.fits), plans[-1])
