"""The plan of curvature: what it says before anything is allocated is what a run then holds, and a budget is kept.

Bytes at rest are compared exactly, with the factors' own count. What tokens are held as is counted over the sums themselves;
factorising and applying are measured at the allocator, whose every request the profiler reports, workspaces included.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramian
from gramian.curvature.apply import apply_factors
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.estimate.kronecker_sums import KroneckerSums
from gramian.curvature.estimate.token_moments import smallest
from gramian.curvature.refresh import build_factors
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import WIDEST_DENSE, Dense, LowRank, wide
from gramian.linalg.factors import eigendecomposition
from gramian.models import GPT, GPTConfig
from tests.curvature import loopback
from tests.curvature.loopback import on_threads
from tests.curvature.planned import CASES, LARGER, ODD, STORED, assert_at_rest, refresh, run, stored_as
from tests.curvature.problems import narrow
from tests.kit.matrix import sample
from tests.kit.memory import mark, measured
from tests.kit.refusals import refused

POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "auto": {"kfac_policy": "auto", "kfac_auto_rho": 0.5},
    "hybrid": {"kfac_policy": "hybrid", "kfac_big_threshold": 60},
    "small_only": {"kfac_policy": "small_only"},
    "no woodbury": {"kfac_use_woodbury": False},
    "subset": {"max_tokens": 20},
    "few columns": {"kfac_auto_t_max": 30},
}


@pytest.mark.parametrize(
    "case, exact, policy, stored",
    sample([*itertools.product(CASES, (False, True), POLICIES, STORED)], 90, case=lambda cell: (cell[0], cell[2])),
)
def test_bytes_at_rest_are_those_of_the_plan(
    case: str, exact: bool, policy: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(case, monkeypatch, kfac_true_fisher_head=exact, **POLICIES[policy], **STORED[stored])
    assert_at_rest(done)
    assert done.plan.totals["cpu"].collect == pytest.approx(done.collected, rel=0.1)


MEANS = {"weight_sharing": "reduce"}


@pytest.mark.parametrize(
    "case, options",
    [
        *((case, options) for case in ODD for options in ({}, {"max_tokens": 7}, MEANS)),
        *((case, MEANS) for case in ("gpt", "tied", "conv", "shared inputs")),
        ("shared inputs", {"memory_budget": 120_000}),
    ],
    ids=str,
)
@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
def test_odd_layers_are_planned_as_they_are(
    case: str, exact: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_at_rest(run(case, monkeypatch, kfac_true_fisher_head=exact, **options))


@pytest.mark.parametrize(
    "keys, limit, kept",
    [([5, 1, 3], 2, [1, 3]), ([5, 1, 3, 1, 5, 3], 3, [1, 1]), ([4, 4, 4, 9], 2, [4, 4, 4])],
    ids=str,
)
def test_tokens_with_one_key_stay_or_go_together_and_no_more_than_the_limit(
    keys: list[int], limit: int, kept: list[int]
) -> None:
    bound = int(smallest(torch.tensor(keys), limit))
    assert sorted(key for key in keys if key <= bound) == kept


def test_layers_with_one_input_count_their_A_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("shared inputs", monkeypatch)
    rows = {row.layer: row for row in done.plan.rows}
    assert [rows[name].A == "shared" for name in ("q", "k", "v")] == [False, True, True]
    assert rows["k"].why == "A of q"
    apart = done.kfac.plan(done.model, tokens=65)
    assert apart.totals["cpu"].rest - done.plan.totals["cpu"].rest == 2 * done.kfac.kfac_factors["q"].A.nbytes


@pytest.mark.parametrize("policy", ["all", "small_only"])
def test_a_wide_head_is_low_rank_or_its_diagonal_and_never_dense(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch, 100)
    for module in ("block_footprint", "factor_shape", "side_footprint"):
        monkeypatch.setattr(f"gramian.curvature.memory.{module}.WIDEST_DENSE", 100)
    for case in ("gpt", "tied"):
        done = run(case, monkeypatch, **POLICIES[policy], kfac_auto_t_max=40)
        assert_at_rest(done)
        assert "dense" not in {row.G for row in done.plan.rows if row.outputs > 100}


@pytest.mark.full
@pytest.mark.parametrize("case, exact", sample([*itertools.product(["gpt", "tied", "mlp"], (False, True))], 3))
def test_averages_settle_at_no_more_than_the_plan_says(case: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    most = gramian.KFACNaturalGradient(ema_decay=0.9, kfac_true_fisher_head=exact).plan(CASES[case].build()).total()
    for options in ({}, {"kfac_auto_t_max": 100}, {"memory_budget": most // 2}):
        done = run(case, monkeypatch, ema_decay=0.9, kfac_true_fisher_head=exact, **options)
        inputs = CASES[case].inputs()
        for _ in range(4):
            assert done.kfac.record()["bytes"] <= done.plan.totals["cpu"].settled
            refresh(done.kfac, done.model, inputs, CASES[case].classes)


SLACK = 4000
"""Bytes of numbers that nobody counts: traces, sizes, errors."""


# ---- factorising and applying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
@pytest.mark.parametrize("case", LARGER)
def test_factorising_and_applying_take_what_the_plan_says(
    case: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(case, monkeypatch, kfac_true_fisher_head=exact, dtype=torch.float64)
    total, at_rest = done.plan.totals["cpu"], done.kfac.record()["bytes"]
    blocks = done.kfac.kfac_factors
    with measured() as prepared, torch.no_grad():
        apply_factors.prepare(
            blocks, dict.fromkeys(blocks, torch.float64), -1.0, done.kfac.options, SharedFactorisation(None)
        )
    assert total.use == pytest.approx(prepared.peak, rel=0.1)
    with measured() as applied:
        found = done.kfac.compute_natural_gradient(done.model)
    assert done.kfac.record()["bytes"] - at_rest == total.factorised
    returned = sum(t.nbytes for t in found.values())
    assert applied.peak <= 1.05 * (total.apply + returned)
    assert total.apply <= 1.5 * applied.peak


@pytest.mark.parametrize("case", LARGER)
def test_eigenvectors_and_their_work_are_those_of_the_plan(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(case, monkeypatch, damping_mode="joint", dtype=torch.float64)
    total, at_rest = done.plan.totals["cpu"], done.kfac.record()["bytes"]
    factors = [f for block in done.kfac.kfac_factors.values() for f in (block.G, block.A) if f is not None]
    with measured() as decomposed, torch.no_grad():
        for factor in factors:
            if isinstance(factor, Dense | LowRank):
                factor.spectrum  # noqa: B018
    if case != "table and head":  # whose G has none
        assert total.use == pytest.approx(decomposed.peak, rel=0.1)
        assert total.factorised == pytest.approx(
            done.kfac.record()["bytes"] - at_rest, rel=0.1
        )  # less by what rank is missing
    with measured() as applied:
        found = done.kfac.compute_natural_gradient(done.model)
    assert applied.peak <= 1.05 * (total.apply + sum(t.nbytes for t in found.values()))


def test_a_few_columns_applied_jointly_take_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bases are thin, it is copies of the gradient that count."""
    done = run("gpt", monkeypatch, damping_mode="joint", kfac_auto_t_max=12, max_tokens=12, dtype=torch.float64)
    total = done.plan.totals["cpu"]
    done.kfac.compute_natural_gradient(done.model)
    with measured() as applied:
        found = done.kfac.compute_natural_gradient(done.model)
    assert applied.peak <= 1.02 * (total.apply + sum(t.nbytes for t in found.values()))


