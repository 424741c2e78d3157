"""Where a layer stands in a network and what its name is for people."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any


@dataclass(frozen=True)
class Place:
    """A layer's place.

    Attributes:
        block: number of the block it is in, the first number in its name; None: outside the blocks.
        role: its name inside the block.
    """

    block: int | None
    role: str


def place(name: str) -> Place:
    """From "model.encoder.layer.3.attention.self.query" to block 3, "attention.self.query"."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return Place(int(part), ".".join(parts[i + 1 :]) or "layer")
    return Place(None, name)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what all of them begin with; whole components only."""
    common = commonprefix([name.split(".")[:-1] for name in names]) if len(names) > 1 else []
    return {name: ".".join(name.split(".")[len(common) :]) for name in names}


def short_roles(roles: Iterable[str]) -> dict[str, str]:
    """Roles by their last two components, or whole where two of them would be alike."""
    roles = list(dict.fromkeys(roles))
    cut = {role: ".".join(re.sub(r"\.(dense|self)\b", "", role).split(".")[-2:]) for role in roles}
    return {role: short if list(cut.values()).count(short) == 1 else role for role, short in cut.items()}


def kind(layer: Mapping[str, Any]) -> str:
    """K-FAC, EK-FAC, diagonal or exact block, as the record has it."""
    if "K-FAC" not in layer["approximation"]:
        return str(layer["approximation"])
    return "EK-FAC" if layer["ekfac"] and layer["ekfac"]["corrected"] else "K-FAC"


def kronecker_layers(result: Mapping[str, Any]) -> list[str]:
    """Layers with a Kronecker block, in the model's order."""
    return [name for name, layer in result["kfac"]["record"]["layers"].items() if kind(layer).endswith("K-FAC")]


def estimate_name(result: Mapping[str, Any]) -> str:
    """What the eigenvalues of the blocks are: "K-FAC" or "EK-FAC"."""
    return "EK-FAC" if result["settings"]["ekfac"] else "K-FAC"
