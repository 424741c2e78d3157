"""The number of records that a loader's batches come from, by which the sample rate is computed."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gramian.core.errors import GramianError
from gramian.privacy.sampling.private_loader import PrivateLoader


def population(loader: Any, world: int, *, poisson: bool, rate_given: bool) -> int | None:
    """Number of records that the batches of all processes come from; None where it is not known.

    Poisson draws are from the complete data set. The user's own loader reads what its sampler yields in a pass:
    `len(sampler)`
    records on each process. With the data set's length the rate of a record in a subset would be understated.

    Args:
        loader: the loader of this process.
        world: number of processes, whose samplers are assumed to yield different records.
        poisson: True if Poisson draws replace its sampler.
        rate_given: True if the user gave the sample rate, which need not be computed.

    Raises:
        GramianError: for a sampler that Poisson draws would not follow, or whose records may repeat in a pass.
    """
    dataset = getattr(loader, "dataset", None)
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return None
    if isinstance(dataset, IterableDataset) or isinstance(loader, PrivateLoader) or not hasattr(loader, "sampler"):
        return size
    sampler = _sampler_of(loader)
    if poisson:
        if _goes_over(sampler) != size:
            raise GramianError(
                f"data_loader: its {type(sampler).__name__} would give way to draws from the whole data set; expected no "
                "sampler, torch.utils.data.Subset for a part of the data, or poisson_sampling=False"
            )
        return size
    yielded = _yields(sampler, world)
    if yielded is None and not rate_given:
        raise GramianError(
            f"sample_rate: the loader's {type(sampler).__name__} may yield a record several times in a pass; "
            "expected it as an argument: the largest probability of a record to be in a step"
        )
    return None if yielded is None else min(size, yielded)


def _sampler_of(loader: Any) -> Any:
    """The object that yields a loader's indices: its sampler, or a batch sampler of the user's own."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _goes_over(sampler: Any) -> int | None:
    """Number of records that a sampler yields once each in a pass, up to padding between processes; None: not known."""
    kind = type(sampler)
    if kind is DistributedSampler:
        return len(sampler.dataset)
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement):
        return len(sampler.data_source) if len(sampler) == len(sampler.data_source) else None
    return None


def _yields(sampler: Any, world: int) -> int | None:
    """Number of records that the samplers of all processes yield in a pass, if none is yielded twice; None: not known.

    Only exact types of samplers are known: a subclass may do anything.
    """
    kind, everywhere = type(sampler), len(sampler) * world if isinstance(sampler, Sized) else 0
    if kind is DistributedSampler:
        return min(everywhere, len(sampler.dataset))
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement):
        return min(everywhere, len(sampler.data_source) * world)
    if kind is WeightedRandomSampler and not sampler.replacement:
        return everywhere
    if kind is SubsetRandomSampler and len({int(index) for index in sampler.indices}) == len(sampler):
        return everywhere
    return None