@pytest.mark.parametrize("mode", ["pi", "joint"])
@pytest.mark.parametrize("case", LARGER)
def test_small_algebra_in_float32_takes_no_more_than_planned_in_float64(
    case: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(case, monkeypatch, damping_mode=mode)
    total = done.plan.totals["cpu"]
    with measured() as used:
        found = done.kfac.compute_natural_gradient(done.model)
    assert used.peak <= 1.05 * (max(total.use, total.factorised + total.apply) + sum(t.nbytes for t in found.values()))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark where factors begin to be made."""
    make = build_factors.make_blocks

    def marked(*args: Any, **kwargs: Any) -> Any:
        mark()
        return make(*args, **kwargs)

    monkeypatch.setattr("gramian.curvature.refresh.finish_refresh.make_blocks", marked)


@pytest.mark.parametrize("stored", ["fp16", "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_making_factors_takes_no_more_than_planned(
    case: str, stored: str, marked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with measured() as found:
        done = run(case, monkeypatch, **STORED[stored])
    total = done.plan.totals["cpu"]
    assert 0 < found.since_mark <= 1.05 * (total.joined + total.build + total.rest) + SLACK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_head_is_seen_with_its_logits_and_a_piece_beside_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "BLOCK", 2000)
    add = KroneckerSums._add_head

    def marked(self: KroneckerSums, *args: Any) -> None:
        mark()
        add(self, *args)

    monkeypatch.setattr(KroneckerSums, "_add_head", marked)
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 3000, bias=False).to(dtype), torch.randn(200, 16).to(dtype), torch.randint(3000, (200,))
    kfac = gramian.KFACNaturalGradient(kfac_true_fisher_head=True)
    with measured() as found, kfac.capture(model, num_terms=200, head=""):
        F.cross_entropy(model(x).float(), y).backward()
    row = kfac.plan(model, tokens=200, head="").rows[0]
    planned = row.bytes["collect"]["cpu"] + row.bytes["build"]["cpu"]
    assert 1.9 * 4 * 200 * 3000 <= found.since_mark <= planned <= 3.2 * 4 * 200 * 3000


@pytest.mark.parametrize("share", [1.0, pytest.param(0.5, marks=pytest.mark.full)], ids=["unconstrained", "half"])
@pytest.mark.parametrize(
    "case, stored",
    [
        ("gpt", "fp16"),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in (("tied", "fp32"), ("twice", "fp16"))),
    ],
)
def test_averaging_and_its_use_take_no_more_than_planned(
    case: str, stored: str, share: float, marked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages grow for some refreshes; while one is made, what was there and what is new are there, too."""
    options, about = {"ema_decay": 0.9, **STORED[stored]}, {**CASES, **ODD}[case]
    most = gramian.KFACNaturalGradient(**options).plan(about.build()).total()
    done = run(case, monkeypatch, memory_budget=int(most * share), **options)
    total = done.plan.totals["cpu"]
    for _ in range(4):
        with measured() as made:
            refresh(done.kfac, done.model, about.inputs(), about.classes)
        assert made.since_mark <= 1.05 * (total.making + total.rest + total.settled) + SLACK
        assert done.kfac.record()["bytes"] <= total.settled
        with measured() as used:
            found = done.kfac.compute_natural_gradient(done.model)
        returned = sum(t.nbytes for t in found.values())
        assert used.peak <= 1.05 * (max(total.use, total.factorised + total.apply) + returned) + SLACK


@pytest.mark.parametrize(
    "side, free, expected", [(1000, 48_000_000, True), (1000, 47_999_999, False), (8192, 2**40, True)]
)
def test_a_decomposition_stays_on_the_gpu_while_it_takes_half_of_what_is_free(
    side: int, free: int, expected: bool
) -> None:
    assert eigendecomposition.fits(side, 8, free) is expected
    model = nn.Linear(side, side, bias=False, device="meta")
    kfac = gramian.KFACNaturalGradient(damping_mode="joint")
    (row,) = kfac.plan(model, tokens=side, free=free).rows
    assert ("on the CPU" in row.why) is not expected


# ---- shapes alone ----------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that comes into being outside of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device.type != "meta"]
        self.bytes += sum(t.untyped_storage().nbytes() for t in made)
        return result


def seven_billion() -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(vocabulary=151_936, context=2048, layers=32, width=4096, heads=32))  # no number is drawn


