"""Any split of a batch into micro-batches gives the same statistics: those of the loop over all samples.

A split is any list of parts, empty ones included. It reaches a statistic in four ways: several backward passes in one
capture, several captures whose sums are merged, one backward over several forwards, and several captures in any order.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramian
from tests.kit.matrix import FULL, some
from tests.kit.models import CASES
from tests.statistics.problems import (
    INDEPENDENT_TOKENS,
    Problem,
    assert_health,
    assert_noise,
    assert_norms,
    assert_tensors,
    health_by_hooks,
    problem,
    splits,
    token_fisher,
)

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

SAMPLES = 6
NAMES = (
    [*CASES]
    if FULL
    else ["mlp", "gpt", "tied_gpt", "reused", "padded_embedding", "broadcast", "windows", "convnet", "vit", "hf_llama"]
)
quick = settings(max_examples=15 if FULL else 2)


@st.composite
def partitions(draw: st.DrawFn, total: int = SAMPLES) -> list[int]:
    """Sizes of parts, zeros allowed, that add up to all samples."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


orders = st.permutations(range(SAMPLES))
reductions = st.sampled_from(["mean", "sum"])


class Everything:
    """One of each statistic, and what the loop says about all of them."""

    def __init__(self) -> None:
        self.norms, self.fisher, self.tokens = (
            gramian.PerSampleNorms(), gramian.DiagonalFisher(), gramian.DiagonalFisher("token"),
        )  # fmt: skip
        self.noise, self.health = gramian.NoiseScale(), gramian.Health()

    @property
    def all(self) -> list[Any]:
        return [self.norms, self.fisher, self.tokens, self.noise, self.health]

    def check(self, p: Problem, results: dict[Any, Any], order: list[int]) -> None:
        assert_norms(results[self.norms].values, p.norms(order), p.tolerance)
        assert_tensors(results[self.fisher], p.fisher(), p.tolerance)
        assert_noise(results[self.noise], p.noise(), SAMPLES, p.tolerance)
        assert_health(results[self.health], health_by_hooks(p.case.name, SAMPLES), p.tolerance)
        if p.case.name in INDEPENDENT_TOKENS:
            assert_tensors(results[self.tokens], token_fisher(p.case.name, SAMPLES), p.tolerance)


def _allowed(p: Problem, parts: list[int]) -> list[int]:
    return parts if p.case.accepts_empty_batch else [part for part in parts if part]


@pytest.mark.parametrize("name", some(NAMES, 0, 3))
@quick
@given(parts=partitions(), order=orders, reduction=reductions)
def test_several_passes_of_one_capture(name: str, parts: list[int], order: list[int], reduction: str) -> None:
    p, every = problem(name, SAMPLES), Everything()
    model = p.model()
    with gramian.observe(model, *every.all, loss_reduction=reduction) as seen:
        for rows in splits(_allowed(p, parts)):
            p.backward(model, p.rows(order[rows]), reduction)
    every.check(p, {statistic: seen[statistic] for statistic in every.all}, order)


@pytest.mark.parametrize("name", some(NAMES, 1, 3))
@quick
@given(parts=partitions(), order=orders, reduction=reductions)
def test_several_captures_merged(name: str, parts: list[int], order: list[int], reduction: str) -> None:
    p, every = problem(name, SAMPLES), Everything()
    model = p.model()
    merged: dict[Any, Any] = {}
    for rows in splits(_allowed(p, parts)):
        with gramian.observe(model, *every.all, loss_reduction=reduction) as seen:
            p.backward(model, p.rows(order[rows]), reduction)
        for statistic in every.all:
            sums = seen.sums(statistic)
            merged[statistic] = statistic.merge(merged[statistic], sums) if statistic in merged else sums
    every.check(p, {statistic: statistic.finish(sums) for statistic, sums in merged.items()}, order)


@pytest.mark.parametrize("name", some(NAMES, 2, 3))
@quick
@given(parts=partitions(), order=orders, reduction=reductions)
def test_one_backward_over_several_forwards(name: str, parts: list[int], order: list[int], reduction: str) -> None:
    p, every = problem(name, SAMPLES), Everything()
    model = p.model()
    with gramian.observe(model, *every.all, loss_reduction=reduction) as seen:
        batches = [p.rows(order[rows]) for rows in splits(_allowed(p, parts))]
        losses = [p.case.loss(model, *batch, reduction=reduction) for batch in batches]
        torch.stack(losses).sum().backward()
    every.check(p, {statistic: seen[statistic] for statistic in every.all}, order)


