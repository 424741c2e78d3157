"""The steps of small weight matrices as one CUDA graph: recorded at the second step after a refresh, replayed until the next.

Such a step has about 80 launches, which take longer on the host than on the device; a recorded one is a single launch. What
changes from step to step, the places of gradients and the rates, is read on the device from a table that is written before.
"""

import logging
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from gramian.curvature.memory.operator_footprint import RECORDED
from gramian.kernels.matrix_steps import Addresses, addresses, averages_in_kernel, on_its_way
from gramian.optim.matrix_step import MatrixStep, StepTables, step_together, together

logger = logging.getLogger("gramian.curvature")


class RecordedSteps:
    """The steps of all weight matrices of an optimizer, recorded where they are small."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self._key: tuple[object, ...] | None = None
        """What the launches of the last step depended on besides the table; None if they cannot be recorded."""
        self._graph: torch.cuda.CUDAGraph | None = None
        """The last recording; one of an earlier key is never replayed, and lends its memory to the next."""
        self._table: Tensor | None = None
        """Addresses and rates on the device that the graph of this key reads; None: there is no such graph."""
        self._tables: list[StepTables] = []
        """Parts of the table for every step, with the addresses that do not change."""
        self._stream: torch.cuda.Stream | None = None
        """That of all recordings: each stream has a workspace for products."""
        self._refused = False
        """True after a recording failed; steps are launched one by one from then on."""

    def step(self, steps: Sequence[MatrixStep], made: int) -> None:
        """Step once; `made` is another number whenever operators were made anew."""
        key = None if self._refused else _key(steps, made)
        if key is None or key != self._key:  # launches compile what a recording needs
            self._key, self._table, self._tables = key, None, []
        elif self._table is None:
            self._record(steps)
        if self._table is None or self._graph is None:
            for some in together(steps):
                step_together(some)
        else:
            self._table.copy_(_numbers(steps).pin_memory(), non_blocking=True)
            self._graph.replay()
        changed = [p for step in steps for p in step.weights if p.is_cuda and not step.sharded]
        torch.autograd.graph.increment_version(changed)  # kernels write by address, which autograd does not see

    def _record(self, steps: Sequence[MatrixStep]) -> None:
        counts, device = [len(step.weights) for step in steps], steps[0].weights[0].device
        table = on_its_way(_numbers(steps), device)
        places, rates = table[: sum(counts)].split(counts), table[sum(counts) :].view(torch.float64).split(2)
        self._tables = [
            StepTables(Addresses(addresses(step.momenta), place, addresses(step.weights)), rate)
            for step, place, rate in zip(steps, places, rates, strict=True)
        ]
        of_step = dict(zip(map(id, steps), self._tables, strict=True))
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(now)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            pool = None if self._graph is None else self._graph.pool()
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads use the device meanwhile
                try:
                    for some in together(steps):
                        step_together(some, [of_step[id(step)] for step in some])
                finally:
                    graph.capture_end()
            except RuntimeError as error:  # nothing has run
                self._refused, self._graph = True, None
                logger.warning("K-FAC's steps are launched one by one, since they cannot be recorded: %s", error)
                return
        now.wait_stream(stream)
        self._graph, self._table = graph, table


def _numbers(steps: Sequence[MatrixStep]) -> Tensor:
    """Addresses of all gradients, then the rates of every step bit for bit: int64 on the host."""
    places = [gradient.data_ptr() for step in steps for gradient in step.gradients]
    return torch.cat([torch.tensor(places, device="cpu"), *(step.rates.view(torch.int64) for step in steps)])


def _key(steps: Sequence[MatrixStep], made: int) -> tuple[object, ...] | None:
    """What the launches of steps depend on besides addresses of gradients and rates; None if they cannot be recorded."""
    weights = list(chain.from_iterable(step.weights for step in steps))
    if not weights or any(not p.is_cuda or p.device != weights[0].device for p in weights):
        return None
    if sum(p.numel() for p in weights) > RECORDED or torch.cuda.is_current_stream_capturing():
        return None
    for step in steps:
        whole = len(step.places) == len(step.matrices.names)
        if step.sharded or not whole or not averages_in_kernel(step.momenta, step.gradients):
            return None
    fixed = tuple(t.data_ptr() for t in chain(weights, *(step.momenta for step in steps)))
    aligned = tuple(all(g.data_ptr() % 16 == 0 for g in step.gradients) for step in steps)
    return made, tuple((step.matrices.names, step.options["momentum"]) for step in steps), fixed, aligned
