"""Checks, under privacy, that no sample influences a later batch through buffers or attributes, past clipping and noise."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from gramian.taps.model.python_state import same_values
from gramian.taps.proof.proof_runs import Refuted


def refuse_buffers(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> None:
    """Raise Refuted if a changed buffer differs between `one` and `other`, {name: value} after runs on different samples."""
    for name in sorted(one.keys() | other.keys()):
        if not same_values(one.get(name), other.get(name)):
            raise Refuted(
                f"{name}: is a buffer whose values depend on samples, which no clipping bounds and no noise covers; "
                "expected a module that keeps no statistics of private data, or one in evaluation mode"
            )


def changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Sorted names whose values differ between `one` and `other`, {attribute: value} after runs on different samples."""
    return [name for name in sorted(one.keys() | other.keys()) if not same_values(one.get(name), other.get(name))]


def refuse_attribute(name: str) -> NoReturn:
    """Raise Refuted, with the name of an attribute that depends on samples and on which the next batch depends."""
    raise Refuted(
        f"{name}: is an attribute that remembers samples, and the next batch depends on it, which no clipping bounds and no "
        "noise covers; expected a module that keeps no statistics of private data, or one in evaluation mode"
    )
