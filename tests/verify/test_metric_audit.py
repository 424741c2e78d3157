"""`gramian audit` of runs in a metric from public data: it is measured where C bounds a record, and sabotage is seen."""

from pathlib import Path

import pytest
from torch import Tensor

from gramian.privacy.metric.metric_block import MetricBlock
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE
from gramian.verify.private_audit.releases import check_releases
from gramian.verify.private_audit.sensitivity import check_sensitivity
from tests.verify.test_private_audit import run_of


@pytest.mark.full
def test_an_honest_run_passes_and_noise_or_norms_without_the_metric_do_not(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text("a public sentence of no great interest. " * 400)
    run = run_of(0, metric="kfac", kfac={"public_files": [str(tmp_path / "public.txt")], "update_freq": 4})
    assert all(finding.passed for finding in check_releases(run, 12))
    honest = check_sensitivity(run)
    assert honest.passed and honest.facts["largest_move_over_C"] > 0.99
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricBlock, "coloured", lambda self, tensors: dict(tensors))
        found = {finding.name: finding for finding in check_releases(run, 12)}
        assert not found["noise"].passed and found["noise"].facts["p_value"] < SIGNIFICANCE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricBlock, "whitened_tokens", lambda self, gradients: None)
        patch.setattr(MetricBlock, "squares", _plain_squares)
        assert not check_sensitivity(run).passed


def _plain_squares(block: MetricBlock, gradients: dict) -> Tensor:  # type: ignore[type-arg]
    return sum(gradient.squared_norms() for gradient in gradients.values())  # type: ignore[return-value]
