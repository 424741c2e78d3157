"""Host memory of the copies of a run's state (snapshots and checkpoints being written), from shapes alone.

A copy contains the weights (P bytes), the s numbers that the optimizer stores per weight, and the K-FAC factors (K bytes,
unsharded on every process). With n processes of which h share a host:

| | bytes of a copy on a process | copies on a process | copies on a host |
|---|---|---|---|
| one, ddp | P·(1 + s) + K | `checkpoint.snapshots`, one more on rank 0 while a checkpoint is written | h·snapshots + 1 |
| fsdp2 | P·(1 + s)/n + K | `checkpoint.snapshots`, one more while a checkpoint is written | h·(snapshots + 1) |

Tensors are packed into allocations of at most `PIECE` bytes; a larger tensor has its own. Copies of a GPU's tensors are
page-locked, and torch rounds such an allocation up to a power of two. Not counted: scalars of the optimizer, buffers,
projectors of feature losses, the interpreter, CUDA's context and data workers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from gramian.core.byte_amounts import format_bytes
from gramian.plan.budget import Budget

PIECE = 2**28
"""Largest number of bytes of a host allocation that several tensors of a copy share."""
LEAST = 2
"""Smallest number of snapshots of a run: the newest, whose metrics may not be known yet, and one before it to roll back to."""


def packed(sizes: Sequence[int]) -> list[list[int]]:
    """Group tensors of these sizes in bytes into allocations: lists of consecutive indices, up to `PIECE` bytes each.

    A tensor larger than `PIECE` has an allocation of its own.
    """
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
    """Bytes of host memory that tensors of these sizes take; `pinned` rounds every allocation up to a power of two."""
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
    """Bytes of host memory of one copy of a run's state (parameters, optimizer, K-FAC) on the process with the largest share.

    `shapes` are those of the parameters, a tied one once, with `itemsize` bytes per element; the optimizer, and buffers of
    correlated noise, store `states` more numbers per element. FSDP2 shards the rows of both over `shards` processes. `pinned`:
    the state is on a GPU, so its copy is page-locked. `factors`: bytes of the stored K-FAC factors.
    """
    found = [tuple(shape) for shape in shapes]
    order = sorted(found, key=lambda shape: len(shape) < 2)  # the optimizer's order: matrices first
    repeated = [shape for shape in order for _ in range(states)]
    rows = [(ceil(shape[0] / shards), *shape[1:]) if shape else shape for shape in [*found, *repeated]]
    return allocated([prod(shape) * itemsize for shape in rows], pinned) + (
        allocated([factors], pinned) if factors else 0
    )


@dataclass(frozen=True)
class HostPlan:
    """How many copies of a run's state one host keeps in memory, and their bytes; `str()` is one line."""

    copy: int
    """Bytes of one copy of the state on one process."""
    snapshots: int
    """Number of copies on each process that a rollback can return to."""
    wish: int
    """Number of snapshots that the config asks for."""
    processes: int
    """Number of processes on this host."""
    writers: int
    """Number of processes that need one more copy while a checkpoint is written."""
    usable: int | None
    """Bytes of the host that the plan may use; None: unknown."""

    @property
    def process(self) -> int:
        """Largest number of bytes of copies of the state on one process: the snapshots, and one copy that is being written."""
        return (self.snapshots + 1) * self.copy

    @property
    def host(self) -> int:
        """Bytes of all copies of the state on the host."""
        return (self.processes * self.snapshots + self.writers) * self.copy

    @property
    def fits(self) -> bool:
        """True if the copies fit into the usable memory of the host, or if that is unknown."""
        return Budget(self.usable).fits(self.host)

    @property
    def refusal(self) -> str:
        """Error message that says why the copies of the state do not fit into host memory, and what to change."""
        return (
            f"checkpoint.snapshots: not even {self.snapshots} and the one being written fit: {format_bytes(self.copy)} each, "
            f"{format_bytes(self.host)} on a host of {self.processes} processes, {format_bytes(self.usable or 0)} can be used; "
            "expected more host memory, fewer processes on a host, or parallel.strategy=fsdp2 over more of them"
        )

    def __str__(self) -> str:
        """One line: number and bytes of the copies on a process and on the host, and the bytes that can be used."""
        many = f"{self.snapshots} snapshots and one being written, {format_bytes(self.copy)} each: {format_bytes(self.process)}"
        where = f" on a host of {self.processes:,} processes" if self.processes > 1 else ""
        total = f", {format_bytes(self.host)}{where}" if where else ""
        room = "" if self.usable is None else f" of {format_bytes(self.usable)}"
        lowered = f"; checkpoint.snapshots={self.wish} would take too much" if self.snapshots < self.wish else ""
        return f"host memory: {many} on a process{total}{room}{lowered}"


def plan_host(copy: int, wish: int, processes: int, sharded: bool, available: int | None) -> HostPlan:
    """Plan `wish` snapshots of `copy` bytes on each of `processes` processes of a host, or fewer if these do not fit.

    The plan has at least two snapshots, and `fits` False if not even these fit. `sharded`: every process writes its own part of
    a checkpoint. `available`: bytes of the host, 90 % of which are used; None: unknown, and everything fits.
    """
    usable = Budget.of_memory(available).limit
    writers = processes if sharded else 1
    plans = [HostPlan(copy, count, wish, processes, writers, usable) for count in range(wish, LEAST - 1, -1)]
    return next((plan for plan in plans if plan.fits), plans[-1])


def available_memory() -> int:
    """Return the bytes that processes can still allocate on this host, or in the container's limit if that is lower."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = 1024 * int(fields["MemAvailable"].split()[0])
    group = Path("/sys/fs/cgroup")
    try:
        cached = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((group / "memory.current").read_text()) - int(cached["inactive_file"])
        return max(0, min(free, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError, KeyError):  # no control group, or no limit
        return free
