"""Factorisations shared among processes that have the same factors: each is computed by one process and broadcast.

Legend: W processes, n side of the matrix that is factorised: the width of a dense factor, or the number of tokens of a low-rank
one (its Gram matrix), o×m the shape of a weight.

Eigenpairs (9n³ FLOPs) and Cholesky factors (n³/3) are assigned when they are first needed, the most expensive first, each to
the process with the least work so far: no process computes more than its fair share plus one. The result is broadcast: n²
entries once a refresh. The alternative, to leave it where it was computed and to send gradients there, costs o·m entries for
each of A and G at every step, and every step waits for the owner of A and then for that of G; each process stores n² entries
of the factor anyway.

`share_tensors` does the same for tensors of known shapes, of which none depends on another, in fewer collectives.

Computed by every process instead: the Cholesky factors of an A that layers with different damping share (a factor stores one
damping at a time), those of an exact softmax head whose rows are sharded, and the systems for fractional powers of such heads.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.linalg import DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.cholesky import settle_all
from gramian.linalg.factors.factor import fetch_bounds
from gramian.linalg.factors.factor_transfer import What, flops, forget_system, made, take
from gramian.parallel.exchange import Exchange


@dataclass(frozen=True)
class FactorisationTask:
    """One factorisation of a block's A or G that one process computes: "eigen" (eigenpairs) or "solve" (Cholesky)."""

    block: Block
    side: str
    what: What

    @property
    def factor(self) -> Factor:
        """The factor that this task factorises."""
        return self.block.holder(self.side, self.what)

    @property
    def damping(self) -> float:
        """λ that the block's damping adds to this task's factor (A or G)."""
        assert self.block.damping is not None
        return self.block.damping.lambda_A if self.side == "A" else self.block.damping.lambda_G

    @property
    def sharded(self) -> bool:
        """True if the factor's rows are sharded, so that the Gram matrix to factorise is a sum over processes."""
        factor = self.factor
        return isinstance(factor, LowRank | DiagonalLowRank) and factor.columns.others is not None

    def sum_gram(self) -> None:
        """Form the Gram matrix of a low-rank factor, summed over processes, and store it for the factorisation. Collective."""
        factor = self.factor
        assert isinstance(factor, LowRank)
        factor.columns.gram(exact=self.what == "eigen" or not factor.coarse(self.damping))


