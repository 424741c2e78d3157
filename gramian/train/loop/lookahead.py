"""Batches are fetched one step ahead, so that a cached teacher reads the next step's rows during this one."""

from collections.abc import Iterator

from gramian.data import StepBatch
from gramian.distill.cache.reader import Cache


def announced(batches: Iterator[StepBatch], cache: Cache) -> Iterator[StepBatch]:
    """Yield the same batches; before one is yielded, the cache starts to read the first micro-batch of the next (`upcoming`).

    `DistillingStepper` announces later micro-batches during their own step, so that the host stores the rows of at most two
    unused micro-batches. A live teacher is not announced to: its forward would compete with a step of the student, and its
    signal would occupy the device for as long. The end of `batches` or an error is reached one step early, and passed on when
    that batch is due.
    """
    current: StepBatch | None = None
    try:
        for batch in batches:
            cache.upcoming(batch.micro[0])
            if current is not None:
                yield current
            current = batch
    except Exception:  # of any kind: the batch before it is still due
        if current is not None:
            yield current
        raise
    if current is not None:
        yield current