@pytest.mark.parametrize("budget", [None, "40GB"])
def test_seven_billion_parameters_are_planned_without_allocating_anything(budget: str | None) -> None:
    model = seven_billion()
    kfac = gramian.KFACNaturalGradient(memory_budget=budget, kfac_true_fisher_head=True)
    with Allocations() as allocations:
        plan = kfac.plan(model, tokens=8192)
        table = str(plan)
    assert allocations.bytes == 0
    assert len(table.splitlines()) == len(plan.rows) + 3
    assert budget is None or plan.total("cuda") <= 40e9
    head = plan.rows[-1]
    assert head.layer == "head" and head.outputs > WIDEST_DENSE and "dense" not in head.G


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_a_vocabulary_is_dense_under_no_policy(policy: str) -> None:
    model = seven_billion()
    for tokens in (1, 8192, 10**9, None):
        for exact in (False, True):
            kfac = gramian.KFACNaturalGradient(kfac_true_fisher_head=exact, **POLICIES[policy])
            rows = {row.layer: row for row in kfac.plan(model, tokens=tokens).rows}
            assert "dense" not in rows["head"].G and "dense" not in rows["token_embedding"].A
            assert sum(rows["head"].bytes["rest"].values()) < 3e9


@pytest.mark.parametrize("case", ["gpt", "tied", "conv"])
def test_no_number_of_tokens_takes_more_than_the_plan_for_any(case: str) -> None:
    model, layers = CASES[case].build(), None
    for policy in POLICIES.values():
        kfac = gramian.KFACNaturalGradient(**policy)
        most = kfac.plan(model)
        layers = layers or [layer for spec in find_blocks(model, kfac.options).values() for layer in spec.layers]
        for tokens in (1, 7, 39, 63, 64, 65, 130, 131, 500, 10_000):
            assert kfac.plan(model, tokens=tokens).total() <= most.total(), (policy, tokens)