@pytest.mark.parametrize("name", ["mlp", "tied_gpt"])
@quick
@given(parts=partitions(), reduction=reductions, data=st.data())
def test_merging_commutes_up_to_the_order_of_samples(name: str, parts: list[int], reduction: str, data: Any) -> None:
    p, every = problem(name, SAMPLES), Everything()
    model, captures = p.model(), []
    parts_in_order = [list(range(SAMPLES))[rows] for rows in splits(parts)]
    for rows in parts_in_order:
        with gramian.observe(model, *every.all, loss_reduction=reduction) as seen:
            p.backward(model, p.rows(rows), reduction)
        captures.append(seen)
    turn = data.draw(st.permutations(range(len(parts))))
    results = {}
    for statistic in every.all:
        sums = captures[turn[0]].sums(statistic)
        for i in turn[1:]:
            sums = statistic.merge(sums, captures[i].sums(statistic))
        results[statistic] = statistic.finish(sums)
    every.check(p, results, [row for i in turn for row in parts_in_order[i]])


@quick
@given(parts=partitions(), data=st.data())
def test_merging_is_associative(parts: list[int], data: Any) -> None:
    p, every = problem("gpt", SAMPLES), Everything()
    model, captures = p.model(), []
    for rows in splits([*parts, 0, 0]):
        with gramian.observe(model, *every.all) as seen:
            p.backward(model, p.rows(rows))
        captures.append(seen)
    results = {}
    for statistic in every.all:
        trees = [capture.sums(statistic) for capture in captures]
        while len(trees) > 1:
            i = data.draw(st.integers(0, len(trees) - 2))
            trees[i : i + 2] = [statistic.merge(trees[i], trees[i + 1])]
        results[statistic] = statistic.finish(trees[0])
    every.check(p, results, [*range(SAMPLES)])


@pytest.mark.parametrize("name", ["mlp", "tied_gpt"])
def test_captures_of_copies_of_a_model_merge_left_then_right(name: str) -> None:
    # As on several ranks: every copy counts its passes from one.
    p, every = problem(name, SAMPLES), Everything()
    merged: dict[Any, Any] = {}
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        model = p.model()
        with gramian.observe(model, *every.all) as seen:
            p.backward(model, p.rows(rows))
        for statistic in every.all:
            sums = seen.sums(statistic)
            merged[statistic] = statistic.merge(merged[statistic], sums) if statistic in merged else sums
    every.check(p, {statistic: statistic.finish(sums) for statistic, sums in merged.items()}, [*range(SAMPLES)])


def test_merging_changes_neither_side() -> None:
    p, every = problem("mlp", SAMPLES), Everything()
    model, captures = p.model(), []
    for rows in (slice(0, 2), slice(2, 6)):
        with gramian.observe(model, *every.all) as seen:
            p.backward(model, p.rows(rows))
        captures.append(seen)
    for statistic in every.all:
        for _ in range(2):
            merged = statistic.merge(captures[0].sums(statistic), captures[1].sums(statistic))
        if statistic is every.fisher:
            assert_tensors(statistic.finish(merged), p.fisher(), p.tolerance)
    assert_tensors(captures[0][every.fisher], p.fisher(slice(0, 2)), p.tolerance)
    assert_norms(captures[0][every.norms].values, p.norms(slice(0, 2)), p.tolerance)
    assert_norms(captures[1][every.norms].values, p.norms(slice(2, 6)), p.tolerance)


@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "convnet"])
@quick
@given(parts=partitions(), reduction=reductions, ids=st.permutations([0, 0, 1, 1, 2, 2]))
def test_units_that_stay_inside_a_part_do_not_notice_the_split(
    name: str, parts: list[int], reduction: str, ids: list[int]
) -> None:
    # Two samples to a unit; parts are cut between units.
    p = problem(name, SAMPLES)
    model = p.model()
    order = sorted(range(SAMPLES), key=lambda i: ids[i])
    pairs = [parts[0] // 2, SAMPLES // 2 - parts[0] // 2]
    with gramian.per_sample_norms(model, reduction) as norms:
        for rows in splits([2 * pair for pair in pairs if pair]):
            chosen = order[rows]
            units = torch.arange(len(chosen)) // 2
            norms.next(sample_ids=units)
            p.backward(model, p.rows(chosen), reduction)
    expected = [
        torch.cat(
            [g[[i for i in range(SAMPLES) if ids[i] == unit]].sum(0).flatten() for g in p.gradients.values()]
        ).norm()
        for unit in range(3)
    ]
    assert_norms(norms.values, torch.stack(expected), p.tolerance)
