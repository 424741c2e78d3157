"""Load the model of a saved run from its best checkpoint, or from its newest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gramian.core.errors import GramianError
from gramian.core.existing_paths import is_file
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config, load_config
from gramian.train.loop.objective import Objective
from gramian.train.state.checkpoint import CheckpointStore, LoadedCheckpoint
from gramian.train.state.flat_state import load

OF_MODEL = "model.model."
"""Prefix of the model's tensors in a checkpoint; tensors with another belong to the loss, such as feature projectors."""


@dataclass(frozen=True)
class SavedRun:
    """A model and the checkpoint that it was loaded from."""

    model: nn.Module
    config: Config
    step: int
    best: bool
    folder: Path
    """Folder of the checkpoint."""
    data: Mapping[str, str]
    """{part of the data, such as "validation": its digest when the checkpoint was written}."""


def is_run(path: str | Path) -> bool:
    """Whether a folder is the folder of a gramian run."""
    return is_file(Path(path) / "config.toml")


def load_run(path: str | Path, field: str = "run folder") -> SavedRun:
    """Build a run's model with the weights of its best checkpoint, or of its newest if none was evaluated.

    Raises `GramianError`, naming the option `field`, if there is no run, or all of its checkpoints are damaged.

    Example:
        >>> load_run("runs/tiny").model  # doctest: +SKIP
    """
    path = Path(path)
    config, found = find_checkpoint(path, field)
    tensors = {name: t for name, t in found.tensors().items() if name.startswith(OF_MODEL)}
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())  # float64 of a run in float64
    model = build_model(config, _vocabulary(path, field)).to(dtype)
    load(Objective(model), None, tensors)
    return SavedRun(model, config, found.step, found.best, found.folder, found.facts.get("data", {}))


def find_checkpoint(path: Path, field: str) -> tuple[Config, LoadedCheckpoint]:
    """A run's config and its best checkpoint, or its newest if none was evaluated; raises an error that names `field`."""
    if not is_run(path):
        raise GramianError(f"{field}: {path} holds no run; expected a folder with config.toml and checkpoints/")
    try:
        config = load_config(path / "config.toml")
    except GramianError as problem:
        line = f"{path / 'config.toml'} is not a config of this version ({problem})"
        raise GramianError(f"{field}: {line}; expected the folder of a run") from None
    skipped: list[str] = []
    with CheckpointStore(path / "checkpoints", 1, on_event=lambda e: skipped.append(str(e.get("reason", "")))) as store:
        found = store.best(config.hash) or store.newest(config.hash)
    if found is None:
        why = f" ({skipped[0]})" if skipped else ""
        raise GramianError(f"{field}: {path} has no checkpoint that can be read{why}; expected a run that saved one")
    return config, found


def _vocabulary(path: Path, field: str) -> int:
    """Number of token ids of a run, from its record.json; errors name the option `field`."""
    try:
        return int(json.loads((path / "record.json").read_text(encoding="utf-8"))["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        raise GramianError(f"{field}: {path / 'record.json'} cannot be read; expected that of a run") from None
