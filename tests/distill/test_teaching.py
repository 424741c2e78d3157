"""What distillation adds to a step: T by all processes' gradient, unscaled; events once; a state that is whole."""

import json
import math
from typing import Any

import pytest
import torch

from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.loss_metrics import SUMS
from gramian.distill.loss.temperature import STUCK_STEPS, Temperature, TemperatureOptions
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teaching import EXTRA_FIELDS, Teaching, step_metrics
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.state.nested import merge, split
from tests.distill.teachers import batch_of, gpt, windows

CPU = torch.device("cpu")
ONE = ProcessGrid(0, 1, CPU, "one")


def teaching(kind: Any = "learnable", **options: Any) -> Teaching:
    temperature = Temperature(TemperatureOptions(kind, **options), 300, CPU)
    return Teaching(LiveTeacher(gpt()), temperature, FeatureSwitch(0.1, 10, 0.1), ONE, correlation=0.9)


def step(one: Teaching, number: int, slope: float, scale: float = 1.0) -> float:
    """A step whose loss has this gradient in T, multiplied as a scaler would; T before it."""
    one.begin(number)
    now = one.arguments(batch_of(windows(), [0, 1]))["temperature"]
    (scale * slope * now).backward()
    return float(one.finish(scale)[0])


def extra(correlation: float = 0.5, stuck: float = 0.0) -> dict[str, float]:
    """Sums of a step with this correlation, over four tokens."""
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    y = correlation * x + math.sqrt(1 - correlation**2) * torch.tensor([1.0, 1.0, -1.0, -1.0])
    sums = dict.fromkeys(SUMS, 0.0) | {"terms": 4.0, "gold": 4.0}
    sums |= {"teacher_gold": float(x.sum()), "student_gold": float(y.sum())}
    sums |= {
        "teacher_gold²": float((x * x).sum()),
        "student_gold²": float((y * y).sum()),
        "product": float((x * y).sum()),
    }
    values = {**sums, "feature_loss": 8.0, **dict.fromkeys(Temperature.FIELDS, 2.0), "temperature_stuck": stuck}
    assert set(values) == set(EXTRA_FIELDS)
    return values


def test_the_scale_of_the_loss_does_not_move_the_temperature() -> None:
    plain, scaled = teaching(), teaching()
    for number in range(5):
        assert step(plain, number, 0.3) == pytest.approx(step(scaled, number, 0.3, 1024.0), rel=1e-12)
    assert float(plain.temperature.values(5)[0]) < 2.0


def test_a_gradient_that_overflowed_moves_nothing() -> None:
    one = teaching()
    step(one, 0, 0.3)
    before = float(one.temperature.values(1)[0])
    step(one, 1, math.inf, 65536.0)
    assert float(one.temperature.values(2)[0]) == before


def test_arguments_are_the_teachers_signal_and_the_weight_of_the_step() -> None:
    one, rows = teaching("fixed"), batch_of(windows(), [2, 5])
    for number, weight in ((9, 0.0), (10, 0.1)):
        one.begin(number)
        found = one.arguments(rows)
        assert found["feature_weight"] == weight
        assert not found["temperature"].requires_grad and float(found["temperature"]) == 2.0
        assert torch.equal(found["signal"].hidden_BTD, one.source(rows).hidden_BTD)  # type: ignore[union-attr]


def test_metrics_are_means_and_what_is_unknown_is_none() -> None:
    found = step_metrics(extra(), 4)
    assert found["correlation"] == pytest.approx(0.5, abs=1e-6)
    assert (found["feature_loss"], found["temperature"]) == (2.0, 2.0)
    assert "temperature_stuck" not in found
    empty = step_metrics({**dict.fromkeys(EXTRA_FIELDS, 0.0)}, 0)
    assert empty["kl"] is empty["correlation"] is None
    json.dumps(empty, allow_nan=False)


def test_a_temperature_on_its_bound_is_told_once() -> None:
    one = teaching()
    events = [event for stuck in range(3 * STUCK_STEPS) for event in one.observe_step(extra(stuck=float(stuck)))]
    assert [event["event"] for event in events] == ["temperature_stuck"]
    assert "1 to 5" in events[0]["text"] and "\n" not in events[0]["text"]


