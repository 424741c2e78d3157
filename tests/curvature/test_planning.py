"""The plan of curvature: what it says before anything is allocated is what a run then holds, and a budget is kept.

Bytes at rest are compared exactly, with the factors' own count. What tokens are held as is counted over the sums themselves;
factorising and applying are measured at the allocator, whose every request the profiler reports, workspaces included.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.curvature.apply import apply_factors
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.blocks.representation import representation
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.estimate.kronecker_sums import KroneckerSums
from gramian.curvature.estimate.token_moments import StoragePolicy, smallest
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.curvature.memory.memory_budget import FEWEST, keeps_of
from gramian.curvature.memory.plan_totals import STAGES
from gramian.curvature.refresh import build_factors
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import WIDEST_DENSE, Dense, LowRank, wide
from gramian.linalg.factors import eigendecomposition
from gramian.models import GPT, GPTConfig
from gramian.oracles import dense_kfac
from tests.curvature import loopback
from tests.curvature.loopback import on_threads
from tests.curvature.problems import assert_close, narrow
from tests.curvature.small import Net
from tests.kit.matrix import sample
from tests.kit.memory import mark, measured
from tests.kit.refusals import one_line, refusal, refused

POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "auto": {"kfac_policy": "auto", "kfac_auto_rho": 0.5},
    "hybrid": {"kfac_policy": "hybrid", "kfac_big_threshold": 60},
    "small_only": {"kfac_policy": "small_only"},
    "no woodbury": {"kfac_use_woodbury": False},
    "subset": {"max_tokens": 20},
    "few columns": {"kfac_auto_t_max": 30},
}
STORED: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp32": {"woodbury_dtype": "fp32"},
    "fp64 model": {"dtype": torch.float64},
}
SOME_STORED = ["fp16", pytest.param("fp32", marks=pytest.mark.full), "fp64 model"]


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, what goes in, and how many classes come out."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.Tanh(), nn.Conv2d(24, 40, 3, stride=2, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(360, 11),
    )  # fmt: skip


class Tied(Net):
    """An embedding that is the head."""

    def __init__(self) -> None:
        super().__init__(tied=True, words=131, width=40)


class Twice(nn.Module):
    """A layer that is called twice, a weight that two layers use, and one table behind two lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(61, 24), nn.Embedding(61, 24)
        self.again, self.left, self.right = (nn.Linear(24, 24, bias=i == 0) for i in range(3))
        self.head = nn.Linear(24, 61, bias=False)
        self.other.weight, self.right.weight = self.table.weight, self.left.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.again(self.again(self.table(x_BT) * self.other(x_BT.flip(1))).tanh())
        return self.head(self.right(self.left(h).tanh()))


