"""Position of a layer in a network, short layer names, and the approximation that K-FAC uses for a layer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any


@dataclass(frozen=True)
class Place:
    """Position of a layer: the number of its transformer block (None: outside the blocks) and its name inside the block."""

    block: int | None
    role: str


def place(name: str) -> Place:
    """Parse a layer's module name: "model.encoder.layer.3.attention.self.query" is layer "attention.self.query" of block 3."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return Place(int(part), ".".join(parts[i + 1 :]) or "layer")
    return Place(None, name)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{full layer name: the name without the dotted components with which all given names begin}."""
    common = commonprefix([name.split(".")[:-1] for name in names]) if len(names) > 1 else []
    return {name: ".".join(name.split(".")[len(common) :]) for name in names}


def short_roles(roles: Iterable[str]) -> dict[str, str]:
    """{role: short name}; a role is a layer's name inside its transformer block, such as "attention.self.query".

    The short name is the last two dotted parts without "dense" and "self", or the full role if two roles would share it.
    """
    roles = list(dict.fromkeys(roles))
    cut = {role: ".".join(re.sub(r"\.(dense|self)\b", "", role).split(".")[-2:]) for role in roles}
    return {role: short if list(cut.values()).count(short) == 1 else role for role, short in cut.items()}


def kind(layer: Mapping[str, Any]) -> str:
    """How a layer's curvature is approximated, from its entry in `kfac.record()`: "K-FAC", "EK-FAC" or another name in it."""
    if "K-FAC" not in layer["approximation"]:
        return str(layer["approximation"])
    return "EK-FAC" if layer["ekfac"] and layer["ekfac"]["corrected"] else "K-FAC"


def kronecker_layers(result: Mapping[str, Any]) -> list[str]:
    """Names of the layers whose curvature is a Kronecker product (K-FAC, EK-FAC) in a result of `analyse`, in model order."""
    return [name for name, layer in result["kfac"]["record"]["layers"].items() if kind(layer).endswith("K-FAC")]


def estimate_name(result: Mapping[str, Any]) -> str:
    """Name of the estimate that the eigenvalues in a result of `analyse` come from: "K-FAC" or "EK-FAC"."""
    return "EK-FAC" if result["settings"]["ekfac"] else "K-FAC"