def test_a_skipped_step_and_a_resume_do_not_tell_of_the_bound_again_and_leaving_it_does() -> None:
    one, again = teaching(), teaching()
    at = extra(stuck=float(STUCK_STEPS))  # a step that the scaler skips leaves the count as it is
    assert [len(one.observe_step(at)) for _ in range(3)] == [1, 0, 0]
    again.load_state_dict(saved(one))
    assert again.observe_step(at) == []
    assert [len(one.observe_step(extra(stuck=float(stuck)))) for stuck in (0, STUCK_STEPS)] == [0, 1]


def test_a_student_that_is_far_is_told_until_it_is_near_again() -> None:
    one = teaching()
    seen = []
    for number, correlation in enumerate([0.8, 0.7, 0.95, 0.5, 0.4]):
        one.observe_step(extra(correlation))
        seen.append([event["event"] for event in one.validated(20 + number, 3.0)])
    assert seen == [["teacher_far"], [], [], ["teacher_far"], []]


def test_an_evaluation_before_any_step_was_heard_says_nothing() -> None:
    assert teaching().validated(0, 3.0) == []
    unknown = teaching("fixed")
    unknown.observe_step({**extra(), "gold": 0.0})
    assert unknown.validated(20, 3.0) == []


def saved(one: Teaching) -> Any:
    """Through what a checkpoint can hold: tensors, and JSON."""
    tensors: dict[str, torch.Tensor] = {}
    facts = json.loads(json.dumps(split("teaching", one.state_dict(), tensors), allow_nan=False))
    return merge(facts, tensors.__getitem__)


def test_a_resumed_one_goes_on_where_it_was() -> None:
    one, again = teaching(), teaching()
    for number in range(7):
        step(one, number, 0.1 * number)
    one.observe_step(extra(0.6))
    assert [event["event"] for event in one.validated(8, 3.0)] == ["teacher_far"]
    assert [event["event"] for event in one.validated(12, 4.0)] == ["features_off"]
    again.load_state_dict(saved(one))
    assert again.state_dict()["switch"] == one.state_dict()["switch"]
    assert torch.equal(again.temperature.values(7), one.temperature.values(7))
    assert again.validated(16, 9.0) == [] and again.switch.weight(16) == 0.0
    assert step(one, 7, 0.5) == step(again, 7, 0.5)


@pytest.mark.parametrize(("upto", "killed", "weight"), [(25, 20, 0.0), (20, 20, 0.0), (19, None, 0.1), (7, None, 0.1)])
def test_a_rollback_takes_back_the_evaluations_that_are_made_again(
    upto: int, killed: int | None, weight: float
) -> None:
    one = teaching()
    one.validated(5, 3.0)
    before = saved(one)
    step(one, 0, 0.5)
    one.validated(10, 2.5)
    one.validated(20, 9.0)
    one.load_state_dict(before, upto)
    assert float(one.temperature.values(0)[0]) == 2.0
    assert one.switch.killed_at == killed
    assert [one.switch.weight(number) for number in (9, 19, 30)] == [0.0, 0.1, weight]
    if upto == 7:  # the measure is that of step 5 again
        assert one.validated(20, 2.5 + 0.2) == []
        assert one.validated(30, 3.2) != []


def test_the_teacher_has_a_name_of_its_own() -> None:
    one, other = teaching(), Teaching(
        LiveTeacher(gpt(width=8)), Temperature(TemperatureOptions(), 3, CPU), FeatureSwitch(0.0, 0, 0.1), ONE
    )  # fmt: skip
    assert one.teacher == teaching().teacher != other.teacher
    one.close()


@pytest.mark.parametrize("stepped", [True, False])
def test_the_temperature_stays_where_the_student_stays(stepped: bool) -> None:
    """The loss scaler may find an overflow in the student that the temperature's own gradient does not show."""
    world = ProcessGrid(0, 1, torch.device("cpu"), "one")
    temperature = Temperature(TemperatureOptions("learnable"), 10, world.device)
    teaching = Teaching(None, temperature, FeatureSwitch(0.0, 0, 0.1), world)  # type: ignore[arg-type]
    teaching.begin(0)
    (teaching._now * 3.0).backward()
    teaching.finish(1.0, stepped)
    assert (float(temperature.values(0)[0]) != 2.0) == stepped