class SharedFactorisation:
    """Assigns the factorisations of one refresh to processes, and remembers which were computed."""

    def __init__(self, exchange: Exchange | None) -> None:
        """Begin without factorisations; `exchange`: the processes that have the same factors; None: this process alone."""
        self.exchange = exchange
        self.here = 0
        """Number of factorisations that this process computed for all."""
        self.all = 0
        """Number of factorisations of all processes in total, each counted once."""
        self._asked: set[tuple[Any, ...]] = set()
        self._done: set[tuple[Any, ...]] = set()

    def factorise(
        self, blocks: Mapping[str, Block], dtypes: Mapping[str, torch.dtype], power: float, first_jitter: float
    ) -> None:
        """Compute and share the factorisations that (F + damping)^power uses; on one process do nothing. Collective.

        An equal later call returns at once. `blocks` and `power` must be the same on all processes, else all raise a
        GramianError; so they do if a factorisation fails. `dtypes`: {block: dtype in which it multiplies its gradient};
        `first_jitter`: first Cholesky jitter, relative to the mean diagonal.
        """
        if self.exchange is None:
            return
        call = (power, *((name, dtypes[name]) for name in blocks))
        if call in self._asked:
            return
        _refuse_different(self.exchange.gather_messages(_request(call)))
        factors = [factor for block in blocks.values() for factor in block.factors.values()]
        fetch_bounds(factors)  # now, since later a process would ask alone
        wanted = self.exchange.gather_messages(_wanted(blocks, power))[0]  # rounding may differ on other processes
        keys = [(*entry, power, dtypes[entry[0]]) for entry in wanted]
        tasks = [FactorisationTask(blocks[key[0]], key[1], key[2]) for key in keys if key not in self._done]
        owners = assign([flops(task.factor, task.what) for task in tasks], self.exchange.size)
        self._compute(tasks, owners, dtypes, power, first_jitter)
        self._done.update(keys)
        self._asked.add(call)

    def _compute(
        self,
        tasks: Sequence[FactorisationTask],
        owners: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        power: float,
        first_jitter: float,
    ) -> None:
        assert self.exchange is not None
        mine = [task for task, owner in zip(tasks, owners, strict=True) if owner == self.exchange.rank]
        for task, owner in zip(tasks, owners, strict=True):
            if task.sharded:
                task.sum_gram()
                if owner != self.exchange.rank:
                    _free_gram(task.factor)
        problems = {id(task): self._run(task, dtypes[task.block.spec.name], power, first_jitter) for task in mine}
        with suppress(GramianError):  # raised below, with the task that it belongs to
            settle_all([s for task in mine if task.what == "solve" for s in task.factor.pending()])
        results = {id(task): _result(task, problems[id(task)]) for task in mine}
        reports = [iter(report) for report in self.exchange.gather_messages([about for _, about in results.values()])]
        abouts = [next(reports[owner]) for owner in owners]
        for task, owner, about in zip(tasks, owners, abouts, strict=True):
            if about["problem"]:
                raise GramianError(f"process {owner}: {task.block.spec.name}: {task.side}: {about['problem']}")
        for task, owner, about in zip(tasks, owners, abouts, strict=True):
            given = results[id(task)][0] if id(task) in results else []
            self._broadcast(task, owner, about, given)
        self.here, self.all = self.here + len(mine), self.all + len(tasks)

    def _run(self, task: FactorisationTask, dtype: torch.dtype, power: float, first_jitter: float) -> str:
        """Compute a factorisation on this process; return the text of an error, or ""."""
        assert task.block.damping is not None
        try:
            if task.what == "solve":
                forget_system(task.factor)
            task.block.factorise(task.side, task.what, power, task.block.damping, first_jitter, dtype)
        except (GramianError, RuntimeError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        finally:
            _free_gram(task.factor)
        return ""

    def _broadcast(
        self, task: FactorisationTask, owner: int, about: Mapping[str, Any], given: Sequence[Tensor]
    ) -> None:
        """Send the tensors `given` of a factorisation from the process `owner` to all others, which store them.

        `about` describes their shapes and dtypes; `given` is empty on the other processes.
        """
        assert self.exchange is not None
        factor, taken = task.factor, []
        for number, (shape, dtype) in enumerate(about["tensors"]):
            like = torch.empty(0, dtype=getattr(torch, dtype), device=factor.device)
            taken.append(self.exchange.broadcast(given[number] if given else None, shape, like, owner))
        if owner != self.exchange.rank:
            take(factor, task.what, task.damping, taken, about["work"])


def _request(call: tuple[Any, ...]) -> list[list[str]]:
    """The call (power, (block, dtype), ...) as a JSON value."""
    power, *blocks = call
    return [["power", str(power)], *([name, str(dtype).removeprefix("torch.")] for name, dtype in blocks)]


def _refuse_different(requests: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise a GramianError, on all processes, if their requests (see `_request`) differ: their collectives would not match."""
    for rank, request in enumerate(requests):
        if request != requests[0]:
            different = {tuple(entry) for entry in request} ^ {tuple(entry) for entry in requests[0]}
            what = " ".join(min(different)) if different else "another order"
            raise GramianError(
                f"gradients: process {rank} does not ask for what process 0 does ({what}); "
                "expected the same power and parameters, in one order, on all processes"
            )


def assign(costs: Sequence[float], size: int) -> list[int]:
    """Assign tasks with these costs to `size` processes and return the process of each task.

    The most expensive task comes first, each goes to the least loaded process; no load exceeds Σ costs/`size` + the largest.
    """
    loads, found = [(0.0, rank) for rank in range(size)], [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, found[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[i], found[i]))
    return found


class SharedRefresh:
    """A capture of several processes, used as that capture is; at its end they share what they make of the new factors.

    ```python
    capture = SharedRefresh(kfac.capture(model, num_terms=n), then=share)  # `share` is collective
    ```
    """

    def __init__(self, capture: Any, then: Callable[[], None]) -> None:
        self._capture, self._then = capture, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def __enter__(self) -> Any:
        return self._capture.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._capture.__exit__(*error)
        if error[0] is None:  # else all processes raise
            self._then()


class SharedTensor(NamedTuple):
    """A tensor that one process computes and all store; equal on all processes but for the number of the device."""

    name: str
    cost: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def share_tensors(
    exchange: Exchange, wanted: Sequence[SharedTensor], compute: Callable[[list[int]], Sequence[Tensor]]
) -> list[Tensor]:
    """The tensors of `wanted` on all processes, each computed by one of them, with the same bits. Collective.

    `compute` returns the tensors at the places of this process's share (see `assign`). An all-gather of messages, then one of
    all tensors of a dtype in one row (a broadcast from each process if their numbers of entries differ). If `compute` fails
    on one process, that process raises its error and all others a GramianError; if `wanted` differs, all raise a GramianError.
    """
    owners = assign([one.cost for one in wanted], exchange.size)
    own = [place for place, owner in enumerate(owners) if owner == exchange.rank]
    problem: Exception | None = None
    try:
        made = dict(zip(own, compute(own), strict=True))
    except Exception as error:  # of any kind (no memory, a solver's): raised when all processes know of it
        problem = error
    facts = [(one.name, one.cost, one.shape, str(one.dtype), one.device.type) for one in wanted]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    reports = exchange.gather_messages([digest, "" if problem is None else f"{type(problem).__name__}: {problem}"])
    if problem is not None:
        raise problem
    for rank, (theirs, text) in enumerate(reports):
        if text:
            raise GramianError(f"process {rank}: {' '.join(text.split())}; expected every process to compute its share")
        if theirs != reports[0][0]:
            raise GramianError(
                f"process {rank}: shares other tensors than process 0; expected the same weights, parameter groups and "
                "kind of device on all processes"
            )
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in wanted):
        places = sorted((i for i, one in enumerate(wanted) if one.dtype == dtype), key=lambda i: owners[i])
        sizes, counts = [math.prod(wanted[i].shape) for i in places], [0] * exchange.size
        like = torch.empty(0, dtype=dtype, device=wanted[places[0]].device)
        for i, size in zip(places, sizes, strict=True):
            counts[owners[i]] += size
        row = torch.cat([like, *(made.pop(i).flatten().to(like) for i in places if i in made)])
        pieces = exchange.gather_rows(row, counts).split(sizes)
        found |= {i: piece.view(wanted[i].shape) for i, piece in zip(places, pieces, strict=True)}
    return [found[i].to(one.device) for i, one in enumerate(wanted)]


def _wanted(blocks: Mapping[str, Block], power: float) -> list[tuple[str, str, What]]:
    """(block name, side, "eigen" or "solve") of each factorisation that this power uses and one process can compute for all.

    A factor that several blocks share is listed once.
    """
    found: dict[tuple[int, What], tuple[str, str, What]] = {}
    dampings: dict[int, set[float]] = {}
    for name, block in blocks.items():
        assert block.damping is not None
        for side, what in block.factorisations(power, block.damping).items():
            task = FactorisationTask(block, side, what)
            factor = task.factor
            if what == "solve":
                dampings.setdefault(id(factor), set()).add(task.damping)
                if isinstance(factor, DiagonalLowRank) and task.sharded:
                    continue
            found.setdefault((id(factor), what), (name, side, what))
    return [entry for (factor, what), entry in found.items() if what == "eigen" or len(dampings[factor]) == 1]


def _free_gram(factor: Factor) -> None:
    if isinstance(factor, LowRank):
        factor.columns.forget()


def _result(task: FactorisationTask, problem: str) -> tuple[list[Tensor], dict[str, Any]]:
    """(tensors of a factorisation, JSON-able description of them); after a `problem` no tensors, and its text."""
    if not problem:
        try:
            tensors, work = made(task.factor, task.what)
        except (GramianError, RuntimeError) as error:
            problem = " ".join(str(error).split())
    if problem:
        return [], {"problem": problem, "tensors": [], "work": {}}
    shapes = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    return tensors, {"problem": "", "tensors": shapes, "work": work}
