"""Debiased moving averages against the weighted mean that they stand for, written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

import gramian
from gramian.statistics import MovingAverage
from tests.kit.matrix import FULL

quick = settings(max_examples=200 if FULL else 25)


def written_out(steps: list[tuple[float, float] | None], decay: float) -> float:
    """Σ β^(t−s) w x / Σ β^(t−s) w over the steps that had a value."""
    ages = [(decay ** (len(steps) - 1 - s), *step) for s, step in enumerate(steps) if step is not None]
    return sum(f * w * x for f, x, w in ages) / sum(f * w for f, _, w in ages)


def run(steps: list[tuple[float, float] | None], decay: float) -> MovingAverage:
    average = MovingAverage(decay)
    for step in steps:
        average.update(
            {} if step is None else {"x": torch.tensor([step[0], 2 * step[0]])}, 1.0 if step is None else step[1]
        )
    return average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_a_constant_is_its_own_average_from_the_first_step_on(decay: float) -> None:
    average, x = MovingAverage(decay), torch.tensor([3.0, -1.0, 0.0])
    for _ in range(12):
        average.update({"x": x})
        torch.testing.assert_close(average.value()["x"], x.double(), rtol=1e-14, atol=0)


def test_the_average_is_the_one_of_adam_where_weights_are_equal() -> None:
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    average, m = MovingAverage(0.9), torch.zeros(4, dtype=torch.float64)
    for step, row in enumerate(x, 1):
        average.update({"x": row})
        m = 0.9 * m + 0.1 * row
        torch.testing.assert_close(average.value()["x"], m / (1 - 0.9**step), rtol=1e-13, atol=1e-15)


steps = st.lists(st.none() | st.tuples(st.floats(-10, 10, width=32), st.floats(0.01, 100)), min_size=1, max_size=8)


@quick
@given(steps, st.sampled_from([0.3, 0.9, 0.99]))
def test_late_and_left_out_tensors_are_averaged_by_the_weight_they_have(
    sequence: list[tuple[float, float] | None], decay: float
) -> None:
    average = run(sequence, decay)
    if all(step is None for step in sequence):
        assert average.value() == {}
        return
    want = written_out(sequence, decay)
    torch.testing.assert_close(
        average.value()["x"], torch.tensor([want, 2 * want], dtype=torch.float64), rtol=1e-10, atol=1e-10
    )


def test_a_tensor_that_stays_away_keeps_its_value_and_forgets_its_weight() -> None:
    average = MovingAverage(0.5)
    average.update({"rare": torch.tensor([7.0]), "often": torch.tensor([1.0])})
    for _ in range(3000):  # β^3000 is 0 in float64
        average.update({"often": torch.tensor([1.0])})
    assert average.value()["rare"] == 7.0
    average.update({"rare": torch.tensor([2.0])})
    assert average.value()["rare"] == 2.0


def test_state_goes_through_a_file_and_the_average_goes_on() -> None:
    sequence: list[tuple[float, float] | None] = [(1.0, 2.0), None, (4.0, 1.0), (-2.0, 3.0), None, (0.5, 1.0)]
    first, second = run(sequence[:3], 0.8), MovingAverage(0.8)
    second.load_state_dict(load(save(first.state_dict())))
    for step in sequence[3:]:
        second.update(
            {} if step is None else {"x": torch.tensor([step[0], 2 * step[0]])}, 1.0 if step is None else step[1]
        )
    values: Tensor = second.value()["x"]
    torch.testing.assert_close(values, run(sequence, 0.8).value()["x"], rtol=0, atol=0)
    assert values[0] == pytest.approx(written_out(sequence, 0.8))


def test_what_is_no_step_is_refused() -> None:
    for decay in (1.0, -0.1, float("nan"), "0.9", None):
        with pytest.raises(gramian.GramianError, match="^decay: expected a number in"):
            MovingAverage(decay)  # type: ignore[arg-type]
    average = run([(1.0, 1.0)], 0.5)
    with pytest.raises(gramian.GramianError, match=r"^x: has shape \[3\]; expected \[2\]"):
        average.update({"x": torch.ones(3)})
    with pytest.raises(gramian.GramianError, match="^weight: "):
        average.update({"x": torch.ones(2)}, -1.0)
    with pytest.raises(gramian.GramianError, match="^decay: the state has 0.5; expected 0.9"):
        MovingAverage(0.9).load_state_dict(average.state_dict())
    with pytest.raises(gramian.GramianError, match="^state: holds other keys"):
        average.load_state_dict({"clock": torch.zeros(2), "total.x": torch.ones(2)})
    assert average.steps == 1


def test_a_state_that_no_steps_give_is_refused_in_one_line() -> None:
    average = run([(1.0, 1.0), (2.0, 1.0)], 0.5)
    state = average.state_dict()
    for wrong in (
        {**state, "clock": torch.tensor([0.5])},
        {**state, "clock": torch.tensor([0.5, 2.5])},
        {**state, "clock": torch.tensor([0.5, float("nan")])},
        {**state, "clock": 3},
        {**state, "weight.x": torch.tensor([1.0])},
        {**state, "weight.x": torch.tensor([0.0, 2.0])},
        {**state, "weight.x": torch.tensor([1.0, 3.0])},
        {**state, "total.x": torch.ones(2, dtype=torch.complex64)},
        None,
        "x",
    ):
        with pytest.raises(gramian.GramianError, match=r"^(state|clock|x): [^\n]*expected [^\n]*$"):
            average.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(gramian.GramianError, match="^values: got str; expected"):
        average.update("x")  # type: ignore[arg-type]
    assert average.steps == 2 and torch.equal(average.state_dict()["total.x"], state["total.x"])
