"""Batches, a step ahead of whoever computes with them: a cached teacher reads the next step's rows during this one."""

from collections.abc import Iterator

from gramian.data import StepBatch
from gramian.distill.cache.reader import Cache


def announced(batches: Iterator[StepBatch], cache: Cache) -> Iterator[StepBatch]:
    """The same batches. Before one is given, the next is at hand, and the cache has been told of its first micro-batch.

    Later micro-batches are announced by `Stepper`, in their own step, so that the host holds the rows of at most two that were
    not asked for yet. A live teacher is told of nothing here: its forward would compete with a whole step, and its signal
    occupy the device for as long.

    Args:
        batches: in their order. Where they end, or fail, is found out a step early, and told when that batch is asked for.
        cache: of the teacher's signal.
    """
    held: StepBatch | None = None
    try:
        for batch in batches:
            cache.upcoming(batch.micro[0])
            if held is not None:
                yield held
            held = batch
    except Exception:
        if held is not None:
            yield held
        raise
    if held is not None:
        yield held