def test_factors_kept_on_the_cpu_leave_the_gpu_to_the_tokens() -> None:
    model = seven_billion()
    here, away = (gramian.KFACNaturalGradient(woodbury_store_device=d).plan(model, tokens=512) for d in ("auto", "cpu"))
    assert here.devices == ("cuda",) and set(away.devices) == {"cuda", "cpu"}
    assert away.totals["cuda"].rest == away.totals["cuda"].factorised == 0
    assert away.totals["cpu"].rest == here.totals["cuda"].rest
    assert away.total("cuda") < here.total("cuda")
    crowded = gramian.KFACNaturalGradient().plan(model, tokens=512, free=2 * here.totals["cuda"].rest // 2)
    assert 0 < crowded.totals["cuda"].rest <= here.totals["cuda"].rest // 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"tokens": 0}, ("tokens: expected", "got 0")),
        ({"tokens": True}, ("tokens: expected",)),
        ({"tokens": {"0": 3}}, ("tokens: has no '2'", "expected")),
        ({"tokens": {"0": 3, "2": 3, "4": 3, "x": 1}}, ("tokens: 'x' is not a layer",)),
        ({"tokens": 3, "inputs": torch.ones(3, 90)}, ("tokens: were given beside inputs",)),
        ({"inputs": torch.ones(3, 91)}, ("inputs: the model cannot run",)),
        ({"tokens": 3, "head": "nowhere"}, ("head: the model has no module",)),
        ({"tokens": 3, "power": float("nan")}, ("power: expected",)),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_one_line(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused(*words):
        gramian.KFACNaturalGradient().plan(CASES["mlp"].build(), **arguments)


# ---- on several processes --------------------------------------------------------------------------------------------

WORLDS = [("gpt", 2), ("mlp", 4), pytest.param("gpt", 3, marks=pytest.mark.full), ("tied", 5)]
REDUCTIONS = ["gram", "gather", "dense", "none"]


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.full)], ids=["empirical", "exact head"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("case, ranks", WORLDS)
def test_every_process_holds_what_the_plan_says(case: str, ranks: int, reduce: str, exact: bool) -> None:
    torch.manual_seed(0)
    inputs, classes = CASES[case].inputs(), CASES[case].classes
    models = [CASES[case].build() for _ in range(ranks)]
    options = {"kfac_distributed_reduce": reduce, "kfac_true_fisher_head": exact, "update_freq": 1}

    def body(rank: int, _: Any) -> tuple[int, list[tuple[str, str]]]:
        kfac = gramian.KFACNaturalGradient(**options)
        refresh(kfac, models[rank], inputs[rank::ranks], classes)
        forms = [
            ("" if b.A is None else "shared" if b.facts.shares_A_with else stored_as(b, "A"), stored_as(b, "G"))
            for b in kfac.kfac_factors.values()
        ]
        return kfac.record()["bytes"], forms

    found = on_threads(ranks, body)
    plan = gramian.KFACNaturalGradient(**options).plan(models[0], inputs=inputs, world_size=ranks)
    assert max(held for held, _ in found) == plan.totals["cpu"].rest
    for _, forms in found:
        assert forms == [(row.A, row.G) for row in plan.rows]
    assert f"on each of {ranks} processes ({reduce})" in str(plan)


def test_the_plan_says_what_processes_save_and_what_joining_costs() -> None:
    model, tokens = seven_billion(), 8192

    def head(reduce: str, ranks: int) -> dict[str, int]:
        kfac = gramian.KFACNaturalGradient(kfac_distributed_reduce=reduce)
        row = kfac.plan(model, tokens=tokens, world_size=ranks).rows[-1]
        return {stage: held["cuda"] for stage, held in row.bytes.items()}

    one, spread, whole = head("gram", 1), head("gram", 8), head("gather", 8)
    assert head("gather", 1) == head("dense", 1) == one
    wide = 151_936 * tokens * 2  # of the columns in half precision
    assert one["rest"] - spread["rest"] == pytest.approx(wide * 7 / 8, rel=0.05)
    assert whole["rest"] == one["rest"]
    assert spread["collect"] == whole["collect"] == pytest.approx(one["collect"] / 8, rel=0.2)
    assert whole["build"] - spread["build"] == pytest.approx(2 * wide * 7 / 8, rel=0.2)  # rows of all, in float32


@pytest.mark.parametrize("world_size", [0, -1, True, 1.5, "2"])
def test_an_invalid_number_of_processes_is_refused(world_size: Any) -> None:
    with refused("world_size: expected", repr(world_size)):
        gramian.KFACNaturalGradient().plan(CASES["mlp"].build(), tokens=3, world_size=world_size)


def test_what_the_allocator_keeps_ready_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass most of a GPU is the allocator's: taken for used, every factor would go to the CPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert build_factors.free_memory(torch.device("cuda")) == 610
    assert build_factors.free_memory(torch.device("cpu")) is None


def test_the_plan_of_auto_storage_goes_factor_by_factor_as_a_run_does() -> None:
    model, kfac = nn.Linear(600, 500, bias=False, device="meta"), gramian.KFACNaturalGradient()
    (row,) = kfac.plan(model, tokens=10_000).rows
    assert (row.A, row.G) == ("dense", "dense")
    side_A = 2 * 600**2 + 8 * 600  # A alone has room in half of what is free
    crowded = kfac.plan(model, tokens=10_000, free=2 * side_A + 1000)
    assert crowded.totals["cuda"].rest == side_A
    assert crowded.totals["cpu"].rest == 2 * 500**2 + 8 * 500


@pytest.mark.parametrize("poorest", [0, 1])
def test_the_process_with_the_fewest_free_bytes_decides_for_all(poorest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placement "auto": the ranks pretend to have different amounts, also one that only a rank with fewer rows fits into."""
    torch.manual_seed(0)
    models, inputs = [CASES["gpt"].build() for _ in range(2)], CASES["gpt"].inputs()
    free, moved, kept = [2**40, 2**40], [[], []], [[], []]  # type: ignore[var-annotated]
    place = build_factors.Placement.__call__

    def rank() -> int:
        number: int = loopback._here.exchange.rank
        return number

    def placed(self: build_factors.Placement, factor: Any) -> Any:
        kept[rank()].append(factor.nbytes)
        return place(self, factor)

    def away(self: build_factors.Placement, factor: Any, device: torch.device) -> Any:
        moved[rank()].append(len(kept[rank()]))
        return factor

    monkeypatch.setattr("gramian.curvature.refresh.finish_refresh.free_memory", lambda device: free[rank()])
    monkeypatch.setattr(build_factors.Placement, "__call__", placed)
    monkeypatch.setattr(build_factors.Placement, "_moved", away)

    def body(number: int, _: Any) -> None:
        kfac = gramian.KFACNaturalGradient(update_freq=1)
        refresh(kfac, models[number], inputs[number::2], 151)

    on_threads(2, body)
    assert moved == [[], []]
    sizes = list(zip(*kept, strict=True))
    uneven = next(i for i, (left, right) in enumerate(sizes) if left != right)  # 151 rows: one process has one more
    free[poorest] = 2 * sum(right for _, right in sizes[: uneven + 1])
    kept[0].clear(), kept[1].clear()
    on_threads(2, body)
    assert moved[0] == moved[1] and 0 < len(moved[0]) < len(sizes)
