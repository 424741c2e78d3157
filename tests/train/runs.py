"""Small runs for the tests of the training runtime."""

from pathlib import Path
from typing import Any

from gramian.train.config.config import Config, parse_config
from tests.kit.matrix import FULL

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
