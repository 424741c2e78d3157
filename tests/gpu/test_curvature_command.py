"""`gramian curvature` where the GPU is too small: it runs on the CPU, says so, and gives the numbers of the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.runs import small

pytestmark = pytest.mark.gpu
SHAPE: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "width": 8, "heads": 1},
    "data": {"length": 8, "limit_bytes": 400_000},
    "run": {"device": "auto"},
}
QUICK = ["--tokens", "64", "--dtype", "fp64", "--probes", "0"]


@pytest.mark.parametrize("full", ["before", "while"])
def test_an_analysis_that_does_not_fit_runs_on_the_cpu_and_says_so(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(small(tmp_path / "run", **SHAPE).toml())

    def result(name: str, *more: str) -> dict[str, Any]:
        assert main(["curvature", str(config), *QUICK, *more, "--out", str(tmp_path / name)]) == 0
        return json.loads((tmp_path / name / "curvature.json").read_text())

    plain, cpu = result("gpu"), result("cpu", "--device", "cpu")
    assert plain["plan"]["device"] == "cuda" and plain["notes"] == []
    if full == "before":  # the plan sees that next to nothing is free
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (1000, 10**9))
    else:  # the allocator does, in the middle of the analysis
        from gramian.curvature import KFACNaturalGradient

        found = KFACNaturalGradient.compute_capacity_metrics

        def metrics(kfac: KFACNaturalGradient, **options: Any) -> Any:
            if any(p.is_cuda for p in kfac.state.model.parameters()):
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            return found(kfac, **options)

        monkeypatch.setattr(KFACNaturalGradient, "compute_capacity_metrics", metrics)
    capsys.readouterr()
    moved = result("moved")
    assert moved["plan"]["device"] == "cpu" and "Moved to the CPU: " in capsys.readouterr().out
    assert moved["notes"][0].startswith("Moved to the CPU: ") and moved["complete"]
    for layer, numbers in cpu["kfac"]["metrics"]["layers"].items():
        assert moved["kfac"]["metrics"]["layers"][layer] == pytest.approx(numbers, rel=1e-9)
    assert moved["kfac"]["metrics"]["model"]["trace"] == pytest.approx(
        plain["kfac"]["metrics"]["model"]["trace"], rel=1e-9
    )
