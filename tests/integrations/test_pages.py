"""The code on the pages of libraries that the ordinary tests do not have."""

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs lightning: pip install 'gramian[test-integrations]'")

from tests.integrations.test_lightning import BATCH, Module, data  # noqa: E402

pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]


def test_the_page_of_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs/how-to/lightning.md"
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    names = {
        "module": Module(), "train_dataloader": DataLoader(data(), batch_size=BATCH),
        "quiet": {**quiet, "enable_checkpointing": False},
    }  # fmt: skip
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert names["privacy"].engine.steps == 4  # of two batches each
