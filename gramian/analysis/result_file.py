"""`curvature.json`: the result of an analysis on disk, whole or not there."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.train.state.run_folder import write_whole

FILE = "curvature.json"


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Write the result; infinity and NaN, which JSON does not have, are null.

    Raises:
        GramianError: if it cannot be written.
    """
    path = folder / FILE
    write_whole(path, json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")
    return path


def new_folder(wanted: Path | None, default: Path) -> Path:
    """An empty folder: the one that is wanted, or the default with the first number behind it that is free.

    Raises:
        GramianError: if what is wanted is not empty, or cannot be made; nothing is overwritten.
    """
    path, number = wanted or default, 1
    try:
        while wanted is None and path.exists() and (not path.is_dir() or any(path.iterdir())):
            number += 1
            path = default.with_name(f"{default.name}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise GramianError(f"argument --out: {path} is not empty; expected a new folder, or an empty one")
    except (OSError, ValueError) as problem:  # ValueError: of a name that holds a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"argument --out: {path}: {why}; expected a folder that can be written") from None
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
