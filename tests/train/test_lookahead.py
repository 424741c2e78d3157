"""A cached teacher's rows are read a step ahead; nothing else about a run is different."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.data import Batches, DataWorkerDied, StepBatch
from gramian.distill.cache.reader import Cache
from gramian.train.build import run_parts as building
from gramian.train.build.run_parts import Parts, build
from gramian.train.loop.lookahead import announced
from gramian.train.loop.plain_stepper import PlainStepper
from tests.train.distilled import LEARNED, cache_of, metrics, student
from tests.train.runs import ONE, events, run

pytestmark = pytest.mark.xdist_group("distill")


# ---- the iterator --------------------------------------------------------------------------------------------------------


class Told:
    """In the place of a cache: remembers what it is told of, among other things that happen."""

    def __init__(self, happened: list[Any]) -> None:
        self._happened = happened

    def upcoming(self, batch: dict[str, Tensor]) -> None:
        self._happened.append(("announced", int(batch["windows"])))


def numbered(happened: list[Any], count: int, end: BaseException | None = None) -> Iterator[StepBatch]:
    for position in range(count):
        happened.append(("pulled", position))
        yield StepBatch(position, [{"windows": torch.tensor(position)}, {"windows": torch.tensor(-1)}], 1)
    happened.append(("pulled", count))
    if end is not None:
        raise end


def ahead(happened: list[Any], count: int, end: BaseException | None = None) -> Iterator[StepBatch]:
    return announced(numbered(happened, count, end), Told(happened))  # type: ignore[arg-type]


def test_the_next_batch_is_announced_before_one_is_given() -> None:
    happened: list[Any] = []
    batches = ahead(happened, 9)
    assert happened == []
    assert next(batches).position == 0
    assert happened == [("pulled", 0), ("announced", 0), ("pulled", 1), ("announced", 1)]
    happened.clear()
    assert next(batches).position == 1
    assert happened == [("pulled", 2), ("announced", 2)]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("error", [None, DataWorkerDied("data.workers: gone"), RuntimeError("other")])
def test_an_end_or_an_error_is_told_when_that_batch_is_asked_for(count: int, error: Exception | None) -> None:
    batches = ahead([], count, error)
    assert [next(batches).position for _ in range(count)] == list(range(count))
    with pytest.raises(type(error or StopIteration())) as caught:
        next(batches)
    assert error is None or caught.value is error
    assert list(batches) == []


def test_an_interrupt_is_not_put_off() -> None:
    with pytest.raises(KeyboardInterrupt):
        next(ahead([], 1, KeyboardInterrupt()))


def test_an_iterator_can_be_left() -> None:
    for end in (None, RuntimeError()):
        batches = ahead([], 2, end)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert list(batches) == []


# ---- reads of a run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name of the thread and first window of every read."""
    found: list[tuple[str, int]] = []
    plain = Cache._gathered

    def gathered(self: Cache, windows_B: Tensor) -> Any:
        found.append((threading.current_thread().name, int(windows_B[0])))
        return plain(self, windows_B)

    monkeypatch.setattr(Cache, "_gathered", gathered)
    monkeypatch.setattr("gramian.train.loop.trainer.health_of", lambda parts: ({}, []))  # it reads a batch of its own
    return found


def cached(folder: Path, source: str = "hidden", **sections: Any) -> Any:
    teacher = {**LEARNED, "source": source, "cache": str(cache_of(source))}
    return student(folder, **{"run": {"steps": 12}, "eval": {"every": 6}, "teacher": teacher, **sections})


@pytest.mark.parametrize("micro_batch", [0, 4, 3])
def test_no_read_of_a_run_waits_for_its_step(micro_batch: int, tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    """As many reads as micro-batches, and one of a step that is not taken; all in the thread, which ends with the run."""
    cache_of("hidden")
    reads.clear()
    _, ended = run(cached(tmp_path / "run", data={"micro_batch": micro_batch}))
    assert ended.reason == "done"
    assert len(reads) == 12 * (math.ceil(8 / micro_batch) if micro_batch else 1) + 1
    assert {name.partition("_")[0] for name, _ in reads} == {"teacher-cache"}
    assert not any(thread.name.startswith("teacher-cache") for thread in threading.enumerate())


def test_the_next_steps_rows_are_read_while_a_step_has_not_begun(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    parts = build(cached(tmp_path / "run"), ONE)
    batches: Iterator[Any] = parts.batches_from(3, {4})
    first = next(batches)
    assert parts.teaching is not None and isinstance(parts.teaching.source, Cache)
    held = parts.teaching.source._ahead
    for future in list(held.values()):
        future.result()
    second = next(batches)
    assert (first.position, second.position) == (3, 5)
    assert [window for _, window in reads[:2]] == [int(batch.micro[0]["windows"][0]) for batch in (first, second)]
    parts.close()


def test_a_live_teacher_is_not_a_step_ahead(tmp_path: Path) -> None:
    parts = build(student(tmp_path / "run"), ONE)
    assert parts.teaching is not None and parts.batches is not None
    told: list[Any] = []
    parts.teaching.source.upcoming = told.append  # type: ignore[method-assign]
    next(iter(parts.batches_from(0, ())))
    assert told == []
    parts.close()


# ---- the same run ----------------------------------------------------------------------------------------------------------


def _spoiled(parts: Parts) -> None:
    """A gradient that is not a number, at one position: the run goes back."""
    stepper = parts.stepper
    assert isinstance(stepper, PlainStepper)
    plain = stepper._backward

    def backward(batch: StepBatch, coefficient: float) -> Tensor:
        total = plain(batch, coefficient)
        if batch.position == 27:
            next(p for p in parts.module.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
        return total

    stepper._backward = backward  # type: ignore[method-assign]


def _dying(parts: Parts) -> None:
    """Data workers die before the eighth and the twentieth batch is pulled."""
    batches, pulled = parts.batches, [0]
    assert isinstance(batches, Batches)

    def refuse_dead() -> None:
        pulled[0] += 1
        if pulled[0] in (8, 20):
            raise DataWorkerDied("data.workers: gone; expected them to stay")

    batches._refuse_dead = refuse_dead  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[Parts], None], str, int]] = {
    "rolled back": (_spoiled, "rollback", 1),
    "workers that died": (_dying, "data_worker_died", 2),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_and_without_it_is_the_same_bit_for_bit(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, event, count = FAULTS[fault]
    sections: dict[str, Any] = {"run": {"steps": 32}, "eval": {"every": 20}, "data": {"micro_batch": 5}}
    runs = []
    for name in ("ahead", "plain"):
        if name == "plain":
            monkeypatch.setattr(building, "announced", lambda batches, cache: batches)
        trainer, ended = run(cached(tmp_path / name, **sections), spoil)
        assert ended.reason == "done" and len(events(tmp_path / name, event)) == count
        weights = {key: p.detach().clone() for key, p in trainer.parts.module.named_parameters()}
        lines = [
            {key: line[key] for key in ("step", "loss", "grad_norm", "temperature")}
            for line in metrics(tmp_path / name)
        ]
        runs.append(
            (weights, lines, trainer.progress.trail, trainer.progress.position, sorted(trainer.progress.skipped))
        )
    (weights, *told), (plain_weights, *plain_told) = runs
    assert told == plain_told
    assert all(torch.equal(p, plain_weights[key]) for key, p in weights.items())
