"""The starvation meter: shares of time, and the knob that its advice names."""

import pytest

from gramian.data import starvation
from gramian.data.starvation import StarvationMeter


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(starvation, "time", clock)
    return clock


def measured(clock: Clock, waits: list[float], cores: int = 8, window: int = 50) -> StarvationMeter:
    """Steps of one second each, of which so much was waited."""
    meter = StarvationMeter(window, cores)
    for waited in waits:
        with meter.wait():
            clock.now += waited
        assert meter.share(1.0) == pytest.approx(min(1.0, waited))
    return meter


def test_share_is_of_the_waits_since_the_last_one(clock: Clock) -> None:
    meter = StarvationMeter(cores=1)
    for _ in range(2):
        with meter.wait():
            clock.now += 0.5
    assert meter.seconds == 1.0
    assert meter.share(4.0) == 0.25
    assert meter.share(4.0) == 0.0
    assert meter.share(0.0) == 0.0


def test_a_wait_that_raises_is_timed(clock: Clock) -> None:
    meter = StarvationMeter(cores=1)
    with pytest.raises(StopIteration), meter.wait():
        clock.now += 1.0
        raise StopIteration
    assert meter.seconds == 1.0


@pytest.mark.parametrize(
    ("waits", "workers", "knob"),
    [
        ([0.0] * 10, 4, None),
        ([0.05] * 10, 4, None),
        ([0.3] * 10, 0, "data.workers: 30% of the time waits for data; try 4 in place of 0"),
        ([0.3] * 10, 2, "data.workers: 30% of the time waits for data; try 4 in place of 2"),
        ([0.3] * 10, 6, "data.workers: 30% of the time waits for data; try 8 in place of 6"),
        (
            [0.3] * 10,
            8,
            "data.files: 30% of the time waits for data with a worker on each of 8 cores; try a faster disk",
        ),
        (
            [0.0, 0.8] + [0.0, 0.0, 0.8] * 3,
            4,
            "data.prefetch: 32% of the time waits for data, in bursts; try 4 in place",
        ),
        ([0.9] + [0.0] * 10, 4, None),
        ([0.3] * 5, 4, None),
        ([0.3] * 6, 4, "data.workers"),
    ],
    ids=["none", "little", "no workers", "few", "some", "all cores", "bursts", "start", "too early", "early"],
)
def test_advice_names_the_knob(clock: Clock, waits: list[float], workers: int, knob: str | None) -> None:
    advice = measured(clock, waits).advice(workers, prefetch=2)
    assert advice is None if knob is None else advice is not None and advice.startswith(knob)
    assert "\n" not in (advice or "")


def test_advice_forgets_what_is_long_ago(clock: Clock) -> None:
    assert measured(clock, [0.9] * 20 + [0.0] * 10, window=10).advice(4, 2) is None
    assert measured(clock, [0.9] * 20 + [0.0] * 10, window=30).advice(4, 2) is not None


def test_cores_are_shared_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(starvation.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    meter = StarvationMeter()
    for _ in range(10):
        with meter.wait():
            clock.now += 0.5
        meter.share(1.0)
    assert (meter.advice(1, 2) or "").endswith("try 2 in place of 1")
