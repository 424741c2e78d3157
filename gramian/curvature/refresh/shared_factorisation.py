"""Factorisations shared out among processes that hold the same factors: each is made by one of them, for all.

Legend: W processes, n side of a factorised matrix: N of a dense factor, T of a low-rank one, whose Gram matrix all have.

Eigenpairs (9n³ FLOPs) and Cholesky factors (n³/3) are dealt out when they are first asked for, the dearest first, each to the
process with the least so far: nobody does more than its fair share and one more. What was made is broadcast, n² entries once
a refresh. The other way, to leave it with its maker and send what it makes of gradients, costs o·m entries for each side at
every step, and every step waits for the makers of both sides in turn; factors themselves are n² on every process anyway.

Left to every process for itself: systems of a side that layers share at different dampings (one damping is kept at a time),
those of an exact softmax head whose rows are spread, and the shifted systems behind fractional powers of such heads.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
    """One factorisation."""

    block: Block
    side: str
    what: What

    @property
    def factor(self) -> Factor:
        """That it is of."""
        return self.block.holder(self.side, self.what)

    @property
    def damping(self) -> float:
        """λ of its side."""
        assert self.block.damping is not None
        return self.block.damping.lambda_A if self.side == "A" else self.block.damping.lambda_G

    @property
    def together(self) -> bool:
        """True if the matrix is a sum over processes."""
        factor = self.factor
        return isinstance(factor, LowRank | DiagonalLowRank) and factor.columns.others is not None

    def sum_gram(self) -> None:
        """Form it, and keep it until it is factorised. Collective."""
        factor = self.factor
        assert isinstance(factor, LowRank)
        factor.columns.gram(exact=self.what == "eigen" or not factor.coarse(self.damping))


class SharedFactorisation:
    """Who makes which factorisation of the factors of one refresh, and what was made so far."""

    def __init__(self, others: Exchange | None) -> None:
        """Begin anew.

        Args:
            others: the processes that hold the same factors; None: every factorisation is made here.
        """
        self.others = others
        self.here = 0
        """Factorisations made by this process for all."""
        self.all = 0
        """By all of them."""
        self._asked: set[tuple[Any, ...]] = set()
        self._done: set[tuple[Any, ...]] = set()

    def factorise(
        self, blocks: Mapping[str, Block], dtypes: Mapping[str, torch.dtype], power: float, first_jitter: float
    ) -> None:
        """Make what (F + damping)^power will use of these blocks. Collective; calls that were made before cost nothing.

        Args:
            blocks: {name: block}, the same on all processes.
            dtypes: in which each meets its gradient.
            power: any real number.
            first_jitter: relative, of Cholesky factorisations.

        Raises:
            GramianError: on all processes, if one of them failed.
        """
        if self.others is None:
            return
        call = (power, *((name, dtypes[name]) for name in blocks))
        if call in self._asked:
            return
        _refuse_unlike(self.others.tell(_asks(call)))
        fetch_bounds(
            [factor for block in blocks.values() for factor in block.factors.values()]
        )  # nobody asks alone later
        wanted = self.others.tell(_wanted(blocks, power))[
            0
        ]  # what process 0 wants: the others want the same but for rounding
        keys = [(*entry, power, dtypes[entry[0]]) for entry in wanted]
        tasks = [FactorisationTask(blocks[key[0]], key[1], key[2]) for key in keys if key not in self._done]
        makers = deal([flops(task.factor, task.what) for task in tasks], self.others.size)
        self._make(tasks, makers, dtypes, power, first_jitter)
        self._done.update(keys)
        self._asked.add(call)

    def _make(
        self,
        tasks: Sequence[FactorisationTask],
        makers: Sequence[int],
        dtypes: Mapping[str, torch.dtype],
        power: float,
        first_jitter: float,
    ) -> None:
        assert self.others is not None
        mine = [task for task, maker in zip(tasks, makers, strict=True) if maker == self.others.rank]
        for task, maker in zip(tasks, makers, strict=True):
            if task.together:
                task.sum_gram()
                _forget_gram(task.factor, maker != self.others.rank)
        problems = {id(task): self._run(task, dtypes[task.block.spec.name], power, first_jitter) for task in mine}
        with suppress(GramianError):  # whose it is comes out below
            settle_all([s for task in mine if task.what == "solve" for s in task.factor.pending()])
        results = {id(task): _result(task, problems[id(task)]) for task in mine}
        words = self.others.tell([about for _, about in results.values()])
        heard = [iter(word) for word in words]
        abouts = [next(heard[maker]) for maker in makers]
        for task, maker, about in zip(tasks, makers, abouts, strict=True):
            if about["problem"]:
                raise GramianError(f"process {maker}: {task.block.spec.name}: {task.side}: {about['problem']}")
        for task, maker, about in zip(tasks, makers, abouts, strict=True):
            given = results[id(task)][0] if id(task) in results else []
            self._hand(task, maker, about, given)
        self.here, self.all = self.here + len(mine), self.all + len(tasks)

    def _run(self, task: FactorisationTask, dtype: torch.dtype, power: float, first_jitter: float) -> str:
        """Make it here; "" or what went wrong."""
        assert task.block.damping is not None
        try:
            if task.what == "solve":
                forget_system(task.factor)
            task.block.factorise(task.side, task.what, power, task.block.damping, first_jitter, dtype)
        except (GramianError, RuntimeError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        finally:
            _forget_gram(task.factor, True)
        return ""

    def _hand(self, task: FactorisationTask, maker: int, about: Mapping[str, Any], given: Sequence[Tensor]) -> None:
        """From the maker to all others."""
        assert self.others is not None
        factor, taken = task.factor, []
        for number, (shape, dtype) in enumerate(about["tensors"]):
            like = torch.empty(0, dtype=getattr(torch, dtype), device=factor.device)
            taken.append(self.others.hand(given[number] if given else None, shape, like, maker))
        if maker != self.others.rank:
            take(factor, task.what, task.damping, taken, about["work"])


def _asks(call: tuple[Any, ...]) -> list[list[str]]:
    """A call as JSON can say it."""
    power, *blocks = call
    return [["power", str(power)], *([name, str(dtype).removeprefix("torch.")] for name, dtype in blocks)]


def _refuse_unlike(said: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise, on all processes, if they do not ask for the same: they would wait for each other in different collectives."""
    for rank, asks in enumerate(said):
        if asks != said[0]:
            unlike = {tuple(entry) for entry in asks} ^ {tuple(entry) for entry in said[0]}
            what = " ".join(min(unlike)) if unlike else "another order"
            raise GramianError(
                f"gradients: process {rank} does not ask for what process 0 does ({what}); "
                "expected the same power and parameters, in one order, on all processes"
            )


