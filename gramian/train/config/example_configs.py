"""The example configs of the package, with comments for every key, and new values filled into one of them."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from gramian.core.errors import GramianError

_KEY = re.compile(r"(?P<key>\w+) = (?P<value>.*?)(?P<space> *)(?P<comment># .*)?")
COLUMN = 28
"""Column in which the examples' comments begin."""


def example_names() -> list[str]:
    """Names of the example configs, without ".toml", sorted."""
    return sorted(
        file.name.removesuffix(".toml") for file in files("gramian.examples").iterdir() if file.name.endswith(".toml")
    )


def example_text(name: str) -> str:
    """The text of an example config; a GramianError if there is none of this name."""
    if name not in example_names():
        raise GramianError(f"example: {name!r} is unknown; expected {', '.join(example_names())}")
    return (files("gramian.examples") / f"{name}.toml").read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, Any]) -> str:
    r"""A TOML text with new values for some of its keys; comments stay.

    Args:
        text: a config with one key to a line, as in the examples.
        values: {"section.key": new value}; every key must be in the text, possibly commented out.

    Example:
        >>> fill("[run]\nsteps = 1000  # optimizer steps\n", {"run.steps": 20})
        '[run]\nsteps = 20                  # optimizer steps\n'
    """
    left, section, lines = dict(values), "", []
    for line in text.splitlines():
        if line.startswith("["):
            section = line[1 : line.index("]")]
        found = _KEY.fullmatch(line.removeprefix("# "))
        name = f"{section}.{found['key']}" if found else ""
        if found and name in left:
            value = json.dumps(left.pop(name), ensure_ascii=False).replace("\x7f", "\\u007f")  # also TOML
            written = f"{found['key']} = {value}"
            line = f"{written:<{COLUMN - 1}} {found['comment'] or ''}".rstrip()
        lines.append(line)
    if left:
        raise KeyError(f"no line for {', '.join(left)}")
    return "\n".join(lines) + "\n"
