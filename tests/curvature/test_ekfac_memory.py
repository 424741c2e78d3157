"""What EK-FAC holds is what the plan says."""

from typing import Any

import pytest
import torch

import gramian
from gramian.curvature.estimate.ekfac_sums import EKFACSamples
from gramian.curvature.estimate.kfac_capture import KFACCapture
from tests.curvature.planned import CASES, ODD, run
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
    assert "ekfac" not in str(gramian.KFACNaturalGradient(**EKFAC).plan(model, tokens=8))
