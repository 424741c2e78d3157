"""`curvature.json`, the result of an analysis on disk, written atomically, and the folder for it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramian.core.durable_files import replace_text
from gramian.core.errors import GramianError

FILE = "curvature.json"
FORMAT = 1
"""Version of the layout of `curvature.json`."""


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a result of `analyse` to `curvature.json` in a folder, with null for infinity and NaN; returns its path.

    Raises:
        GramianError: if the file cannot be written.
    """
    path = folder / FILE
    replace_text(path, json.dumps(_finite({"format": FORMAT, **result}), indent=1, allow_nan=False) + "\n")
    return path


def new_folder(wanted: Path | None, default: Path) -> Path:
    """Make an empty folder and return it: `wanted` or, if it is None, `default`, with a number appended if that is not empty.

    Raises:
        GramianError: if the wanted folder is not empty or cannot be made.
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
