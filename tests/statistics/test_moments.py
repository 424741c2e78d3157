"""Weighted moments against two passes over all observations at once, and their intervals against the promised coverage."""

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

import gramian
from gramian.statistics import WeightedMoments
from tests.kit.matrix import FULL
from tests.kit.processes import distributed

quick = settings(max_examples=200 if FULL else 25)


def drawn(n: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Observations [n, *shape] far from 0, where sums of squares would cancel, and weights [n]."""
    generator = torch.Generator().manual_seed(seed)
    x = 1e4 + torch.randn(n, *shape, dtype=torch.float64, generator=generator)
    return x, 0.1 + 5 * torch.rand(n, dtype=torch.float64, generator=generator)


def two_passes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance with reliability weights and standard error, written out, of [n, ...]."""
    w_N = w.reshape(-1, *[1] * (x.dim() - 1))
    mean = (w_N * x).sum(0) / w.sum()
    variance = (w_N * (x - mean).square()).sum(0) / (w.sum() - w.square().sum() / w.sum())
    return mean, variance, (variance * w.square().sum() / w.sum().square()).sqrt()


def assert_moments(moments: WeightedMoments, x: Tensor, w: Tensor, name: str = "x", tolerance: float = 1e-10) -> None:
    mean, variance, error = two_passes(x, w)
    torch.testing.assert_close(moments.mean()[name], mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(moments.variance()[name], variance, rtol=tolerance, atol=0)
    torch.testing.assert_close(moments.standard_error()[name], error, rtol=tolerance, atol=0)
    assert moments.effective_samples()[name] == pytest.approx(float(w.sum() ** 2 / w.square().sum()), rel=1e-12)


def one_by_one(x: Tensor, w: Tensor) -> WeightedMoments:
    moments = WeightedMoments()
    for row, weight in zip(x, w.tolist(), strict=True):
        moments.update({"x": row}, weight)
    return moments


def test_one_observation_after_another_is_two_passes_over_all() -> None:
    x, w = drawn(40, 3, 2)
    assert_moments(one_by_one(x, w), x, w)


def test_rows_at_once_are_one_observation_after_another() -> None:
    x, w = drawn(40, 3, 2)
    moments, plain = WeightedMoments(), WeightedMoments()
    for part in (slice(0, 1), slice(1, 30), slice(30, 30), slice(30, 40)):
        moments.extend({"x": x[part]}, w[part])
        plain.extend({"x": x[part]})
    assert_moments(moments, x, w)
    assert_moments(plain, x, torch.ones(40, dtype=torch.float64))


def test_equal_weights_give_the_textbook_moments_whatever_their_size() -> None:
    x, _ = drawn(30, 4)
    for weight in (1.0, 512.0, 1e-3):
        moments = one_by_one(x, torch.full((30,), weight, dtype=torch.float64))
        torch.testing.assert_close(moments.variance()["x"], x.var(0), rtol=1e-10, atol=0)
        torch.testing.assert_close(moments.standard_error()["x"], x.std(0) / 30**0.5, rtol=1e-10, atol=0)
        assert moments.effective_samples()["x"] == pytest.approx(30, rel=1e-12)


def test_a_tensor_first_seen_late_has_weights_of_its_own() -> None:
    x, w = drawn(20, 3)
    moments = WeightedMoments()
    for step, (row, weight) in enumerate(zip(x, w.tolist(), strict=True)):
        moments.update({"early": row} if step < 12 else {"early": row, "late": row}, weight)
    assert_moments(moments, x, w, "early")
    assert_moments(moments, x[12:], w[12:], "late")


def test_state_is_float64_though_observations_are_not() -> None:
    # A float32 mean stops moving once W is 2^24 times the weight of an observation, and rounds every step before.
    generator = torch.Generator().manual_seed(0)
    x = 1.0 + 1e-6 * torch.randn(2000, 3, generator=generator)
    moments = WeightedMoments()
    moments.extend({"x": x[:1000]})
    for row in x[1000:].split(100):
        moments.extend({"x": row})
    assert all(t.dtype == torch.float64 for t in moments.state_dict().values())
    assert_moments(moments, x.double(), torch.ones(2000, dtype=torch.float64), tolerance=1e-8)


def test_observations_of_weight_0_do_not_count() -> None:
    x, w = drawn(10, 2)
    w[3] = w[7] = 0.0
    rows = WeightedMoments()
    rows.extend({"x": x}, w)
    for moments in (one_by_one(x, w), rows):
        assert_moments(moments, x[w > 0], w[w > 0])
    nothing = WeightedMoments()
    nothing.update({"x": x[0]}, 0.0)
    nothing.extend({"x": x}, torch.zeros(10))
    assert "x" not in nothing and nothing.mean() == {}


def test_rows_of_weight_0_do_not_count_whatever_they_hold() -> None:
    x, w = drawn(10, 2)
    w[3] = w[7] = 0.0
    x[3], x[7, 0] = float("nan"), float("inf")
    moments = WeightedMoments()
    moments.extend({"x": x}, w)
    assert_moments(moments, x[w > 0], w[w > 0])


def test_one_observation_has_a_mean_and_no_variance() -> None:
    moments = WeightedMoments()
    moments.update({"x": torch.tensor([2.0])}, 0.1)
    low, high = moments.interval()["x"]
    assert moments.mean()["x"] == 2.0
    assert all(t.isnan().all() for t in (moments.variance()["x"], moments.standard_error()["x"], low, high))


# ---- merge -----------------------------------------------------------------------------------------------------------

rows = st.lists(st.tuples(st.floats(-100, 100), st.floats(1e-3, 1e3)), max_size=6)


def gathered(pairs: list[tuple[float, float]]) -> WeightedMoments:
    moments = WeightedMoments()
    for value, weight in pairs:
        moments.update({"x": torch.tensor([value, -value, 1.0], dtype=torch.float64)}, weight)
    return moments


def joined(*parts: WeightedMoments) -> WeightedMoments:
    whole = WeightedMoments()
    for part in parts:
        whole.merge(part)
    return whole


def assert_alike(left: WeightedMoments, right: WeightedMoments) -> None:
    one, other = left.state_dict(), right.state_dict()
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-11, atol=1e-11 * (1 + float(value.abs().max())))


@quick
@given(rows, rows, rows)
def test_merge_is_associative_and_equals_one_pass(a: list, b: list, c: list) -> None:
    left = joined(joined(gathered(a), gathered(b)), gathered(c))
    right = joined(gathered(a), joined(gathered(b), gathered(c)))
    assert_alike(left, right)
    assert_alike(left, gathered([*a, *b, *c]))


@quick
@given(rows, rows)
def test_merge_is_commutative_and_leaves_the_other_as_it_was(a: list, b: list) -> None:
    mine, other = gathered(a), gathered(b)
    before = copy.deepcopy(other.state_dict())
    mine.merge(other)
    assert_alike(mine, joined(gathered(b), gathered(a)))
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    mine.merge(mine)
    assert_alike(mine, gathered([*a, *b, *a, *b]))


def test_a_merge_that_fails_changes_nothing() -> None:
    mine, other = WeightedMoments(), WeightedMoments()
    mine.update({"a": torch.ones(2), "b": torch.ones(3)})
    other.update({"a": torch.zeros(2), "b": torch.ones(4)})
    before = mine.state_dict()
    with pytest.raises(gramian.GramianError, match=r"^b: has shape \[4\]; expected \[3\]"):
        mine.merge(other)
    assert all(torch.equal(value, before[key]) for key, value in mine.state_dict().items())


# ---- weights of wide spread ------------------------------------------------------------------------------------------


def exact(pairs: list[tuple[float, float]]) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Mean, variance, squared standard error and n_eff − 1 in rational arithmetic."""
    rows = [(Fraction(value), Fraction(weight)) for value, weight in pairs]
    total, squares = sum(w for _, w in rows), sum(w * w for _, w in rows)
    mean = sum(w * x for x, w in rows) / total
    variance = sum(w * (x - mean) ** 2 for x, w in rows) / (total - squares / total)
    return mean, variance, variance * squares / total**2, total**2 / squares - 1


def assert_exact(moments: WeightedMoments, pairs: list[tuple[float, float]], tolerance: float = 1e-10) -> None:
    mean, variance, squared_error, _ = map(float, exact(pairs))
    scale = max(abs(value) for value, _ in pairs)
    assert float(moments.mean()["x"]) == pytest.approx(mean, rel=0, abs=1e-13 * scale)
    assert float(moments.variance()["x"]) == pytest.approx(variance, rel=tolerance, abs=0)
    assert float(moments.standard_error()["x"]) == pytest.approx(squared_error**0.5, rel=tolerance, abs=0)


def split(pairs: list[tuple[float, float]], sizes: list[int], rows: bool) -> WeightedMoments:
    """Parts by themselves, then joined."""
    parts, start = [], 0
    for size in [*sizes, len(pairs)]:
        part, start = pairs[start : start + size], start + size
        x, w = torch.tensor(part, dtype=torch.float64).reshape(-1, 2).T
        if rows:
            parts.append(WeightedMoments())
            parts[-1].extend({"x": x}, w)
        else:
            parts.append(one_by_one(x, w))
    return joined(*parts)


@pytest.mark.parametrize("spread", [1e8, 1e16, 1e20, 1e100])
@pytest.mark.parametrize("heavy", [0, 2, 3])
@pytest.mark.parametrize("rows", [False, True])
def test_one_observation_that_outweighs_the_others_leaves_the_variance_exact(
    spread: float, heavy: int, rows: bool
) -> None:
    values = [0.3, -1.1, 0.7, 1.9]
    pairs = [(value, spread if i == heavy else 1.0) for i, value in enumerate(values)]
    for sizes in ([], [1, 2], [2], [3]):
        assert_exact(split(pairs, sizes, rows), pairs)


@pytest.mark.parametrize("common", [1e-100, 1e79])
def test_the_largest_and_smallest_weights_neither_overflow_nor_vanish(common: float) -> None:
    pairs = [(0.3, common), (-1.1, 1e21 * common), (0.7, 3e10 * common)]
    for rows in (False, True):
        assert_exact(split(pairs, [1], rows), pairs)


def test_rows_far_from_0_keep_their_deviations_below_a_weight_of_1e20() -> None:
    # A mean that is one rounding off, 2e-12, would add 1e20·(2e-12)² = 4e-4 to deviations of about 1.
    pairs = [(12345.678, 1e20), (12346.1, 1.0), (12344.3, 2.0)]
    for rows in (False, True):
        assert_exact(split(pairs, [], rows), pairs)


spread_rows = st.lists(
    st.tuples(st.integers(-400, 400).map(lambda i: i / 64), st.floats(0, 20).map(lambda power: 10**power)),
    min_size=2,
    max_size=8,
    unique_by=lambda pair: pair[0],
)


@quick
@given(spread_rows, st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_any_split_and_order_is_exact_over_any_spread_of_weights(
    pairs: list[tuple[float, float]], sizes: list[int], rows: bool
) -> None:
    for order in (pairs, pairs[::-1], sorted(pairs, key=lambda pair: pair[1])):
        assert_exact(split(order, sizes, rows), pairs)


def test_intervals_under_one_weight_that_is_all_are_without_end() -> None:
    moments = WeightedMoments()
    for value, weight in ((0.3, 1e20), (-1.1, 1.0), (0.7, 1.0)):
        moments.update({"x": torch.tensor([value, 5.0], dtype=torch.float64)}, weight)
    low, high = moments.interval()["x"]
    assert low.tolist() == [-float("inf"), 5.0] and high.tolist() == [float("inf"), 5.0]
    two = one_by_one(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 1.0]))
    assert float(two.interval(0.95)["x"][1]) == pytest.approx(0.5 + 12.706204736 / 2)


# ---- intervals -------------------------------------------------------------------------------------------------------


def coverage(x: Tensor, w: Tensor, truth: float, level: float = 0.95) -> float:
    """Share of intervals that hold the truth, over repetitions on the last axis of [n, R]."""
    low, high = one_by_one(x, w).interval(level)["x"]
    return float(((low <= truth) & (truth <= high)).double().mean())


@pytest.mark.parametrize("observations, spread", [(8, 1.0), (12, 5.0), (40, 20.0)])
def test_intervals_at_95_percent_cover_the_mean_in_95_of_100_cases(observations: int, spread: float) -> None:
    # 8,000 repetitions: the share itself is known to 0.0024, so bounds of 0.02 are eight standard errors away from 0.95.
    generator = torch.Generator().manual_seed(observations)
    w = 1 + (spread - 1) * torch.rand(observations, dtype=torch.float64, generator=generator)
    x = 3 + 2 * torch.randn(observations, 8000, dtype=torch.float64, generator=generator)
    assert 0.93 <= coverage(x, w, 3.0) <= 0.97
    assert 0.48 <= coverage(x, w, 3.0, level=0.5) <= 0.52


def test_intervals_do_not_narrow_when_weights_are_numbers_of_tokens() -> None:
    # Batches with their tokens as weights: sqrt(var/W) instead of sqrt(var/n_eff) would cover less than 10 %.
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(300, 900, (20,), generator=generator).double()
    x = torch.randn(20, 4000, dtype=torch.float64, generator=generator)
    assert 0.93 <= coverage(x, tokens, 0.0) <= 0.97


def test_means_of_batches_weighted_by_their_size_err_on_the_safe_side() -> None:
    # As the module says: SE² of such means is too large by (n − 1)/(n_eff − 1), that of the samples themselves is not.
    generator = torch.Generator().manual_seed(2)
    sizes = [1, 2, 3, 20, 1, 5, 30, 2, 4, 8]
    batches = [torch.randn(size, 4000, dtype=torch.float64, generator=generator) for size in sizes]
    means, samples = WeightedMoments(), WeightedMoments()
    for batch in batches:
        means.update({"x": batch.mean(0)}, len(batch))
        samples.extend({"x": batch})
    true = 1 / sum(sizes)
    n_eff = means.effective_samples()["x"]
    too_large = (len(sizes) - 1) / (n_eff - 1)
    assert float(means.standard_error()["x"].square().mean()) == pytest.approx(true * too_large, rel=0.05)
    assert float(samples.standard_error()["x"].square().mean()) == pytest.approx(true, rel=0.02)


# ---- at rest, and what is refused ------------------------------------------------------------------------------------


def test_state_goes_through_a_file_and_the_moments_go_on() -> None:
    x, w = drawn(20, 3)
    first, second = one_by_one(x[:9], w[:9]), WeightedMoments()
    second.load_state_dict(load(save(first.state_dict())))
    for row, weight in zip(x[9:], w[9:].tolist(), strict=True):
        second.update({"x": row}, weight)
    assert_moments(second, x, w)


def test_what_is_no_observation_is_refused() -> None:
    moments = one_by_one(*drawn(3, 2))
    before = moments.state_dict()
    for weight in (-1.0, float("nan"), float("inf"), 1e200, 1e-200, "many", None):
        with pytest.raises(gramian.GramianError, match="^weight: got .*; expected 0, or a number from 1e-100 to 1e"):
            moments.update({"x": torch.ones(2)}, weight)
        if isinstance(weight, float):
            with pytest.raises(gramian.GramianError, match="^weights: hold another number; expected 0, or from"):
                moments.extend({"x": torch.ones(1, 2)}, torch.tensor([weight], dtype=torch.float64))
    for value in (1.0, torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(gramian.GramianError, match="^y: got .*; expected a tensor of real numbers$"):
            moments.update({"x": torch.ones(2), "y": value})
    with pytest.raises(gramian.GramianError, match="^x: got .*; expected a tensor of real numbers with one row for"):
        moments.extend({"x": torch.tensor(1.0)})
    with pytest.raises(gramian.GramianError, match=r"^x: has shape \[3\]; expected \[2\]"):
        moments.update({"new": torch.ones(2), "x": torch.ones(3)})
    for weights in (torch.ones(3), [1.0, 1.0, 1.0, 1.0]):
        with pytest.raises(gramian.GramianError, match=r"^weights: got .*; expected a tensor \[4\], one for each row"):
            moments.extend({"x": torch.ones(4, 2)}, weights)  # type: ignore[arg-type]
    with pytest.raises(gramian.GramianError, match="^level: expected a number between"):
        moments.interval(95)
    with pytest.raises(gramian.GramianError, match="^x: is not whole"):
        moments.load_state_dict({"mean.x": before["mean.x"]})
    with pytest.raises(gramian.GramianError, match="^state: holds other keys"):
        moments.load_state_dict({**before, "more": torch.ones(1)})
    after = moments.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, before[key]) for key, value in after.items())


@pytest.mark.parametrize(
    "field, call",
    [
        ("merge", lambda m: m.merge("x")),
        ("values", lambda m: m.update("x")),
        ("rows", lambda m: m.extend("x")),
        ("level", lambda m: m.interval("x")),
        ("state", lambda m: m.load_state_dict(None)),
        ("state", lambda m: m.load_state_dict({"mean.x": 3})),
        ("state", lambda m: m.load_state_dict({3: torch.ones(1)})),
    ],
)
def test_what_is_of_another_kind_is_refused_in_one_line(field: str, call: Callable[[WeightedMoments], Any]) -> None:
    moments = one_by_one(*drawn(3, 2))
    with pytest.raises(gramian.GramianError, match=rf"^{field}: .*expected [^\n]*$"):
        call(moments)


def test_a_state_that_no_observations_give_is_refused() -> None:
    moments = one_by_one(*drawn(3, 2))
    state = moments.state_dict()
    weights = state["weights.x"]
    total, squares, pairs, observations = weights.tolist()
    assert total**2 == pytest.approx(squares + 2 * pairs) and observations == 3
    nan = float("nan")
    for wrong in (
        weights[:3],
        weights[None],
        weights.float(),
        weights * 0,
        weights * nan,
        weights * float("inf"),
        torch.tensor([1e200, 1e300, 1e300, 3.0], dtype=torch.float64),
        weights * torch.tensor([-1.0, 1.0, 1.0, 1.0]),
        weights * torch.tensor([1.0, 1.0, 2.0, 1.0]),
        torch.tensor([total, squares, pairs, 1.0], dtype=torch.float64),
        torch.tensor([total, squares, pairs, 2.5], dtype=torch.float64),
        torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=torch.float64),
    ):
        with pytest.raises(gramian.GramianError, match=r"^x: [^\n]*expected [^\n]*$"):
            moments.load_state_dict({**state, "weights.x": wrong})
    with pytest.raises(gramian.GramianError, match="^x: .*expected"):
        moments.load_state_dict({**state, "deviations.x": -state["deviations.x"]})
    after = moments.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in after.items())


@pytest.mark.full
@distributed(world_size=2)
def test_moments_over_processes_are_those_of_one(rank: int, world_size: int) -> None:
    x, w = drawn(20, 3)
    mine = one_by_one(x[:14] if rank == 0 else x[14:], w[:14] if rank == 0 else w[14:])
    if rank == 1:  # a tensor that the other process has not seen
        mine.extend({"late": x}, w)
    pairs = [(12345.678, 1e20), (12346.1, 1.0), (12344.3, 2.0)]  # one process outweighs the other
    assert_exact(split(pairs[:1] if rank == 0 else pairs[1:], [], rows=False).over(), pairs)
    before = mine.state_dict()
    whole = mine.over()
    assert_moments(whole, x, w)
    assert_moments(whole, x, w, "late")
    assert all(torch.equal(value, before[key]) for key, value in mine.state_dict().items())
    with pytest.raises(gramian.GramianError, match="^x: has shape"):
        other = WeightedMoments()
        other.update({"x": torch.ones(2 + rank)})
        other.over()