def deal(costs: Sequence[float], size: int) -> list[int]:
    """Who does what: the dearest first, each to the one with the least so far; no load exceeds Σ/W + the largest."""
    loads, found = [0.0] * size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        found[i] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[found[i]] += costs[i]
    return found


def _wanted(blocks: Mapping[str, Block], power: float) -> list[tuple[str, str, What]]:
    """Each factorisation once, as JSON can say it."""
    found: dict[tuple[int, What], tuple[str, str, What]] = {}
    dampings: dict[int, set[float]] = {}
    for name, block in blocks.items():
        assert block.damping is not None
        for side, what in block.factorisations(power, block.damping).items():
            task = FactorisationTask(block, side, what)
            factor = task.factor
            if what == "solve":
                dampings.setdefault(id(factor), set()).add(task.damping)
                if isinstance(factor, DiagonalLowRank) and task.together:
                    continue
            found.setdefault((id(factor), what), (name, side, what))
    return [entry for (factor, what), entry in found.items() if what == "eigen" or len(dampings[factor]) == 1]


def _forget_gram(factor: Factor, really: bool) -> None:
    if really and isinstance(factor, LowRank):
        factor.columns.forget()


def _result(task: FactorisationTask, problem: str) -> tuple[list[Tensor], dict[str, Any]]:
    """What was made, and what is said of it."""
    if not problem:
        try:
            tensors, work = made(task.factor, task.what)
        except (GramianError, RuntimeError) as error:
            problem = " ".join(str(error).split())
    if problem:
        return [], {"problem": problem, "tensors": [], "work": {}}
    shapes = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    return tensors, {"problem": "", "tensors": shapes, "work": work}
