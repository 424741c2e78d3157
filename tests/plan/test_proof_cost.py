"""The plan of a row proof against a real one: its runs, its peak and its fingerprints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.linalg import wide
from gramian.plan import proof_cost
from gramian.plan.proof_cost import plan_proof, proof_runs
from gramian.taps.proof.proof_runs import ProofRuns
from gramian.train.build.memory_needs import needs_of
from gramian.train.build.run_parts import build
from gramian.train.loop.private_stepper import PrivateStepper
from tests.kit.matrix import FULL
from tests.kit.memory import mark, measured
from tests.train.runs import ONE, PRIVATE, small

FACTOR = 1.25
"""What is planned for activations, gradients and proof together is at least the peak, and at most so many times that."""
OWN = 2.0
"""The same for the proof's row alone."""
CASES: dict[str, dict[str, Any]] = {
    "logits are largest": {"model": {"layers": 2, "width": 32}},
    "mlp is largest": {"model": {"layers": 3, "width": 96}, "data": {"length": 64, "batch": 16}},
    "half precision": {"model": {"layers": 2, "width": 64}, "data": {"length": 16}, "precision": {"kind": "bf16"}},
    "few tokens": {"model": {"layers": 2, "width": 64}, "data": {"length": 4, "batch": 3}},
}


@pytest.mark.parametrize("case", CASES if FULL else ("logits are largest", "few tokens"))
def test_a_proof_peaks_where_it_is_planned_to(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "run", privacy=PRIVATE, **CASES[case])
    parts, fingerprints = build(config, ONE), []
    stepper, rows = parts.stepper, config.data.batch
    assert isinstance(stepper, PrivateStepper)
    plain = ProofRuns.tapped

    def tapped(self: ProofRuns, *args: Any, **keys: Any) -> Any:
        found = plain(self, *args, **keys)
        prints = [*found.rows.values(), *found.outputs]
        fingerprints.append(sum(p.hashes_R.nbytes + p.projections_RK.nbytes for p in prints))
        return found

    monkeypatch.setattr(ProofRuns, "tapped", tapped)
    batch = parts.training.stack(torch.arange(rows).numpy() * (len(parts.training) // rows))
    with measured() as real:
        mark()
        stepper.loss(parts.module, batch)
    needs = needs_of(config, parts.training.vocabulary, parts.numbers.kind, "cpu")  # type: ignore[arg-type]
    plan, step = plan_proof(needs, rows), needs.activations(rows).total + needs.weights
    (shown,) = stepper.engine.proof["structures"]
    assert plan.runs == proof_runs(rows) == shown["runs"]
    assert real.since_mark <= step + plan.device <= FACTOR * real.since_mark
    assert real.since_mark - step <= plan.device <= OWN * (real.since_mark - step)
    assert 3 * max(fingerprints) <= plan.host <= 2 * 3 * max(fingerprints)


def test_one_sample_needs_no_run_and_each_doubling_two_more() -> None:
    assert [proof_runs(samples) for samples in (0, 1, 2, 3, 4, 5, 16, 17, 256)] == [0, 0, 6, 8, 8, 10, 12, 14, 20]


def test_blocks_are_those_of_the_library() -> None:
    assert proof_cost.BLOCK == wide.BLOCK
