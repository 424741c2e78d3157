"""Files of earlier versions are read: runs resume to the same numbers, caches teach, factors give the same natural gradient."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gramian.cli import main
from gramian.curvature import KFACNaturalGradient

WRITTEN = Path(__file__).parent / "artefacts" / "written_by_0_1_0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, in which commands run."""
    copy = tmp_path / "written"
    shutil.copytree(WRITTEN, copy)
    monkeypatch.chdir(copy)
    return copy


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", ("student", "private", "curved"))
def test_an_interrupted_run_resumes_to_the_numbers_of_the_uninterrupted_one(run: str, folder: Path) -> None:
    assert main(["train", f"{run}.toml"]) == 0
    before, after = lines(WRITTEN / run), lines(folder / run)
    assert [line["step"] for line in after] == [line["step"] for line in before]
    resumed = [(old, new) for old, new in zip(before, after, strict=True) if old["step"] > 9]
    assert len(resumed) == 4
    for old, new in resumed:
        for name in ("loss", "validation_loss", "epsilon"):
            assert new.get(name) == (None if old.get(name) is None else pytest.approx(old[name], rel=1e-9)), name
    assert '"resumed"' in (folder / run / "events.jsonl").read_text()


@pytest.mark.parametrize("form", ("file", "folder"))
def test_saved_factors_give_the_natural_gradient_they_gave(form: str) -> None:
    written = load_file(WRITTEN / "kfac_expected.safetensors")
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model.load_state_dict(
        {name.removeprefix("weight."): t for name, t in written.items() if name.startswith("weight.")}
    )
    kfac = KFACNaturalGradient(damping=1e-2, update_freq=1)
    if form == "file":
        kfac.load(str(WRITTEN / "kfac.safetensors"), model)
    else:
        kfac.load_sharded(str(WRITTEN / "kfac_folder"), model)
    for name, p in model.named_parameters():
        p.grad = written[f"gradient.{name}"]
    for name, natural in kfac.compute_natural_gradient(model).items():
        torch.testing.assert_close(natural, written[f"natural.{name}"], rtol=1e-9, atol=1e-12)
