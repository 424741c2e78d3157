"""The guard: quiet on curves as they are, awake on faults as they come, the same after a save."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.train.config import config_sections as config
from gramian.train.loop.guard import ENOUGH, Advice, Fine, Guard, Observation, Rollback, Stop, Verdict
from tests.kit.matrix import examples

QUIET = config.GuardSection(clip_share=0.999)
"""No advice on clipping, which early training earns."""
NATS = {256: math.log(256), 50257: math.log(50257)}


def healthy(seed: int, steps: int, vocabulary: int = 50257, noise: float = 0.1, start: int = 0) -> list[Observation]:
    """A run as runs are: flat in warm-up, then a power law; tailed and correlated noise; norms that fall and vary."""
    random = np.random.default_rng(seed)
    top = math.log(vocabulary)
    floor = top * random.uniform(0.25, 0.5)
    warmup, pace = random.uniform(5, 150), random.uniform(10, 100)
    made = np.arange(start, start + steps)
    mean = floor + (top - floor) * (1 + np.maximum(made - warmup, 0) / pace) ** -0.6
    slow = np.convolve(random.normal(size=steps + 9), np.ones(10) / math.sqrt(10), "valid")
    losses = mean + noise * (0.8 * random.standard_t(5, steps) + 0.4 * slow)
    norms = (random.uniform(0.1, 0.5) + 4 * np.exp(-made / 100)) * np.exp(0.3 * random.normal(size=steps))
    norms[random.random(steps) < 0.01] *= 2
    return [
        Observation(int(step), float(loss), float(norm), clipped=bool(norm > 1))
        for step, loss, norm in zip(made, losses, norms, strict=True)
    ]


def flat(steps: int, loss: float = 3.0, norm: float = 0.5, scale: float | None = None) -> list[Observation]:
    """A plateau with a little noise."""
    return [
        Observation(step, loss + 0.02 * math.sin(7 * step), norm * (1 + 0.1 * math.cos(5 * step)), scale=scale)
        for step in range(steps)
    ]


def watched(guard: Guard, observations: Iterable[Observation]) -> Iterator[tuple[int, Verdict]]:
    """Verdicts that are not fine."""
    for seen in observations:
        verdict = guard.observe(seen)
        if not isinstance(verdict, Fine):
            yield seen.step, verdict


def only(guard: Guard, observations: Iterable[Observation]) -> tuple[int, Rollback]:
    """The one rollback of a curve."""
    found = [(step, verdict) for step, verdict in watched(guard, observations) if not isinstance(verdict, Advice)]
    assert len(found) == 1
    step, verdict = found[0]
    assert isinstance(verdict, Rollback)
    return step, verdict


# ---- quiet -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32 - 1), st.sampled_from([256, 50257]), st.sampled_from([0.02, 0.1, 0.3, 0.6]))
def test_a_healthy_run_is_never_rolled_back(seed: int, vocabulary: int, noise: float) -> None:
    """Of 2,000,000 such steps 2 were, and at most 7 in a run advised on; here are 40,000."""
    found = [verdict for _, verdict in watched(Guard(QUIET), healthy(seed, 2000, vocabulary, noise))]
    assert not [verdict for verdict in found if not isinstance(verdict, Advice)]
    assert len(found) <= 7


def test_a_noisy_beginning_is_no_fault() -> None:
    """Where the medians are of few steps: of 200 runs none is rolled back."""
    curves = [healthy(seed, 60, (256, 50257)[seed % 2], noise=0.6) for seed in range(200)]
    found = [verdict for curve in curves for _, verdict in watched(Guard(QUIET), curve)]
    assert not [verdict for verdict in found if not isinstance(verdict, Advice)]


@pytest.mark.parametrize("slope", [1e-4, 1e-2, 1.0, 30.0])
def test_a_drift_is_no_spike_however_steep(slope: float) -> None:
    drift = [replace(seen, loss=3 + slope * seen.step) for seen in flat(500)]
    assert not [*watched(Guard(config.GuardSection()), drift)]


@pytest.mark.parametrize("growth", [1.05, 1.3, 1.9])
def test_gradients_that_grow_from_small_ones_step_by_step_are_no_fault(growth: float) -> None:
    still = flat(60, norm=1e-4)
    grown = [Observation(60 + i, 3.0, 1e-4 * growth**i) for i in range(20)]
    assert not [*watched(Guard(config.GuardSection()), still + grown)]


def test_nothing_is_compared_before_there_is_enough() -> None:
    """But what is not finite is seen at once."""
    wild = replace(flat(ENOUGH)[-1], loss=300.0, grad_norm=1e9)
    assert not [*watched(Guard(config.GuardSection()), [*flat(ENOUGH - 1), wild])]
    assert [*watched(Guard(config.GuardSection()), [*flat(ENOUGH), replace(wild, step=ENOUGH)])]
    assert isinstance(Guard(config.GuardSection()).observe(Observation(0, math.nan, 1.0)), Rollback)


def test_an_unguarded_run_is_fine_whatever_comes() -> None:
    guard = Guard(config.GuardSection(on=False))
    assert guard.observe(Observation(0, math.nan, math.inf, finite=False)) == Fine()
    assert guard.lr_scale(0) == 1.0


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary, loss", [(50257, 5.0), (50257, 10.0), (256, 3.0), (256, 4.9), (256, 0.5)])
def test_a_collapse_to_the_uniform_distribution_is_a_spike_from_any_loss(vocabulary: int, loss: float) -> None:
    uniform = [Observation(step, NATS[vocabulary], 0.5) for step in (100, 101)]
    guard = Guard(config.GuardSection())
    step, verdict = only(guard, flat(100, loss) + uniform)
    assert step == 101
    assert (verdict.to_before, verdict.skip, verdict.lr_factor) == (99, (99, 100, 101), 0.5)
    assert "nats above its median" in verdict.reason


def test_a_batch_of_eight_times_the_loss_that_leaves_a_trace_is_a_spike() -> None:
    after = [Observation(101, 4.5, 0.5)]
    step, verdict = only(Guard(config.GuardSection()), [*flat(100), Observation(100, 24.0, 4.0), *after])
    assert step == 101
    assert verdict.skip == (99, 100, 101)


def test_one_that_leaves_none_is_told_and_passed_over() -> None:
    curve = flat(200)
    curve[100] = replace(curve[100], loss=24.0, grad_norm=4.0)
    [(step, verdict)] = watched(Guard(config.GuardSection()), curve)
    assert step == 100
    assert isinstance(verdict, Advice)
    assert "loss 24 " in verdict.text


@pytest.mark.parametrize("pattern, fires", [("hh", 1), ("hsh", 2), ("hssh", None), ("shsh", 3), ("h", None)])
def test_two_of_three_steps_are_a_spike(pattern: str, fires: int | None) -> None:
    curve = flat(100) + [Observation(100 + i, 6.0 if kind == "h" else 3.0, 0.5) for i, kind in enumerate(pattern)]
    found = [step for step, verdict in watched(Guard(config.GuardSection()), curve) if isinstance(verdict, Rollback)]
    assert found == ([] if fires is None else [100 + fires])


@pytest.mark.parametrize("excess, high", [(0.49, False), (0.51, True)])
def test_less_than_spike_nats_above_the_median_is_never_high(excess: float, high: bool) -> None:
    still = [Observation(step, 3.0, 0.5) for step in range(50)]
    verdict = Guard(config.GuardSection(spike_nats=0.5)).observe
    for seen in still:
        verdict(seen)
    assert isinstance(verdict(Observation(50, 3.0 + excess, 0.5)), Advice) == high


@pytest.mark.parametrize("deviations, high", [(5.9, False), (6.1, True)])
def test_deviations_are_robust_ones_of_the_window(deviations: float, high: bool) -> None:
    """Half the losses are at 2, half at 4: median 3, MAD 1."""
    guard = Guard(config.GuardSection())
    for step in range(50):
        guard.observe(Observation(step, 2.0 if step % 2 else 4.0, 0.5))
    assert isinstance(guard.observe(Observation(50, 3 + deviations * 1.4826, 0.5)), Advice) == high


def test_what_is_suspicious_never_enters_the_medians() -> None:
    guard = Guard(config.GuardSection())
    curve = [replace(seen, loss=9.0) if seen.step % 10 == 0 and seen.step > 30 else seen for seen in flat(100)]
    curve[55] = replace(curve[55], grad_norm=1e4)
    found = [step for step, _ in watched(guard, curve)]
    assert found == [40, 50, 55, 60, 70, 80, 90]
    sound = guard.state_dict()["sound"]
    assert len(sound) == 50
    assert not {step for step, _, _ in sound} & set(found)


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_loss_that_is_not_finite_takes_the_step_before_back_as_well(loss: float, scale: float | None) -> None:
    bad = Observation(60, loss, math.nan, finite=False, scale=scale)
    step, verdict = only(Guard(config.GuardSection()), [*flat(60, scale=scale), bad])
    assert (step, verdict.to_before, verdict.skip) == (60, 59, (59, 60))
    assert str(loss) in verdict.reason


@pytest.mark.parametrize("bad", [Observation(60, 3.0, 0.5, finite=False), Observation(60, 3.0, math.inf)])
def test_a_gradient_that_is_not_finite_is_a_fault_without_a_scaler(bad: Observation) -> None:
    _, verdict = only(Guard(config.GuardSection()), [*flat(60), bad])
    assert (verdict.to_before, verdict.skip) == (60, (60,))


def test_with_a_scaler_it_is_the_scalers_business() -> None:
    overflow = Observation(60, 3.0, math.inf, finite=False, scale=512.0)
    later = [replace(seen, step=61 + seen.step, scale=512.0) for seen in flat(100)]
    assert not [*watched(Guard(config.GuardSection()), [*flat(60, scale=1024.0), overflow, *later])]


def halving(steps: tuple[int, ...], total: int, first: float = 65536.0) -> Iterator[Observation]:
    """Overflows at some steps, each halves the scale."""
    scale = first
    for seen in flat(total):
        scale = scale / 2 if seen.step in steps else scale
        bad = seen.step in steps
        yield replace(seen, grad_norm=math.inf if bad else seen.grad_norm, finite=not bad, scale=scale)


def test_three_halvings_within_the_window_are_a_fault() -> None:
    step, verdict = only(Guard(config.GuardSection()), halving((60, 70, 109), 110))
    assert (step, verdict.to_before, verdict.skip) == (109, 60, (60, 70, 109))
    assert not [*watched(Guard(config.GuardSection()), halving((60, 70, 110), 200))]
    assert not [*watched(Guard(config.GuardSection(halvings=4)), halving((60, 70, 109), 110))]


def test_overflows_of_one_step_that_is_tried_again_all_count() -> None:
    tries = [Observation(60, 3.0, math.inf, finite=False, scale=1024.0 / 2**i) for i in (1, 2, 3)]
    _, verdict = only(Guard(config.GuardSection()), [*flat(60, scale=1024.0), *tries])
    assert (verdict.to_before, verdict.skip) == (60, (60,))


def test_a_scale_that_is_rolled_back_has_not_fallen() -> None:
    guard = Guard(config.GuardSection(halvings=1))
    grown = [replace(seen, scale=1024.0 if seen.step < 70 else 2048.0) for seen in flat(80)]
    again = [replace(seen, scale=1024.0) for seen in flat(100)[60:]]
    only(guard, [*grown, Observation(80, math.nan, 1.0, scale=2048.0), *again])


def test_the_search_for_the_first_scale_is_no_fault_until_it_falls_below_one() -> None:
    assert not [*watched(Guard(config.GuardSection()), halving(tuple(range(10)), 100))]
    step, verdict = only(Guard(config.GuardSection()), halving(tuple(range(19)), 20))
    assert (step, verdict.skip) == (19 - 1, (16, 17, 18))


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm, fires", [(4.5, False), (5.6, True), (1e6, True)])
def test_one_gradient_ten_times_the_median_is_a_fault(norm: float, fires: bool) -> None:
    curve = [Observation(step, 3.0, 0.5) for step in range(60)] + [Observation(60, 3.0, norm)]
    found = [verdict for _, verdict in watched(Guard(config.GuardSection()), curve)]
    assert bool(found) == fires
    if fires:
        assert isinstance(found[0], Rollback)
        assert (found[0].to_before, found[0].skip) == (60, (60,))
        assert "times its median 0.5" in found[0].reason


@pytest.mark.parametrize("norm, fires", [(60.0, False), (1e10, True)])
def test_gradients_that_vary_much_may_be_long(norm: float, fires: bool) -> None:
    """Norms of 0.1 and 10 in turn: 60 is sixty times the median, and six times the longest, but no outlier."""
    varied = [Observation(step, 3.0, 10.0 if step % 2 else 0.1) for step in range(60)]
    assert bool([*watched(Guard(config.GuardSection()), [*varied, Observation(60, 3.0, norm)])]) == fires


def test_a_long_gradient_with_a_high_loss_takes_the_step_before_back_as_well() -> None:
    _, verdict = only(Guard(config.GuardSection()), [*flat(60), Observation(60, 9.0, 50.0)])
    assert verdict.skip == (59, 60)


# ---- clipping --------------------------------------------------------------------------------------------------------


def test_clipping_is_advised_on_once_per_window() -> None:
    clipped = [replace(seen, clipped=seen.step % 5 == 0) for seen in flat(160)]
    found = [*watched(Guard(config.GuardSection()), clipped)]
    assert [step for step, _ in found] == [49, 99, 149]
    for _, verdict in found:
        assert isinstance(verdict, Advice)
        assert "20% of the last 50 gradients were clipped" in verdict.text
    assert not [*watched(Guard(config.GuardSection(clip_share=0.2)), clipped)]


# ---- after a rollback ------------------------------------------------------------------------------------------------


def test_the_learning_rate_returns_on_a_straight_line() -> None:
    guard = Guard(config.GuardSection(lr_factor=0.5, lr_return=200))
    only(guard, [*flat(300), Observation(300, 3.0, math.inf)])
    assert [guard.lr_scale(step) for step in (280, 300, 301, 350, 400, 499, 500, 501)] == [
        1.0, 0.5, 0.5025, 0.625, 0.75, 0.9975, 1.0, 1.0,
    ]  # fmt: skip
    verdict = guard.observe(Observation(400, 3.0, math.inf))
    assert isinstance(verdict, Rollback)
    assert verdict.lr_factor == 0.75 * 0.5
    assert guard.lr_scale(450) == 0.875 * 0.625
    assert guard.lr_scale(600) == 1.0
    assert len(guard.state_dict()["taken"]) == 2


def test_a_return_in_no_steps_is_one_at_once() -> None:
    guard = Guard(config.GuardSection(lr_return=0))
    only(guard, [Observation(7, math.nan, 1.0)])
    assert [guard.lr_scale(step) for step in (6, 7, 8)] == [1.0, 1.0, 1.0]


def test_one_rollback_more_than_allowed_stops_with_a_report() -> None:
    guard = Guard(config.GuardSection(max_rollbacks=3))
    curve = flat(1300)
    for step in (100, 500, 900, 1000):
        curve[step] = replace(curve[step], grad_norm=math.inf)
    found = [*watched(guard, curve)]
    assert [step for step, _ in found] == [100, 500, 900, 1000]
    assert [type(verdict) for _, verdict in found] == [Rollback] * 3 + [Stop]
    stop = found[-1][1]
    assert isinstance(stop, Stop)
    assert len(stop.report.splitlines()) == 4
    for step in (100, 500, 900, 1000):
        assert f"step {step}: a gradient is not finite" in stop.report


def test_old_rollbacks_do_not_count() -> None:
    curve = flat(2200)
    for step in (100, 500, 900, 1100, 1500):
        curve[step] = replace(curve[step], grad_norm=math.inf)
    found = [*watched(Guard(config.GuardSection(max_rollbacks=3)), curve)]
    assert [type(verdict) for _, verdict in found] == [Rollback] * 5
    assert isinstance(Guard(config.GuardSection(max_rollbacks=0)).observe(Observation(0, math.nan, 1.0)), Stop)


def test_the_same_fault_again_and_again_stops_at_the_same_step() -> None:
    guard = Guard(config.GuardSection(max_rollbacks=2))
    ends = []
    for _ in range(3):
        curve = [seen for seen in flat(80) if seen.step >= (60 if ends else 0)]
        ends += [type(verdict) for _, verdict in watched(guard, [*curve, Observation(80, math.nan, 1.0)])]
    assert ends == [Rollback, Rollback, Stop]


def test_steps_that_come_again_count_once() -> None:
    """A guard that saw steps twice judges on as one that saw them once."""
    once, twice = Guard(config.GuardSection()), Guard(config.GuardSection())
    for seen in healthy(5, 90):
        once.observe(seen)
    for seen in [*healthy(5, 90), *healthy(5, 90)[70:]]:
        twice.observe(seen)
    # The window of the second one has lost nothing but what had already left it when steps came again.
    assert twice.state_dict()["sound"] == once.state_dict()["sound"][-len(twice.state_dict()["sound"]) :]
    assert twice.state_dict()["recent"] == once.state_dict()["recent"]


# ---- saved and loaded ------------------------------------------------------------------------------------------------


def faulty(seed: int) -> list[Observation]:
    """A scaled run with every kind of fault, and the way back after each."""
    curve: list[Observation] = []
    scale = 1024.0
    for seen in healthy(seed, 400, noise=0.05):
        step, bad = seen.step, seen.step in (120, 130, 140)
        scale = scale / 2 if bad else scale
        seen = replace(seen, finite=not bad, grad_norm=math.inf if bad else seen.grad_norm, scale=scale)
        if step in (200, 201):
            seen = replace(seen, loss=60.0)
        if step == 300:
            seen = replace(seen, grad_norm=1e4)
        if step == 350:
            seen = replace(seen, loss=math.nan)
        curve.append(seen)
        if step in (140, 201):
            curve += healthy(seed, 20, noise=0.05, start=step - 20)
    return curve


@settings(max_examples=examples(40))
@given(st.integers(0, 10), st.integers(0, 439))
def test_a_guard_saved_at_any_point_goes_on_as_if_it_had_not_been(seed: int, point: int) -> None:
    curve = faulty(seed)
    whole = Guard(config.GuardSection())
    told = [whole.observe(seen) for seen in curve]
    assert sum(isinstance(verdict, Rollback) for verdict in told) == 3
    assert sum(isinstance(verdict, Stop) for verdict in told) == 1

    first = Guard(config.GuardSection())
    verdicts = [first.observe(seen) for seen in curve[:point]]
    second = Guard(config.GuardSection())
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    verdicts += [second.observe(seen) for seen in curve[point:]]
    assert verdicts == told
    assert second.state_dict() == whole.state_dict()
    assert [second.lr_scale(step) for step in range(500)] == [whole.lr_scale(step) for step in range(500)]


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(GramianError, match="guard state: got .*; expected"):
        Guard(config.GuardSection()).load_state_dict({"sound": []})
