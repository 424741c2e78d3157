"""Learning rates: where they start, what they pass, and where they end."""

import math

import pytest

from gramian.train.config.config_sections import OptimizerSection, ScheduleSection
from gramian.train.loop.schedule import learning_rate

PEAK = OptimizerSection(lr=1e-3)


def rates(steps: int, **options: object) -> list[float]:
    schedule = ScheduleSection(**options)  # type: ignore[arg-type]
    return [learning_rate(step, steps, schedule, PEAK) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps, warmup", [(5000, 100), (300, 50), (7, 3), (2, 1), (1, 0), (2, 0), (3, 2)])
@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_the_last_step_has_the_floor_and_nothing_leaves_the_band(
    kind: str, steps: int, warmup: int, floor: float
) -> None:
    found = rates(steps, kind=kind, warmup=warmup, floor=floor)
    assert found[-1] == (floor if steps - 1 >= warmup else pytest.approx(1e-3))
    assert max(found) <= 1e-3
    assert min(found) >= min(floor, 1e-3 / max(warmup, 1))
    falling = found[warmup:]
    assert falling == sorted(falling, reverse=True)


def test_warm_up_is_a_line_that_reaches_the_peak() -> None:
    found = rates(100, warmup=4)
    assert found[:5] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(101, warmup=0, floor=2e-4)
    assert found[50] == pytest.approx((1e-3 + 2e-4) / 2)
    assert found[25] == pytest.approx(2e-4 + 8e-4 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_holds_and_then_falls_in_a_line() -> None:
    found = rates(101, kind="wsd", warmup=10, decay=20)
    assert found[10:81] == [1e-3] * 71
    assert found[90] == pytest.approx(0.5e-3)
    assert len(set(rates(100, kind="wsd", warmup=10)[10:80])) == 1


def test_constant_stays() -> None:
    assert rates(50, kind="constant", warmup=5)[5:] == [1e-3] * 45
