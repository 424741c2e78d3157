"""The steps of small weight matrices as one CUDA graph: recorded at the second step after a refresh, replayed until the next.

Such a step has about 80 launches, which take longer on the host than on the device; a recorded one is a single launch. What
changes from step to step, the places of gradients and the rates, is read on the device from a table that is written before.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from gramian.curvature.memory.operator_footprint import RECORDED
from gramian.kernels.matrix_steps import Addresses, addresses, averages_in_kernel, on_its_way
from gramian.optim.matrix_step import MatrixStep, StepTables, step_together, together


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

    def step(self, steps: Sequence[MatrixStep], made: int) -> None:
        """Step once; `made` is another number whenever operators were made anew."""
        key = _key(steps, made)
        if key is None or key != self._key:  # this compiles what is launched, which a recording must not
            self._key, self._table, self._tables = key, None, []
            for some in together(steps):
                step_together(some)
            return
        if self._table is None:
            self._record(steps)
        assert self._table is not None and self._graph is not None
        self._table.copy_(_numbers(steps).pin_memory(), non_blocking=True)
        self._graph.replay()

    def _record(self, steps: Sequence[MatrixStep]) -> None:
        counts, device = [len(step.weights) for step in steps], steps[0].weights[0].device
        table = on_its_way(_numbers(steps), device)
        places, rates = table[: sum(counts)].split(counts), table[sum(counts) :].view(torch.float64).split(2)
        self._tables = [
            StepTables(Addresses(addresses(step.momenta), place, addresses(step.weights)), rate)
            for step, place, rate in zip(steps, places, rates, strict=True)
        ]
        of_step = dict(zip(map(id, steps), self._tables, strict=True))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            pool = None if self._graph is None else self._graph.pool()
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads use the device meanwhile
            try:
                for some in together(steps):
                    step_together(some, [of_step[id(step)] for step in some])
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph, self._table = graph, table


def _numbers(steps: Sequence[MatrixStep]) -> Tensor:
    """Addresses of all gradients, then the rates of every step bit for bit: int64 on the host."""
    places = [gradient.data_ptr() for step in steps for gradient in step.gradients]
    return torch.cat([torch.tensor(places), *(step.rates.view(torch.int64) for step in steps)])


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
