"""What EK-FAC holds is what the plan says."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.blocks.eigenvalue_correction import Basis
from gramian.curvature.estimate.eigenbasis_sums import EigenbasisSums, EKFACUse, piece_of, workspace
from gramian.curvature.estimate.ekfac_sums import EKFACSamples
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.linalg import Diagonal
from tests.curvature.planned import CASES, LARGER, ODD, run, stored_as
from tests.curvature.problems import assert_close
from tests.curvature.test_planning import SLACK, marked  # noqa: F401 - a fixture
from tests.kit.matrix import FULL
from tests.kit.memory import measured
from tests.kit.refusals import refusal

EKFAC = {"ekfac": True, "damping_mode": "joint"}
SOME = [*CASES, *(name for name in ODD if name != "one by one")] if FULL else ["gpt", "tied"]


def bytes_of(samples: dict[str, EKFACSamples]) -> int:
    """Every tensor that is kept, each memory once."""
    uses = [use for kept in samples.values() for some in kept.passes.values() for use in some]
    heads = [head for kept in samples.values() for head in kept.head]
    parts = [t for use in uses for t in (use.inputs_BT, use.gradients_BTO)]
    parts += [t for head in heads for t in (head.inputs_TI, head.hessian.diagonal_TV, head.weights_T)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parts}.values())


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
@pytest.mark.parametrize("case", SOME)
def test_stored_bytes_are_those_of_the_plan(
    case: str,
    exact: bool,
    marked: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    collected = KFACCapture.collected

    def counted(self: KFACCapture) -> Any:
        found = collected(self)
        kept.append(bytes_of({name: sums.samples for name, sums in found[0].items()}))
        return found

    monkeypatch.setattr(KFACCapture, "collected", counted)
    with measured() as found:
        done = run(case, monkeypatch, kfac_true_fisher_head=exact, **EKFAC)
    total = done.plan.totals["cpu"]
    assert 0.8 * total.collect <= done.collected + kept[0] <= total.collect
    assert sum(block.nbytes for block in done.kfac.kfac_factors.values()) > 0
    for row in done.plan.rows:
        block = done.kfac.kfac_factors[row.layer]
        if block.correction is not None:
            assert block.correction.values_RS.nbytes <= sum(row.bytes["rest"].values()), row.layer
    making = max(total.joined + total.build, total.measuring - total.collect)
    assert 0 < found.since_mark <= 1.05 * (making + total.rest) + SLACK


def test_a_plan_needs_the_tokens() -> None:
    model = torch.nn.Linear(3, 2)
    with refusal("^tokens: .*expected"):
        gramian.KFACNaturalGradient(**EKFAC).plan(model)
    assert gramian.KFACNaturalGradient(**EKFAC).plan(model, fit=True).total() > 0
    assert "ekfac" not in str(gramian.KFACNaturalGradient(**EKFAC).plan(model, tokens=8))


# ---- two passes ------------------------------------------------------------------------------------------------------


def orthonormal(n: int, r: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, r, dtype=torch.float64)).Q


SHAPES = {  # o, m, r, s, samples, tokens of each, and whether it is an embedding
    "whole bases": (40, 50, 40, 50, 20, 30, False),
    "pairs of pieces of tokens": (300, 500, 20, 30, 2, 400, False),
    "one token": (40, 50, 20, 30, 300, 1, False),
    "embedding": (40, 900, 40, 900, 5, 300, True),
}


@pytest.mark.parametrize("budgeted", [True, False], ids=["budget", "no budget"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_workspace_of_a_second_pass_is_bounded_and_pieces_change_nothing(shape: str, budgeted: bool) -> None:
    o, m, r, s, samples, tokens, table = SHAPES[shape]
    torch.manual_seed(0)
    G, A = Basis(o, orthonormal(o, r)), Basis(m, None if table else orthonormal(m, s))
    inputs = torch.randint(m, (samples, tokens)) if table else torch.randn(samples, tokens, m)
    use = EKFACUse(inputs, torch.randn(samples, tokens, o), 0.5, table)
    spec = next(iter(find_blocks(torch.nn.Linear(3, 2, bias=False), gramian.KFACNaturalGradient().options).values()))
    zero = torch.zeros((), dtype=torch.float64)
    sums = EigenbasisSums(
        spec, G, A, table, torch.zeros(r, s, dtype=torch.float64), zero, piece_of(o, m, r, s, budgeted)
    )
    with measured() as used:
        sums.add([use], None)
    counts = (0, samples * tokens) if table else (samples * tokens, 0)
    assert 0 < used.peak <= 8 * workspace(o, m, r, s, budgeted, *counts)
    a = torch.nn.functional.one_hot(inputs, m).double() if table else inputs.double()
    y_BOM = torch.einsum("bko,bkm->bom", use.gradients_BTO.double() * 0.5, a)
    squares = (G.vectors(zero).mT @ y_BOM @ A.vectors(zero)).square().sum(0)
    assert_close(sums.squares_RS, squares)
    assert sums.complete or float(sums.norm) == pytest.approx(float(y_BOM.square().sum()), rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", LARGER)
def test_a_fit_stays_within_its_budget(case: str, exact: bool) -> None:
    torch.manual_seed(0)
    model, options = CASES[case].build(), {**EKFAC, "kfac_true_fisher_head": exact, "update_freq": 1}
    data = [(x, targets_of(x, CASES[case].classes)) for x in (CASES[case].inputs() for _ in range(3))]
    free = gramian.KFACNaturalGradient(**{**options, "ekfac": False}).plan(model)
    budget = free.total() * 3 // 5  # of what K-FAC alone takes
    kfac = gramian.KFACNaturalGradient(memory_budget=budget, **options)
    plan = kfac.plan(model, inputs=torch.cat([x for x, _ in data]))
    assert plan.total() <= budget and any("memory_budget" in row.why for row in plan.rows)
    with measured() as alone:
        for x, y in data:
            torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    model.zero_grad()
    with measured() as used:
        kfac.fit(model, data, causal_shift=False)
    assert used.peak <= budget + alone.peak
    corrected = 0
    for row in plan.rows:
        block = kfac.kfac_factors[row.layer]
        assert stored_as(block, "G") == row.G, row.layer
        assert row.A in ("", "shared") or stored_as(block, "A") == row.A, row.layer
        if block.correction is not None:
            corrected += 1
            assert block.correction.values_RS.nbytes <= sum(row.bytes["rest"].values()), row.layer
    total = plan.totals["cpu"]
    assert corrected and kfac.record()["bytes"] <= total.rest + total.factorised
    with refusal("^memory_budget: .*expected kfac.fit"):
        kfac.capture(model, num_terms=1)


def targets_of(x: Tensor, classes: int) -> Tensor:
    return torch.randint(classes, x.shape[:1] if x.is_floating_point() else x.shape)


def test_a_block_that_is_its_diagonal_keeps_the_eigenvalues_of_kfac() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(90, 70), torch.nn.Tanh(), torch.nn.Linear(70, 30))
    kfac = gramian.KFACNaturalGradient(memory_budget=365_000, **EKFAC)
    kfac.fit(model, [(torch.randn(40, 90), torch.randint(30, (40,)))])
    about = {name: layer["ekfac"] for name, layer in kfac.record()["layers"].items()}
    assert not about["0"]["corrected"] and "diagonal" in about["0"]["reason"]
    assert isinstance(kfac.kfac_factors["0"].A, Diagonal)