class Adapted(nn.Module):
    """HF's Conv1D, whose storage is transposed, frozen with an adapter beside it, and a layer whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base, self.head = nn.Embedding(61, 24), Conv1D(40, 24), nn.Linear(40, 61)
        self.down, self.up, self.turned = nn.Linear(24, 3, bias=False), nn.Linear(3, 40, bias=False), Conv1D(40, 40)
        for frozen in (self.base.weight, self.base.bias, self.head.bias):
            frozen.requires_grad_(False)

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.table(x_BT)
        return self.head(self.turned(self.base(h) + self.up(self.down(h))).tanh())


CASES: dict[str, Case] = {
    "gpt": Case(
        lambda: GPT(GPTConfig(vocabulary=151, context=12, layers=1, width=64, heads=2)),
        lambda: torch.randint(151, (6, 12)),
        151,
    ),
    "shared inputs": Case(lambda: Net(words=131, width=40), lambda: torch.randint(131, (5, 13)), 131),
    "tied": Case(Tied, lambda: torch.randint(131, (5, 13)), 131),
    "conv": Case(conv, lambda: torch.randn(3, 3, 9, 9), 11),
    "mlp": Case(
        lambda: nn.Sequential(
            nn.Linear(90, 70), nn.Tanh(), nn.Linear(70, 80, bias=False), nn.Tanh(), nn.Linear(80, 30)
        ),
        lambda: torch.randn(64, 90),
        30,
    ),
}


LARGER: dict[str, Case] = {
    "head": Case(
        lambda: GPT(GPTConfig(vocabulary=700, context=30, layers=1, width=80, heads=4)),
        lambda: torch.randint(700, (4, 30)),
        700,
    ),
    "many tokens": Case(
        lambda: GPT(GPTConfig(vocabulary=200, context=60, layers=1, width=64, heads=4)),
        lambda: torch.randint(200, (5, 60)),
        200,
    ),
    "wide": Case(
        lambda: nn.Sequential(nn.Linear(200, 400), nn.Tanh(), nn.Linear(400, 350, bias=False), nn.Linear(350, 120)),
        lambda: torch.randn(150, 200),
        120,
    ),
    "table and head": Case(lambda: Net(tied=True, words=500, width=120), lambda: torch.randint(500, (5, 20)), 500),
}
CASES.update(LARGER)


ODD: dict[str, Case] = {
    "twice": Case(Twice, lambda: torch.randint(61, (3, 7)), 61),
    "adapted": Case(Adapted, lambda: torch.randint(61, (3, 7)), 61),
    "one by one": Case(
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)), lambda: torch.randn(5, 1), 1
    ),
}


@dataclass
class Run:
    """A refresh, the plan made before it, and what its sums held when all tokens were in."""

    kfac: gramian.KFACNaturalGradient
    model: nn.Module
    plan: CurvaturePlan
    collected: int


def run(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    """Plan, then refresh on the data that the plan was made for."""
    case, dtype = {**CASES, **ODD}[name], options.pop("dtype", torch.float32)
    held: list[int] = []
    collected = KFACCapture.collected

    def counted(self: KFACCapture) -> Any:
        found = collected(self)
        held.append(sum(bytes_of(sums) for sums in found))
        return found

    monkeypatch.setattr(KFACCapture, "collected", counted)
    torch.manual_seed(0)
    model, inputs = case.build().to(dtype), case.inputs()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    kfac = gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-2, **options})
    plan = kfac.plan(model, inputs=inputs)
    refresh(kfac, model, inputs, case.classes)
    return Run(kfac, model, plan, held[0])


def refresh(kfac: gramian.KFACNaturalGradient, model: nn.Module, inputs: Tensor, classes: int) -> None:
    model.zero_grad()
    targets = torch.randint(classes, inputs.shape[:1] if inputs.is_floating_point() else inputs.shape)
    with kfac.capture(model, num_terms=targets.numel()):
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()


def bytes_of(sums: Any) -> int:
    """Every tensor that sums hold, each memory once."""
    parts = []
    for block in sums.values():
        if isinstance(block, Tensor):
            parts.append(block)
            continue
        parts += [block.counts_V] if block.counts_V is not None else []
        for moment in block.moments():
            parts += [t for t in (moment.matrix, moment.first_N, moment.diagonal_N) if t is not None]
            for chunk in moment.chunks:
                parts += [t for t in (chunk.rows_TN, chunk.weights_T, chunk.keys_T) if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parts}.values())


# ---- what ran agrees -------------------------------------------------------------------------------------------------


def assert_at_rest(run: Run) -> None:
    """Representation and bytes of every block, exactly."""
    assert [row.layer for row in run.plan.rows] == list(run.kfac.kfac_factors)
    for row in run.plan.rows:
        block = run.kfac.kfac_factors[row.layer]
        shared = bool(block.facts.shares_A_with)
        assert told(block, "G") == row.G, row.layer
        assert ("" if block.A is None else "shared" if shared else told(block, "A")) == row.A, row.layer
        held = block.G.nbytes + (0 if block.A is None or shared else block.A.nbytes)
        assert sum(row.bytes["rest"].values()) == held, row.layer
    assert run.plan.totals["cpu"].rest == run.kfac.record()["bytes"]


def told(block: Block, side: str) -> str:
    factor = block.factors[side]
    return f"{factor.kind} {factor.rank:,}" if "low rank" in factor.kind else factor.kind


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
        apply_factors._prepare(
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
@pytest.mark.parametrize("case, stored", [("gpt", "fp16"), ("tied", "fp32"), ("twice", "fp16")])
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


# ---- within a budget -------------------------------------------------------------------------------------------------


def assert_within(done: Run, budget: int) -> None:
    """What the plan says and what the sums and factors take is below it."""
    total = done.plan.totals["cpu"]
    assert done.plan.total("cpu") <= budget
    assert done.collected <= 1.1 * total.collect
    assert done.kfac.record()["bytes"] == total.rest


@pytest.mark.parametrize("stored", SOME_STORED)
@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
@pytest.mark.parametrize("case", ["head", "many tokens", "wide", "table and head"])
def test_a_quarter_of_what_it_could_take_is_enough_and_the_run_is_the_degraded_plan(
    case: str, exact: bool, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kfac_true_fisher_head": exact, **STORED[stored]}
    dtype = options.pop("dtype", torch.float32)
    free = gramian.KFACNaturalGradient(**options).plan(CASES[case].build().to(dtype))
    done = run(case, monkeypatch, memory_budget=free.total() // 4, dtype=dtype, **options)
    assert_within(done, free.total() // 4)
    assert_at_rest(done)
    told = [side["reason"] for layer in done.kfac.record()["layers"].values() for side in layer["sides"].values()]
    planned = [row.why for row in done.plan.rows if "memory_budget" in row.why]
    assert planned and any("memory_budget" in reason for reason in told)
    with measured() as used:
        found = done.kfac.compute_natural_gradient(done.model)
    assert all(t.isfinite().all() for t in found.values())
    assert used.peak <= free.total() // 4 + sum(t.nbytes for t in found.values())


@pytest.mark.parametrize(
    "share, kinds", [(0.5, ["low rank"]), (0.25, ["diagonal", "low rank"]), (0.2, ["diagonal"])], ids=str
)
def test_results_within_a_budget_are_those_of_the_dense_oracle_where_nothing_was_left_out(
    share: float, kinds: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 120), nn.Tanh(), nn.Linear(120, 90, bias=False)).double()
    x, y = torch.randn(24, 60, dtype=torch.float64), torch.randint(90, (24,))
    options = {"damping": 1e-2, "max_condition_number": 1e12}
    budget = int(gramian.KFACNaturalGradient(**options).plan(model).total() * share)
    kfac = gramian.KFACNaturalGradient(memory_budget=budget, **options)
    with kfac.capture(model, num_terms=24):
        F.cross_entropy(model(x), y).backward()
    natural = kfac.compute_natural_gradient(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    tokens = dense_kfac.layer_tokens(model, lambda: F.cross_entropy(model(x), y).backward(), ["0", "2"])
    told = kfac.record()["layers"]
    for name in ("0", "2"):
        whole = dict(zip("AG", dense_kfac.factors(tokens[name], 24, 1 / 24, bias=name == "0"), strict=True))
        for side, factor in kfac.kfac_factors[name].factors.items():
            about = told[name]["sides"][side]
            assert "memory_budget" in about["reason"] and "subset" not in about["reason"]
            if about["representation"] == "diagonal":
                whole[side] = torch.diag(whole[side].diagonal())
            assert_close(factor.to_dense(), whole[side], 1e-12)
        parts = [gradients[f"{name}.weight"]] + ([gradients["0.bias"][:, None]] if name == "0" else [])
        expected = dense_kfac.natural(whole["A"], whole["G"], torch.cat(parts, dim=1), -1.0, "pi", 1e-2)
        assert_close(natural[f"{name}.weight"], expected[:, : parts[0].shape[1]], 1e-9)
    assert sorted({side["representation"] for layer in told.values() for side in layer["sides"].values()}) == kinds


@pytest.mark.parametrize("storage, rounding", [("fp64", 1e-8), ("fp16", 1e-4)])
def test_within_a_quarter_every_result_is_within_its_stated_error(storage: str, rounding: float) -> None:
    torch.manual_seed(0)
    terms, bias = 900, {"0": True, "2": False, "3": True}
    model = CASES["wide"].build().double()
    x, y = torch.randn(terms, 200, dtype=torch.float64), torch.randint(120, (terms,))
    options = {"damping": 1e-2, "max_condition_number": 1e12, "woodbury_dtype": storage}
    kfac = gramian.KFACNaturalGradient(
        memory_budget=gramian.KFACNaturalGradient(**options).plan(model).total() // 4, **options
    )
    with kfac.capture(model, num_terms=terms):
        F.cross_entropy(model(x), y).backward()
    natural = kfac.compute_natural_gradient(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    tokens = dense_kfac.layer_tokens(model, lambda: F.cross_entropy(model(x), y).backward(), list(bias))
    stated = set()
    for name, told in kfac.record()["layers"].items():
        inputs = tokens[name].inputs_TI
        inputs = torch.cat([inputs, inputs.new_ones(terms, 1)], 1) if bias[name] else inputs
        factors = kfac.kfac_factors[name].factors
        for side, rows in (("A", inputs), ("G", terms * tokens[name].gradients_TO)):
            about, exact = told["sides"][side], rows.mT @ rows / terms
            error = about["quantisation_error"]
            off = len(exact) ** 0.5 * (error + error**2) * float(exact.norm()) + 1e-12
            if about["representation"] == "diagonal":
                exact, kind = torch.diag(exact.diagonal()), "diagonal"
            elif (
                "subset of" in about["reason"]
            ):  # what a random subset of so many, rescaled, is off by in the mean square
                kept, kind = int(about["reason"].split("subset of ")[1].split()[0]), "subset"
                spread = (rows.square().sum(1).square().sum() - terms * exact.square().sum()) / (terms - 1)
                share = (1 - kept / terms) / kept
                off += 2 * float((share * spread).sqrt())
                sizes = rows.square().sum(1)  # a number that is off by much less
                wanted, allowed = float(sizes.mean()), 4 * float((share * sizes.var()).sqrt())
                assert abs(float(factors[side].trace()) - wanted) <= allowed + error * wanted, (name, side)
            else:
                kind = "rounded"
            stated.add(kind)
            assert float((factors[side].to_dense().double() - exact).norm()) <= off, (name, side, kind)
        parts = [gradients[f"{name}.weight"]] + ([gradients[f"{name}.bias"][:, None]] if bias[name] else [])
        own = [factors[side].to_dense().double() for side in "AG"]
        expected = dense_kfac.natural(*own, torch.cat(parts, dim=1), -1.0, "pi", 1e-2)
        assert_close(natural[f"{name}.weight"], expected[:, : parts[0].shape[1]], rounding)
    assert stated == ({"subset"} if storage == "fp64" else {"subset", "diagonal", "rounded"})


def test_a_subset_within_a_budget_is_unbiased() -> None:
    torch.manual_seed(0)
    model = nn.Linear(150, 5, bias=False).double()
    x, c = torch.randn(400, 150, dtype=torch.float64), torch.randn(400, 5, dtype=torch.float64)
    whole = gramian.KFACNaturalGradient()
    budget = int(whole.plan(model).total() * 0.6)
    means = torch.zeros(150, 150, dtype=torch.float64)
    for seed in range(40):
        kfac = gramian.KFACNaturalGradient(memory_budget=budget, seed=seed)
        with kfac.capture(model, loss_reduction="sum", num_terms=400):
            (model(x) * c).sum().backward()
        factor = kfac.kfac_factors["0" if "0" in kfac.kfac_factors else "model"].A
        assert factor.kind == "low rank" and factor.rank < 150
        means += factor.to_dense() / 40
    exact = x.T @ x / 400
    assert float((means - exact).norm() / exact.norm()) < 0.2


@pytest.mark.full
def test_the_order_is_low_rank_then_fewer_tokens_then_diagonal_then_refusal() -> None:
    model = CASES["wide"].build()
    most = gramian.KFACNaturalGradient().plan(model).total()
    kinds, limits = [], []
    budget = most
    while True:
        try:
            plan = gramian.KFACNaturalGradient(memory_budget=budget).plan(model, tokens=10_000)
        except gramian.GramianError as error:
            error_seen = error
            break
        assert plan.total() <= budget
        sides = [side for keeps in plan.keeps.values() for side in keeps]
        kinds.append((any(side.limit for side in sides if side.why), sum(side.diagonal for side in sides)))
        limits.append(min((side.limit for side in sides if side.limit), default=10**9))
        budget = int(budget * 0.97)
    assert kinds[0] == (False, 0) and (True, 0) in kinds
    diagonals = [count for _, count in kinds]
    assert diagonals == sorted(diagonals) and diagonals[-1] > 0
    fewest = [limit for limit, count in zip(limits, diagonals, strict=True) if count == 0]
    assert fewest == sorted(fewest, reverse=True) and fewest[-1] < 2 * FEWEST
    one_line(error_seen, "memory_budget", "collect", "build", "rest", "use", "apply", "expected at least")
    least = int(str(error_seen).rsplit("expected at least ", 1)[1].split()[0])
    assert gramian.KFACNaturalGradient(memory_budget=least).plan(model).total() <= least


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_subset_is_smaller_than_what_it_stands_for(decay: float) -> None:
    model = CASES["wide"].build()
    widths = {row.layer: {"A": row.inputs, "G": row.outputs} for row in gramian.KFACNaturalGradient().plan(model).rows}
    most = gramian.KFACNaturalGradient(ema_decay=decay).plan(model).total()
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        plan = gramian.KFACNaturalGradient(ema_decay=decay, memory_budget=int(most * share)).plan(model)
        for layer, keeps in plan.keeps.items():
            for side, width in widths[layer].items():
                assert getattr(keeps, side).limit is None or getattr(keeps, side).limit < width, (share, layer, side)


def test_the_largest_block_gives_in_first() -> None:
    model = CASES["wide"].build()
    kfac = gramian.KFACNaturalGradient(kfac_use_woodbury=False)  # so that dense goes straight to diagonal
    most = kfac.plan(model).total()
    plan = gramian.KFACNaturalGradient(kfac_use_woodbury=False, memory_budget=int(most * 0.8)).plan(model, tokens=900)
    assert [row.layer for row in plan.rows if "its diagonal" in row.why] == [
        "2"
    ]  # 400 × 350 beside 201 × 400 and 351 × 120


def test_a_budget_that_a_number_of_tokens_fits_into_leaves_it_as_it_is() -> None:
    model, tokens = CASES["wide"].build(), 90
    free = gramian.KFACNaturalGradient().plan(model, tokens=tokens)
    tight = gramian.KFACNaturalGradient(memory_budget=free.total() * 11 // 10).plan(model, tokens=tokens)
    assert [row.representation for row in tight.rows] == [row.representation for row in free.rows]


def test_what_is_decided_follows_from_shapes_and_options_alone() -> None:
    model = CASES["gpt"].build()
    most = gramian.KFACNaturalGradient().plan(model).total()
    kfac = gramian.KFACNaturalGradient(memory_budget=most // 3)
    wanted = keeps_of(find_blocks(model, kfac.options), kfac.options, "head", False)
    for tokens in (1, 10, 1000, None):
        assert kfac.plan(model, tokens=tokens).keeps == wanted
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    assert kfac.plan(model, tokens=5).keeps == wanted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_is_nowhere_is_planned_for_the_device_it_will_run_on(device: str) -> None:
    """Factors that are kept on the CPU share a budget with tokens where the model runs there, too."""
    options = {"woodbury_store_device": "cpu", "memory_budget": 4_000_000}
    there = CASES["wide"].build().to("meta")
    plan = gramian.KFACNaturalGradient(**options).plan(there, tokens=900, device=device)
    assert set(plan.devices) == {"cpu", device} and plan.total() <= 4_000_000
    if device == "cpu":
        assert plan.keeps == gramian.KFACNaturalGradient(**options).plan(CASES["wide"].build(), tokens=900).keeps
    with refusal(f" on {device} with the least"):
        gramian.KFACNaturalGradient(memory_budget=1000).plan(there, device=device)


def test_a_budget_that_cannot_be_met_is_refused_before_a_token_is_kept() -> None:
    case, model = CASES["gpt"], CASES["gpt"].build()
    kfac = gramian.KFACNaturalGradient(memory_budget="10KB")
    with refused("memory_budget: 10.0 KB", "expected at least") as caught:
        refresh(kfac, model, case.inputs(), case.classes)
    (table,) = caught.value.__notes__
    lines = table.splitlines()
    assert lines[0].split()[0] == "layer" and "budget of 10.0 KB" in lines[-1]
    assert any(line.startswith("head ") and "diagonal" in line for line in lines)
    assert kfac.steps == 0 and not kfac.kfac_factors


def test_representation_has_one_rule() -> None:
    assert representation(StoragePolicy(diagonal=True), 3) == "diagonal"
    assert [representation(StoragePolicy(rows_up_to=4, limit=9), kept) for kept in (4, 5)] == ["low rank", "dense"]


def test_the_table_has_a_line_for_every_block_and_the_sums() -> None:
    kfac = gramian.KFACNaturalGradient(memory_budget="20MB")
    plan = kfac.plan(CASES["wide"].build(), tokens=256)
    lines = str(plan).splitlines()
    assert lines[0].split() == ["layer", "m", "o", "T", "A", "G", *STAGES, "why"]
    assert len(lines) == 1 + len(plan.rows) + 2
    assert lines[-1].startswith("cpu: ") and "budget of 20.0 MB" in lines[-1]
    assert plan.total() == plan.total("cpu") and plan.total("cuda") == 0
    assert all(set(row.bytes) == set(STAGES) for row in plan.rows)


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
            ("" if b.A is None else "shared" if b.facts.shares_A_with else told(b, "A"), told(b, "G"))
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
