"""Numbers reach TensorBoard and Weights & Biases through one interface; a package that is missing is named."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gramian.integrations.trackers import open_trackers
from tests.kit.refusals import refusal


def test_tensorboard_gets_each_number_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'gramian[test-integrations]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(tmp_path, tensorboard=True, wandb=False, private=True)
    tracker.log({"loss": 2.5, "epsilon": 1.0}, step=3, attempt=4)
    tracker.close()
    folder = tmp_path / "tensorboard"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    events = EventAccumulator(str(folder)).Reload()
    assert {name: (events.Scalars(name)[0].step, events.Scalars(name)[0].value) for name in events.Tags()["scalars"]} == {
        "loss": (3, 2.5), "epsilon": (3, 1.0),
    }  # fmt: skip


def test_weights_and_biases_counts_attempts(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("finish")
    )
    fake = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tracker,) = open_trackers(tmp_path / "name", tensorboard=False, wandb=True, private=False)
    tracker.log({"loss": 2.5}, step=3, attempt=4)
    tracker.close()
    assert calls == [{"dir": str(tmp_path / "name"), "name": "name", "resume": "allow"}, ({"loss": 2.5}, 4), "finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with refusal(f"run.{name}: needs the package {name}; expected it installed"):
        open_trackers(tmp_path, tensorboard=name == "tensorboard", wandb=name == "wandb", private=False)
