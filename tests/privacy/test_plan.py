"""The planner: the fastest ways that fit, the same every time; and the engine's plan, which follows the shapes."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramian.privacy.clipping import sample_norms
from gramian.privacy.clipping.clipping_plan import (
    MACHINES,
    ClippingPlan,
    Machine,
    Share,
    default_budget,
    plan_clipping,
    ways,
)
from gramian.privacy.clipping.clipping_planner import share_of
from gramian.privacy.clipping.clipping_rule import Clipping
from gramian.taps.gradients import Outer, outer
from tests.kit.matrix import examples, some
from tests.kit.models import CASES
from tests.privacy.problems import assert_sums, clip_norm, private, wanted
from tests.statistics.problems import problem

CPU, HALF = MACHINES["cpu"], MACHINES["cuda half"]


def _linear(name: str, batch: int, tokens: int, rows: int, columns: int, itemsize: int = 2) -> Share:
    held = batch * tokens * (rows + columns) * itemsize
    scaled = batch * tokens * min(rows, columns) * itemsize
    return Share(name, "outer", batch, tokens, (rows, columns), itemsize, held, scaled)


def _way(share: Share, machine: Machine = HALF, algorithm: str = "auto", storage: str = "auto") -> str:
    return ways(share, machine, algorithm, storage)[0].way


# ---- choices ---------------------------------------------------------------------------------------------------------------


def test_short_sequences_take_the_gram_long_ones_keep_and_one_token_is_rank_1() -> None:
    assert _way(_linear("w", 32, 64, 4096, 4096)) == "gram"
    assert _way(_linear("w", 1, 8192, 4096, 4096)) == "keep"
    assert _way(_linear("w", 32, 1, 4096, 4096)) == "rank1"
    assert _way(_linear("w", 8, 4096, 64, 64), storage="bookkeeping") == "direct"
    # A narrow adapter is always kept or done directly, however short the sequence is.
    assert _way(_linear("w", 8, 256, 8, 4096)) in ("keep", "direct")


@pytest.mark.parametrize("tokens", [2, 64, 1024, 8192])
@pytest.mark.parametrize("algorithm", ["gram", "direct"])
def test_a_forced_algorithm_is_the_only_way_open(algorithm: str, tokens: int) -> None:
    found = ways(_linear("w", 4, tokens, 512, 768), HALF, algorithm, "auto")
    assert [row.way for row in found] == [algorithm]


@pytest.mark.parametrize("form, way", [("sum", "sum"), ("rows", "rows"), ("parts", "parts"), ("other", "keep")])
def test_parameters_that_meet_no_choice_have_their_one_way(form: str, way: str) -> None:
    share = Share("b", form, 4, 16, (12,), 4, 4 * 16 * 12 * 4)
    for algorithm, storage in itertools.product(("auto", "gram", "direct"), ("auto", "bookkeeping", "keep")):
        assert [row.way for row in ways(share, CPU, algorithm, storage)] == [way]


def test_keep_is_forced_on_every_matrix() -> None:
    for tokens in (1, 4, 4096):
        assert [row.way for row in ways(_linear("w", 4, tokens, 64, 64), HALF, "auto", "keep")] == ["keep"]


def test_the_ways_of_a_matrix_cost_and_hold_what_the_docstring_says() -> None:
    share, machine = _linear("w", 4, 32, 48, 80), Machine(1e9, 0.0, 2e9, 3e9, 1e8)
    found = {row.way: row for row in ways(share, machine, "auto", "auto")}
    scaling = 2 * share.scaled / 1e8
    assert found["gram"].seconds == pytest.approx(scaling + 4 * 32 * (32 + 128) * (48 + 80) / 2e9)
    assert found["direct"].seconds == pytest.approx(scaling + 2 * 4 * 32 * 48 * 80 / 3e9)
    assert found["keep"].seconds == pytest.approx(3 * 4 * 48 * 80 * 2 / 1e8)
    assert found["gram"].held == found["direct"].held == 4 * 32 * (48 + 80) * 2
    assert found["keep"].held == 4 * 48 * 80 * 2
    weighted = {row.way: row for row in ways(share, Machine(1e9, 5e8, 2e9, 3e9, 1e8), "auto", "auto")}
    slower = 2 * 4 * 32 * 48 * 80 * (1 / 5e8 - 1 / 1e9)
    assert weighted["gram"].seconds == pytest.approx(slower + 4 * 32 * (32 + 128) * (48 + 80) / 2e9)


# ---- budgets ---------------------------------------------------------------------------------------------------------------

shares = st.lists(
    st.builds(
        _linear,
        st.uuids().map(str),
        st.integers(1, 64),
        st.sampled_from([1, 2, 64, 300, 2048]),
        st.sampled_from([8, 64, 1000]),
        st.sampled_from([16, 512]),
        st.sampled_from([2, 4]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(60))
@given(shares, st.floats(0, 1.2))
def test_a_plan_fits_its_budget_or_holds_nothing(found: list[Share], fraction: float) -> None:
    free = plan_clipping(found, HALF, None)
    leanest = sum(min(row.held for row in ways(share, HALF, "auto", "auto")) for share in found)
    budget = int(fraction * free.held)
    plan = plan_clipping(found, HALF, budget)
    assert plan.two_pass == (budget < leanest)
    assert plan.held <= budget
    assert [row.parameter for row in plan.rows] == [share.parameter for share in found]
    assert free.held >= leanest and not free.two_pass
    if not plan.two_pass:
        assert sum(r.seconds for r in plan.rows) >= sum(r.seconds for r in free.rows) - 1e-15
    assert plan_clipping(found, HALF, budget) == plan  # the same every time


@settings(max_examples=examples(30))
@given(shares)
def test_without_a_limit_every_parameter_takes_its_fastest_way(found: list[Share]) -> None:
    plan = plan_clipping(found, HALF, None)
    for share, row in zip(found, plan.rows, strict=True):
        assert row.seconds == min(other.seconds for other in ways(share, HALF, "auto", "auto"))


def test_the_way_that_frees_most_for_least_time_changes_first() -> None:
    # Both would rather keep; the one whose Gram is almost as fast gives way.
    cheap, dear = _linear("cheap", 4, 1250, 4096, 4096), _linear("dear", 4, 1900, 4096, 4096)
    free = plan_clipping([cheap, dear], HALF, None)
    assert {row.parameter: row.way for row in free.rows} == {"cheap": "keep", "dear": "keep"}
    tight = plan_clipping([cheap, dear], HALF, free.held - 1)
    assert tight["dear"].way == "keep" and tight["cheap"].way != "keep"


def test_the_default_budget_is_what_an_ordinary_step_holds_and_one_set_of_weights() -> None:
    matrix = _linear("w", 4, 32, 48, 80)
    bias = Share("b", "sum", 4, 32, (48,), 2, 4 * 32 * 48 * 2)
    assert default_budget([matrix]) == matrix.held + 48 * 80 * 2
    assert default_budget([matrix, bias]) == matrix.held + 48 * 80 * 2 + bias.kept + 48 * 2
    assert not plan_clipping([matrix, bias], HALF, default_budget([matrix, bias])).two_pass


# ---- the table -------------------------------------------------------------------------------------------------------------


def _assert_table(plan: ClippingPlan) -> None:
    lines = str(plan).splitlines()
    assert lines[0].split() == ["parameter", "shape", "tokens", "way", "held", "extra", "time"]
    assert len(lines) == len(plan.rows) + 3 and lines[-2].startswith("total")
    assert lines[-1] == plan.proof == "rows: proven; loss: not proven; adjacency: add or remove one record"
    starts = [match.start() for match in re.finditer(r"\S+(?: \S+)*", lines[0])]
    for line, row in zip(lines[1:], plan.rows, strict=False):
        assert [line[start - 1] for start in starts[1:]] == [" "] * 5, "columns stand under each other"
        assert line.split()[0] == row.parameter and row.way in line.split()
    assert all(line == line.rstrip() and line.isprintable() for line in lines)


@pytest.mark.parametrize("name", some(CASES, 0))
def test_every_model_has_a_plan_and_a_table_with_a_row_for_each_parameter_in_use(name: str) -> None:
    p = problem(name, 4)
    model = p.model()
    with private(model, 1.0) as run:
        assert run.engine.plan is None  # nothing has run
        p.backward(model, p.batch)
        plan = run.engine.plan
        assert plan is not None
        _assert_table(plan)
        names = {key for key, q in model.named_parameters() if q.requires_grad and not key.startswith("spare")}
        assert {row.parameter for row in plan.rows} == names
        assert all(row.shape == dict(model.named_parameters())[row.parameter].shape for row in plan.rows)


# ---- the engine's plan -----------------------------------------------------------------------------------------------------


def test_the_plan_follows_the_batch_and_the_sequence_length() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20, bias=False)).double()
    seen = {}
    with private(model, 1.0, loss_reduction="sum", norm_algorithm="auto") as run:
        for batch, tokens in ((2, 4), (2, 64), (5, 4), (2, 4)):
            shape = (batch, 20) if tokens == 1 else (batch, tokens, 20)
            model(torch.randn(shape, dtype=torch.float64)).square().sum().backward()
            plan = run.engine.plan
            assert plan is not None and plan["0.weight"].tokens == tokens
            if (batch, tokens) in seen:
                assert plan.rows is seen[batch, tokens].rows  # not made again
            seen[batch, tokens] = plan
        model(torch.randn(3, 20, dtype=torch.float64)).square().sum().backward()
        assert run.engine.plan["0.weight"].way == "rank1"
    assert seen[2, 64]["0.bias"].held == seen[2, 4]["0.bias"].held
    assert seen[5, 4].held * 2 == seen[2, 4].held * 5


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
@pytest.mark.parametrize("storage", ["auto", "bookkeeping"])
def test_forced_choices_are_those_of_the_plan_and_those_that_run(
    storage: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("linear_3d", 4)
    model, limit, used = p.model(), clip_norm(p), []
    gram, direct = outer.gram_of, outer.direct_of

    def watched_gram(outers: list[Outer]) -> tuple[torch.Tensor, torch.Tensor]:
        used.extend("gram" for _ in outers)
        return gram(outers)

    def watched_direct(gradient: Outer) -> tuple[torch.Tensor, torch.Tensor]:
        used.append("direct")
        return direct(gradient)

    monkeypatch.setattr(sample_norms, "gram_of", watched_gram)
    monkeypatch.setattr(outer, "direct_of", watched_direct)
    with private(model, limit, clipping=storage, norm_algorithm=algorithm) as run:
        p.backward(model, p.batch)
        plan = run.engine.plan
        assert {plan[key].way for key in ("0.weight", "2.weight")} == {algorithm}
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
    assert used == [algorithm] * 2


def test_keep_is_planned_where_it_is_forced() -> None:
    p = problem("gpt", 4)
    model = p.model()
    with private(model, 1.0, clipping="keep") as run:
        p.backward(model, p.batch)
        assert {row.way for row in run.engine.plan.rows if len(row.shape) == 2 and "tokens" not in row.parameter} <= {
            "keep",
            "rows",
            "parts",
        }
        assert run.engine.plan["blocks.0.fc.weight"].way == "keep"


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet", "padded_embedding", "tied_gpt"])
def test_the_plan_says_how_many_bytes_are_then_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(name, 4)
    model, shares_seen = p.model(), {}
    parameter = Clipping.parameter

    def watched(self: Clipping, record: object) -> None:
        shares_seen[record.parameter] = share_of(record.parameter, record.gradient)
        parameter(self, record)

    monkeypatch.setattr(Clipping, "parameter", watched)
    with private(model, 1.0, clipping="bookkeeping") as run:
        p.backward(model, p.batch)
        plan = run.engine.plan
    for row in plan.rows:
        share = shares_seen[row.parameter]
        assert (row.tokens, row.shape) == (share.tokens, tuple(share.shape)), row.parameter
        assert row.held == (share.kept if row.way == "sum" else share.held), row.parameter
