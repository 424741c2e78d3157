"""Checks of tensors, mappings and states that users pass to a statistic."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError


def check_real(name: str, value: Any, axes: int = 0) -> None:
    """Raise GramianError unless `value`, the argument `name`, is a tensor of real numbers with at least `axes` axes."""
    if not isinstance(value, Tensor) or value.is_complex() or value.dim() < axes:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        rows = " with one row for each observation" * bool(axes)
        raise GramianError(f"{name}: got {got}; expected a tensor of real numbers{rows}")


def check_mapping(field: str, values: Any) -> None:
    """Raise GramianError unless `values`, the argument `field`, is a mapping."""
    if not isinstance(values, Mapping):
        raise GramianError(f"{field}: got {type(values).__name__}; expected {{name: tensor}}")


def check_state(state: Any) -> None:
    """Raise GramianError unless `state` is a mapping from strings to tensors."""
    check_mapping("state", state)
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise GramianError(f"state: has {type(value).__name__} under {key!r}; expected what state_dict gave")
