"""The kill switch of feature losses: it fires, on evaluations at whatever steps they come, once, and over a resume."""

import math

import pytest

from gramian.distill.feature_switch import FeatureSwitch


def told(switch: FeatureSwitch, losses: dict[int, float]) -> list[int]:
    return [done for done, loss in losses.items() if switch.validated(done, loss) is not None]


def test_features_begin_at_their_step() -> None:
    switch = FeatureSwitch(0.1, 500, 0.1)
    assert [switch.weight(step) for step in (0, 499, 500, 10_000)] == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.parametrize("every", [1, 7, 300, 499, 500, 501, 2000])
def test_a_rise_of_the_perplexity_ends_them_whatever_the_evaluation_interval(every) -> None:
    """The reference took its measure only where a step was 500 and a multiple of 300 at once, which is never."""
    switch = FeatureSwitch(0.1, 500, 0.1)
    losses = {done: 4.0 if done <= 2000 else 4.0 + 1.01 * math.log(1.1) for done in range(every, 6001, every)}
    first = min(done for done in losses if done > 2000)
    assert told(switch, losses) == [first]
    assert switch.killed_at == first and switch.weight(first) == 0.0


def test_less_than_the_tolerance_does_not() -> None:
    switch = FeatureSwitch(0.1, 500, 0.1)
    assert told(switch, {300: 4.0, 600: 4.0 + 0.99 * math.log(1.1), 900: 3.0}) == []
    assert switch.weight(901) == 0.1


def test_the_measure_is_the_newest_before_they_began_not_the_best_nor_the_first() -> None:
    switch = FeatureSwitch(0.1, 500, 0.1)
    assert told(switch, {100: 9.0, 200: 3.0, 400: 4.0, 600: 4.05}) == []
    assert told(switch, {700: 4.2}) == [700]


def test_a_resumed_one_remembers() -> None:
    switch = FeatureSwitch(0.1, 10, 0.1)
    told(switch, {5: 1.0, 20: 2.0})
    again = FeatureSwitch(0.1, 10, 0.1)
    again.load_state_dict(switch.state_dict())
    assert again.weight(30) == 0.0 and again.killed_at == 20
    waiting = FeatureSwitch(0.1, 10, 0.1)
    told(waiting, {5: 1.0})
    again = FeatureSwitch(0.1, 10, 0.1)
    again.load_state_dict(waiting.state_dict())
    assert told(again, {20: 1.2}) == [20]
