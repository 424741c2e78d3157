"""Samplers of the user's loader: whose records a rate is a share of, and which of them Poisson draws cannot stand in for."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import gramian
from gramian.privacy.sampling.population import population
from tests.kit.private import attach
from tests.kit.refusals import refusal

SIZE, BATCH = 40, 4
DATA = TensorDataset(torch.arange(SIZE, dtype=torch.float32)[:, None])


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Pairs(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [0, 1]])


def distributed(rank: int = 0, size: int = SIZE, **options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(range(size), num_replicas=3, rank=rank, **options)  # type: ignore[arg-type]


def private(loader: Any, poisson_sampling: bool, **options: Any) -> tuple[gramian.PrivacyEngine, Any]:
    engine, model = gramian.PrivacyEngine("rdp"), nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling: is off")
        *_, made = attach(engine, model, loader, poisson_sampling=poisson_sampling, **options)
    return engine, made


PARTS = (
    SubsetRandomSampler(range(10)),
    WeightedRandomSampler([1.0] * 10 + [0.0] * 30, 10),
    WeightedRandomSampler([1.0] * SIZE, 10, replacement=False),
    RandomSampler(DATA, replacement=True),
    RandomSampler(DATA, num_samples=10),
    RandomSampler(range(10)),
    SequentialSampler(range(10)),
    distributed(size=10),
    Backwards(DATA),
    list(range(10)),
)


@pytest.mark.parametrize("sampler", PARTS, ids=lambda sampler: type(sampler).__name__)
def test_poisson_draws_do_not_replace_a_sampler_that_chooses(sampler: Any) -> None:
    for options in ({}, {"expected_batch": BATCH, "sample_rate": 0.1}):
        with refusal(r"data_loader: its \w+ would give way .*Subset") as caught:
            private(DataLoader(DATA, batch_size=BATCH, sampler=sampler), True, **options)
        assert "\n" not in str(caught.value)


def test_poisson_draws_do_not_replace_batches_of_the_users_own() -> None:
    for batches in (Pairs(), BatchSampler(SubsetRandomSampler(range(10)), BATCH, False)):
        with refusal("data_loader: its (Pairs|SubsetRandomSampler) would give way"):
            private(DataLoader(DATA, batch_sampler=batches), True, expected_batch=BATCH)


@pytest.mark.parametrize(
    "sampler",
    [None, SequentialSampler(DATA), RandomSampler(DATA), distributed(), distributed(drop_last=True)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_poisson_draws_replace_samplers_that_leave_nothing_out(sampler: Any) -> None:
    engine, loader = private(DataLoader(DATA, batch_size=BATCH, sampler=sampler), True)
    assert engine.sample_rate == BATCH / SIZE
    assert {int(x) for _ in range(20) for (x_B1,) in _stepless(engine, loader) for x in x_B1} == set(range(SIZE))


def _stepless(engine: gramian.PrivacyEngine, loader: Any) -> Iterator[Any]:
    """The batches of an epoch, each draw counted as if it had been released."""
    for batch in loader:
        engine._ledger.begin()
        engine._model.step.progress.clear()
        yield batch


def test_a_subset_is_the_data_set_that_draws_are_from() -> None:
    engine, loader = private(DataLoader(Subset(DATA, range(10)), batch_size=BATCH, shuffle=True), True)
    assert engine.sample_rate == BATCH / 10
    assert {int(x) for _ in range(20) for (x_B1,) in _stepless(engine, loader) for x in x_B1} == set(range(10))


def test_a_private_loader_may_be_made_private_again() -> None:
    engine, loader = private(DataLoader(DATA, batch_size=BATCH), True)
    engine.detach()
    assert private(loader, True, expected_batch=BATCH)[0].sample_rate == BATCH / SIZE


def drawn_rate(sampler: Any, passes: int = 200) -> float:
    """Oracle: how often the record that comes most often is in a batch."""
    torch.manual_seed(0)
    counts, batches = torch.zeros(SIZE), 0
    for _ in range(passes):
        for (x_B1,) in DataLoader(DATA, batch_size=BATCH, sampler=sampler):
            counts[x_B1.flatten().long()] += 1
            batches += 1
    return float(counts.max()) / batches


@pytest.mark.parametrize(
    "sampler, records",
    [
        (None, SIZE),
        (RandomSampler(DATA), SIZE),
        (SubsetRandomSampler(range(12)), 12),
        (SubsetRandomSampler(torch.arange(12)), 12),  # type: ignore[arg-type]
        (SequentialSampler(range(12)), 12),
        (WeightedRandomSampler([1000.0] * 12 + [0.01] * 28, 12, replacement=False), 12),
        (RandomSampler(range(12), num_samples=24), 12),
        (RandomSampler(DATA, num_samples=2 * SIZE), SIZE),
        (distributed(), 14),  # one process of three: its share
        (distributed(drop_last=True), 13),
    ],
)
def test_without_poisson_the_rate_is_not_below_that_of_any_record(sampler: Any, records: int) -> None:
    engine, _ = private(DataLoader(DATA, batch_size=BATCH, sampler=sampler), False)
    assert engine.sample_rate == BATCH / records
    assert drawn_rate(sampler) <= engine.sample_rate * (1 + 1e-6)


def test_processes_together_read_all_that_their_samplers_yield() -> None:
    for sampler, records in (
        (distributed(), SIZE),
        (distributed(drop_last=True), 39),
        (SubsetRandomSampler(range(10)), 30),
        (None, SIZE),
    ):
        loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler)
        assert population(loader, 3, poisson=False, rate_given=False) == records


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 8 + [0.0] * 32, 10),
        RandomSampler(DATA, replacement=True),
        SubsetRandomSampler([0, 0, 1, 2]),
        SubsetRandomSampler(torch.tensor([0, 0, 1, 2])),  # type: ignore[arg-type]
        Backwards(DATA),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_may_repeat_records_needs_a_rate(sampler: Any) -> None:
    loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler)
    with refusal(r"sample_rate: the loader's \w+ may yield a record several"):
        private(loader, False)
    with refusal(r"sample_rate: the loader's \w+ may yield a record several"):
        private(loader, False, expected_batch=BATCH)
    engine, _ = private(loader, False, expected_batch=BATCH, sample_rate=0.5)
    assert (engine.sample_rate, engine.expected_batch) == (0.5, BATCH)


def test_batches_of_the_users_own_need_a_rate() -> None:
    loader = DataLoader(DATA, batch_sampler=Pairs())
    with refusal("sample_rate: the loader's Pairs may yield"):
        private(loader, False, expected_batch=2)
    assert private(loader, False, expected_batch=2, sample_rate=1.0)[0].sample_rate == 1.0


@pytest.mark.full
def test_a_target_counts_the_steps_of_the_subset() -> None:
    """Ten epochs over 12 records in batches of 4 are 30 steps at rate 1/3, and end just below the target."""
    engine, model = gramian.PrivacyEngine("rdp"), nn.Linear(1, 1)
    sampler = SubsetRandomSampler(range(12))
    with pytest.warns(UserWarning, match="poisson_sampling: is off"):
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=4, sampler=sampler), max_grad_norm=1.0, target_epsilon=3.0,
            target_delta=1e-5, epochs=10, poisson_sampling=False,
        )  # fmt: skip
    for _ in range(10):
        for (x_B1,) in loader:
            model(x_B1).sum().backward()
            optimizer.step()
    assert engine.steps == 30 and 2.9 < engine.get_epsilon(1e-5) <= 3.0


class Sized(IterableDataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def test_an_iterable_data_set_with_a_length_has_no_sampler_to_look_at() -> None:
    assert private(DataLoader(Sized(), batch_size=BATCH), False)[0].sample_rate == BATCH / SIZE
