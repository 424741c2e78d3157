"""T by its own rule: where it goes, what it says of how it got there, and that nothing else moves it."""

import math

import pytest
import torch
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.distill.loss.temperature import STUCK_STEPS, Temperature, TemperatureOptions

CPU = torch.device("cpu")


def moved(options: TemperatureOptions, steps: int, slope) -> tuple[Temperature, list[list[float]]]:
    """A run whose loss has the gradient slope(step, T) in T."""
    t, told = Temperature(options, steps, CPU), []
    for step in range(steps):
        value = t.begin(step)
        if options.learns:
            (value * slope(step, value.item())).backward()
        t.finish(step, t.gradient())
        told.append(t.values(step).tolist())
    return t, told


def test_a_fixed_one_stays_and_a_schedule_ends_where_it_says() -> None:
    _, fixed = moved(TemperatureOptions("fixed", start=3.0), 5, None)
    assert [row[0] for row in fixed] == [3.0] * 5
    _, line = moved(TemperatureOptions("schedule", start=4.0, end=1.5), 6, None)
    assert [row[0] for row in line] == pytest.approx([4.0, 3.5, 3.0, 2.5, 2.0, 1.5])
    assert not Temperature(TemperatureOptions("schedule"), 5, CPU).begin(0).requires_grad


@pytest.mark.parametrize("kind, sign", [("learnable", -1.0), ("adversarial", 1.0)])
def test_a_step_is_plain_descent_on_the_raw_number_and_an_adversary_goes_up(kind, sign) -> None:
    options = TemperatureOptions(kind, start=2.0, rate=0.3, free=0.0)
    t, _ = moved(options, 4, lambda step, value: 0.7)
    raw = math.log(0.25 / 0.75)
    for step in range(4):
        share = 1 / (1 + math.exp(-raw))
        strength = 1.0 if kind == "learnable" else 0.5 * (1 - math.cos(math.pi * step / 3))
        raw += sign * 0.3 * strength * 0.7 * 4 * share * (1 - share)
    assert float(t.values(3)[0]) == pytest.approx(1 + 4 / (1 + math.exp(-raw)), rel=1e-6)


def test_an_adversary_without_strength_does_not_move_at_all() -> None:
    """The reference's rose during its warm-up: by weight decay."""
    _, told = moved(TemperatureOptions("adversarial", rate=1.0, free=0.5), 20, lambda step, value: 1.0)
    assert [row[0] for row in told[:10]] == pytest.approx([2.0] * 10)
    assert told[-1][0] > 2.0


def test_the_size_of_the_gradient_counts() -> None:
    """Adam would divide it away: T would only integrate the rates."""
    _, small = moved(TemperatureOptions("learnable"), 10, lambda step, value: 0.01)
    _, large = moved(TemperatureOptions("learnable"), 10, lambda step, value: 0.1)
    assert (2 - large[-1][0]) / (2 - small[-1][0]) == pytest.approx(10, rel=0.05)


def test_what_was_learned_is_told_apart_from_what_the_rates_alone_do() -> None:
    _, drifting = moved(TemperatureOptions("learnable", rate=0.05), 100, lambda step, value: 0.5)
    *_, (value, _, alone, _) = drifting
    assert value == pytest.approx(alone, abs=1e-9) and value < 1.5
    _, balanced = moved(TemperatureOptions("learnable", rate=0.5), 400, lambda step, value: value - 1.6)
    *_, (value, _, alone, _) = balanced
    assert value == pytest.approx(1.6, abs=0.01)
    assert abs(value - alone) > 0.1


def test_a_minimised_temperature_runs_into_its_bound_and_that_is_seen() -> None:
    """T² KL of a student that lags falls with T, so a T that is minimised with it runs away from its teacher."""
    generator = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(64, 32, generator=generator)
    student = torch.zeros(64, 32)
    t = Temperature(TemperatureOptions("learnable", start=2.0, rate=2.0), 600, CPU)
    stuck_at = None
    for step in range(600):
        value = t.begin(step)
        kl = F.kl_div(
            F.log_softmax(student / value, -1), F.log_softmax(teacher / value, -1), log_target=True, reduction="none"
        )
        (value**2 * kl.sum(-1).mean()).backward()
        t.finish(step, t.gradient())
        if stuck_at is None and t.values(step)[3] >= STUCK_STEPS:
            stuck_at = step
    at = float(t.values(599)[0])
    assert min(at - 1.0, 5.0 - at) < 0.04
    assert stuck_at is not None and stuck_at < 599
    assert torch.equal(t.values(599)[3], t.values(599)[3].round())


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    t, told = moved(TemperatureOptions("learnable"), 3, lambda step, value: math.inf if step else 0.5)
    assert told[1][0] == told[0][0] == told[2][0] and told[2][1] == 0.0


def test_a_resumed_one_goes_on_bit_for_bit() -> None:
    options = TemperatureOptions("adversarial", rate=0.7, free=0.1)

    def slope(step, value):
        return math.sin(step) + value

    whole, told = moved(options, 30, slope)
    t = Temperature(options, 30, CPU)
    for step in range(30):
        if step == 11:
            state = t.state_dict()
            t = Temperature(options, 30, CPU)
            t.load_state_dict(state)
        value = t.begin(step)
        (value * slope(step, value.item())).backward()
        t.finish(step, t.gradient())
    assert t.values(29).tolist() == told[-1]


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"kind": "learnable", "start": 5.0}, "temperature: expected more than temperature_low"),
        ({"start": 0.0}, "temperature: expected more than 0"),
        ({"low": 3.0, "high": 2.0}, "temperature_low: expected 0 < low < high"),
    ],
)
def test_bounds_that_cannot_be_are_refused(wrong, says) -> None:
    with pytest.raises(GramianError, match=says):
        TemperatureOptions(**wrong)
