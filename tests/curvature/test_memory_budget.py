"""A memory budget of curvature: what gives way, in which order, what it costs in accuracy, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.blocks.representation import representation
from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.memory.memory_budget import FEWEST, keeps_of
from gramian.curvature.memory.plan_totals import STAGES
from gramian.oracles import dense_kfac
from tests.curvature.planned import CASES, SOME_STORED, STORED, Run, assert_at_rest, refresh, run
from tests.curvature.problems import assert_close
from tests.kit.memory import measured
from tests.kit.refusals import one_line, refusal, refused


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


@pytest.mark.parametrize(
    "storage, rounding, share, kinds",
    [
        ("fp64", 1e-8, 4, {"subset"}),
        ("fp16", 1e-4, 3, {"subset", "rounded"}),
        ("fp16", 1e-4, 5, {"subset", "diagonal"}),
    ],
    ids=["fp64", "fp16", "fp16 diagonal"],
)
def test_within_a_budget_every_result_is_within_its_stated_error(
    storage: str, rounding: float, share: int, kinds: set[str]
) -> None:
    torch.manual_seed(0)
    terms, bias = 900, {"0": True, "2": False, "3": True}
    model = CASES["wide"].build().double()
    x, y = torch.randn(terms, 200, dtype=torch.float64), torch.randint(120, (terms,))
    options = {"damping": 1e-2, "max_condition_number": 1e12, "woodbury_dtype": storage}
    kfac = gramian.KFACNaturalGradient(
        memory_budget=gramian.KFACNaturalGradient(**options).plan(model).total() // share, **options
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
    assert stated == kinds


def test_a_wide_head_stays_low_rank_since_solves_take_an_eighth_of_a_gradient_at_a_time() -> None:
    """Its float64 workspace was counted for all columns at once, so that a head of 1000 × 512 was a diagonal inside 8 MB."""
    torch.manual_seed(0)
    model, budget = nn.Sequential(nn.Linear(512, 1000, bias=False)), 8_000_000
    kfac = gramian.KFACNaturalGradient(memory_budget=budget, damping=1e-12, max_condition_number=1e14)  # in float64
    x, y = 100 * torch.randn(300, 512), torch.randint(1000, (300,))
    with kfac.capture(model, num_terms=300):
        F.cross_entropy(model(x), y).backward()
    with measured() as used:
        found = kfac.compute_natural_gradient(model)
    sides = kfac.record()["layers"]["0"]["sides"]
    assert {side["representation"] for side in sides.values()} == {"low rank"} and sides["G"]["rank"] >= 128
    (block,) = kfac.kfac_factors.values()
    assert {key[1] for factor in block.factors.values() for key in factor._cholesky} >= {torch.float64}
    at_rest = sum(factor.stored.nbytes for factor in block.factors.values())
    assert used.peak + at_rest - found["0.weight"].nbytes <= budget


@pytest.mark.parametrize("power", [-1.0, -0.5, 1.0])
@pytest.mark.parametrize("tokens", [3, 40])
def test_products_in_eighths_are_those_of_all_columns(tokens: int, power: float) -> None:
    """Of low-rank and dense sides, and of fewer columns than eight."""
    torch.manual_seed(0)
    found = []
    model = nn.Sequential(nn.Linear(11, 19), nn.Tanh(), nn.Linear(19, 3)).double()
    x, y = torch.randn(tokens, 11, dtype=torch.float64), torch.randint(3, (tokens,))
    for budget in (None, "1GB"):
        kfac = gramian.KFACNaturalGradient(memory_budget=budget)
        with kfac.capture(model, num_terms=tokens):
            F.cross_entropy(model(x), y).backward()
        assert {block.parts for block in kfac.kfac_factors.values()} == {1 if budget is None else 8}
        found.append(kfac.compute_natural_gradient(model, power))
        model.zero_grad()
    for name, natural in found[0].items():
        assert_close(found[1][name], natural, 1e-10)


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
