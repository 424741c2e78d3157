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
from gramian.privacy.sampling.record_units import RecordUnits


def units_of(loader: Any, unit_of: Any, most: Any, *, poisson: bool) -> RecordUnits | None:
    """The units of a loader's records, from the arguments `unit_of` and `max_records_per_unit` (`most`); None: no units.

    Raises:
        GramianError: for arguments that do not fit each other or the data set, or without Poisson draws, which alone draw all
            records of a unit together.
    """
    if unit_of is None:
        if most is not None:
            raise GramianError(f"max_records_per_unit: is {most!r} without unit_of; expected both, or None")
        return None
    if not poisson:
        raise GramianError(
            "unit_of: has no effect on the loader's own batches, between which a unit would be split; expected poisson_sampling"
        )
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise GramianError(
            f"unit_of: {type(dataset).__name__} has no length; expected a data set with one id for each index"
        )
    return RecordUnits.of(unit_of, most, len(dataset))


def population(
    loader: Any, world_size: int, *, poisson: bool, rate_given: bool, units: RecordUnits | None = None
) -> int | None:
    """Number of records, or of `units`, that the batches of all processes come from; None where it is not known.

    Poisson draws are from the complete data set. The user's own loader reads what its sampler yields in one pass over it:
    `len(sampler)` records on each process. With the data set's length, the sample rate in a subset would be too low.

    Args:
        loader: the loader of this process.
        world_size: number of processes, whose samplers are assumed to yield different records.
        poisson: True if Poisson draws replace its sampler.
        rate_given: True if the user gave the sample rate, which need not be computed.
        units: the units of the records, if they are drawn by unit.

    Raises:
        GramianError: for a sampler that Poisson draws from all records cannot replace; or, without a given rate, for one that
            may yield a record several times in a pass.
    """
    dataset = getattr(loader, "dataset", None)
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return None
    if isinstance(dataset, IterableDataset) or isinstance(loader, PrivateLoader) or not hasattr(loader, "sampler"):
        return size if units is None else len(units)
    sampler = _sampler_of(loader)
    if poisson:
        if _goes_over(sampler) != size:
            raise GramianError(
                f"data_loader: its {type(sampler).__name__} would give way to draws from the whole data set; expected no "
                "sampler, torch.utils.data.Subset for a part of the data, or poisson_sampling=False"
            )
        return size if units is None else len(units)
    yielded = _yields(sampler, world_size)
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
    if _of_accelerate(batches, "BatchSamplerShard"):
        batches = batches.batch_sampler  # each process takes its share of these
    return batches.sampler if type(batches) is BatchSampler else batches


def batch_size_of(loader: Any) -> int | None:
    """Records of a batch of this process, also of a loader that was prepared by Accelerate; None where it is not known."""
    size, batches = getattr(loader, "batch_size", None), getattr(loader, "batch_sampler", None)
    if size is not None or batches is None:
        return size
    if _of_accelerate(batches, "BatchSamplerShard"):
        shares = batches.num_processes if batches.split_batches else 1
        return None if batches.batch_size is None else int(batches.batch_size // shares)
    return int(batches.batch_size) if type(batches) is BatchSampler else None


def _of_accelerate(value: Any, name: str) -> bool:
    """True for an object of this class of Hugging Face's Accelerate, which need not be installed."""
    return type(value).__name__ == name and type(value).__module__.startswith("accelerate.")


def _goes_over(sampler: Any) -> int | None:
    """Number of records that a sampler yields once each in a pass (DistributedSampler: on all processes); None: not known."""
    kind = type(sampler)
    if kind is DistributedSampler:
        return len(sampler.dataset)
    shuffles = kind is RandomSampler or _of_accelerate(sampler, "SeedableRandomSampler")
    if kind is SequentialSampler or (shuffles and not sampler.replacement):
        return len(sampler.data_source) if len(sampler) == len(sampler.data_source) else None
    return None


def _yields(sampler: Any, world_size: int) -> int | None:
    """Number of records that the samplers of all processes yield in a pass, if none is yielded twice; None: not known.

    Only exact types of samplers are known: a subclass may do anything.
    """
    kind, everywhere = type(sampler), len(sampler) * world_size if isinstance(sampler, Sized) else 0
    if kind is DistributedSampler:
        return min(everywhere, len(sampler.dataset))
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement):
        return min(everywhere, len(sampler.data_source) * world_size)
    if kind is WeightedRandomSampler and not sampler.replacement:
        return everywhere
    if kind is SubsetRandomSampler and len({int(index) for index in sampler.indices}) == len(sampler):
        return everywhere
    return None
