"""Checks of the arguments of `KFAC`: its parameters and the options of their groups."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import check_number


def listed(params: Any) -> list[Any]:
    """The argument `params` as a list of parameters, (name, parameter) or groups; a GramianError for anything else."""
    found = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor | dict | str) else []
    groups = all(isinstance(one, dict) and "params" in one for one in found)
    named = all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor) for one in found)
    if not found or not (groups or named or all(isinstance(one, Tensor) for one in found)):
        raise GramianError(
            'params: expected parameters of the model, or dicts with the key "params", at least one; '
            f"got {type(params).__name__}"
        )
    return found


def check_options(group: Mapping[str, Any]) -> None:
    """Raise a GramianError for the first option of a parameter group that is not allowed."""
    for key in ("lr", "weight_decay", "eps"):
        value = group[key]
        check_number(key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, "not negative")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise GramianError(f"betas: expected two numbers, got {betas!r}")
    for key, value in (("momentum", group["momentum"]), ("betas", betas[0]), ("betas", betas[1])):
        check_number(key, value, "not negative")
        if value >= 1:
            raise GramianError(f"{key}: expected a number below 1, got {value!r}")
    if not isinstance(group["kfac"], bool):
        raise GramianError(f"kfac: expected True or False, got {group['kfac']!r}")
