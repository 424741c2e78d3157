"""What a saved account must be: the fields that the ledger and the engine read, and the options that a replay must share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.privacy.audit.weights_digest import FIELDS
from gramian.privacy.noise.secrets import is_count

SCHEMA = 1
"""Version of the format of a saved account."""


def check_state(state: Any, replay: bool) -> None:
    """Raise a `GramianError` unless `state` has all fields that are read, and for a replay the noise."""
    if not isinstance(state, Mapping) or not is_count(state.get("schema")) or state["schema"] != SCHEMA:
        raise GramianError(f"state: expected what engine.state_dict() gave (schema {SCHEMA})")
    missing = {"secrets", "accountant", "counter", "nonfinite", "config"} - set(state)
    if missing:
        raise GramianError(f"state: has no {sorted(missing)[0]}; expected what engine.state_dict() gave")
    config, weights = state["config"], state.get("weights")
    damaged = [field for field in ("secrets", "accountant", "counter") if not isinstance(state[field], Mapping)]
    if not is_count(state["nonfinite"]):
        damaged.append("nonfinite")
    correlated = replay and isinstance(config, Mapping) and "noise" in config
    if not isinstance(state.get("noise"), Mapping if correlated else Mapping | None):
        damaged.append("noise")
    if not is_count(state.get("generator", 1)):  # states of the first generator have no such field
        damaged.append("generator")
    if weights is not None and not (
        isinstance(weights, Tensor) and weights.dtype == torch.int64 and weights.shape == (len(FIELDS),)
    ):
        damaged.append("weights")
    if state.get("metric") is not None and not is_count(state["metric"]):
        damaged.append("metric")
    if not isinstance(state.get("clip_norm"), float | None) or not (state.get("clip_norm") or 1.0) > 0:
        damaged.append("clip_norm")
    if not isinstance(config, Mapping) or not all(isinstance(k, str) and is_count(v) for k, v in config.items()):
        damaged.append("config")
    if damaged:
        raise GramianError(f"state: its {damaged[0]} is damaged; expected what engine.state_dict() gave")


def check_replay(before: Mapping[str, int], digests: Mapping[str, int]) -> None:
    """Raise a `GramianError` naming the first option whose digest differs from `before`, that of the state to replay."""
    changed = [field for field in {**before, **digests} if before.get(field) != digests.get(field)]
    if changed:
        raise GramianError(
            f"replay: {changed[0]} is not what it was when the state was saved; expected the same, or replay=False"
        )
