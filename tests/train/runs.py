"""Small runs for the tests of the training runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.trainer import Ended, Trainer
from gramian.train.state.run_folder import RunFolder, read_lines
from tests.kit.matrix import FULL

ONE = ProcessGrid(0, 1, torch.device("cpu"), "one")
SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 40, "device": "cpu", "log_every": 1},
    "model": {"layers": 2, "width": 32, "heads": 2},
    "data": {"limit_bytes": 200_000, "length": 32, "batch": 8, "workers": 0},
    "schedule": {"warmup": 5},
    "eval": {"every": 20, "windows": 8},
    "checkpoint": {"snapshot_every": 10, "every": 10},
    "optimizer": {"lr": 3e-3},
}
PRIVATE = {"noise_multiplier": 1.0, "insecure_reproducible": True, "accountant": "rdp"}
UNPROVEN = PRIVATE if FULL else {**PRIVATE, "proof": "off"}
"""Without the row proof, which takes most of the time of a short run; with it where everything is tested."""


def small(folder: Path | str = "run", **sections: dict[str, Any]) -> Config:
    """A run of seconds; sections add to, or replace keys of, the small one's."""
    told = {name: dict(section) for name, section in SMALL.items()}
    for name, section in sections.items():
        told[name] = {**told.get(name, {}), **section}
    told["run"]["folder"] = str(folder)
    return parse_config(told)


def run(config: Config, fault: Callable[[Parts], None] = lambda parts: None, **options: Any) -> tuple[Trainer, Ended]:
    """A run in this process, from where its folder is."""
    with RunFolder(config) as folder:
        parts = build(config, ONE)
        fault(parts)
        trainer = Trainer(parts, folder, **options)
        return trainer, trainer.run()


def events(run: Config | Path | str, kind: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    folder = run.run.folder if isinstance(run, Config) else run
    return [event for event in read_lines(Path(folder) / "events.jsonl") if event["event"] == kind]
