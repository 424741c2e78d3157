"""Read what a run folder holds for its report: config, record, metrics, events, and the result of `gramian curvature`.

Nothing in a folder is trusted: every value may be missing or of another type. A file that is damaged becomes a line in
`RunData.problems`, which the page shows. Checkpoints and `releases.json`, which hold the keys of private runs, are never read.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError

Line = dict[str, Any]
CURVATURE_FILES = ("curvature.json", "curvature/curvature.json")
"""Where a result of `gramian curvature` is looked for below a folder."""


@dataclass(frozen=True)
class RunData:
    """The files of one run, parsed."""

    name: str
    """Name in the report: that of the folder, with a number if another run has the same."""
    path: Path
    config: Mapping[str, Mapping[str, Any]]
    """{section: {key: value}} of config.toml."""
    record: Mapping[str, Any]
    lines: tuple[Line, ...]
    """Lines of metrics.jsonl, of training steps and of evaluations, in the order of the file."""
    events: tuple[Line, ...]
    curvature: Mapping[str, Any] | None
    """Result of `gramian curvature`; None if the folder has none."""
    problems: tuple[str, ...]
    """One line of text for each file that could not be read as a whole, naming it."""
    receipt: Mapping[str, Any] | None = None
    """What `gramian audit` found and signed (receipt.json); None if the folder has none."""

    @property
    def is_private(self) -> bool:
        """Whether the run was trained with differential privacy."""
        return "privacy" in self.config or isinstance(self.record.get("privacy"), Mapping)

    @cached_property
    def not_covered(self) -> frozenset[str]:
        """Names of all numbers that metrics.jsonl lists as not covered by ε; empty without privacy."""
        listed = (line.get("not_covered_by_epsilon") for line in self.lines)
        return frozenset(str(name) for names in listed if isinstance(names, list) for name in names)

    @cached_property
    def taken_back(self) -> frozenset[int]:
        """Indices of `lines` whose step was taken again by a later attempt, after a rollback or a skipped step."""
        found, lowest, attempt_of_lowest = set(), math.inf, None
        for index in range(len(self.lines) - 1, -1, -1):
            step, attempt = self.lines[index].get("step"), self.lines[index].get("attempt")
            if not isinstance(step, int):
                continue
            if step < lowest:
                lowest, attempt_of_lowest = step, attempt
            elif attempt != attempt_of_lowest or step > lowest:
                found.add(index)
        return frozenset(found)

    def option(self, section: str, key: str) -> Any:
        """The value of a config key; None if the config does not have it."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, Mapping) else None


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read run folders, or folders that `gramian curvature` wrote; equal folder names get numbers.

    Raises:
        GramianError: if a folder does not exist, or holds neither a run nor an analysis.
    """
    found: list[RunData] = []
    for path in folders:
        name = (path.resolve().name or str(path)) if path.name in ("", ".", "..") else path.name
        taken, number, plain = {run.name for run in found}, 1, name
        while name in taken:
            number += 1
            name = f"{plain} ({number})"
        found.append(read_run(path, name))
    return found


def read_run(path: Path, name: str) -> RunData:
    """Read one folder; raises a GramianError if it is missing, or holds neither metrics, nor a config, nor an analysis."""
    try:
        known = ("config.toml", "metrics.jsonl", *CURVATURE_FILES)
        if not path.is_dir():
            raise GramianError(f"RUN_DIR: {path} is not a folder; expected that of a run")
        if not any((path / file).is_file() for file in known):
            raise GramianError(f"RUN_DIR: {path} holds no run; expected a folder with config.toml and metrics.jsonl")
    except (OSError, ValueError) as problem:  # ValueError: of a name with a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"RUN_DIR: {path}: {why}; expected the folder of a run") from None
    problems: list[str] = []
    config = _parsed(path / "config.toml", lambda text: tomllib.loads(text), problems) or {}
    record = _parsed(path / "record.json", _json_object, problems) or {}
    curvature = None
    for file in CURVATURE_FILES:
        curvature = curvature or _parsed(path / file, _json_object, problems)
    if curvature is not None and not isinstance(curvature.get("kfac"), Mapping):
        problems.append(f"{path}: the result of gramian curvature has no section kfac; left out")
        curvature = None
    receipt = _parsed(path / "receipt.json", _json_object, problems)
    return RunData(
        name,
        path,
        {section: table for section, table in config.items() if isinstance(table, Mapping)},
        record,
        _lines(path / "metrics.jsonl", "step", problems),
        _lines(path / "events.jsonl", "event", problems),
        curvature,
        tuple(problems),
        receipt,
    )


def number(value: Any) -> float | None:
    """`value` as a finite float; None if it is anything else."""
    if type(value) is not float:  # a bool is an int, too
        if type(value) is not int:
            return None
        value = float(value) if abs(value) < 1 << 1000 else math.inf
    return value if math.isfinite(value) else None


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


def _parsed(path: Path, parse: Callable[[str], dict[str, Any]], problems: list[str]) -> dict[str, Any] | None:
    """The parsed content of a file; None if it does not exist or is damaged, which `problems` then says."""
    try:
        return parse(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, RecursionError) as problem:
        why = getattr(problem, "strerror", None) or str(problem).partition("\n")[0]
        problems.append(f"{path}: cannot be read ({why}); left out")
        return None


def _lines(path: Path, needed: str, problems: list[str]) -> tuple[Line, ...]:
    """The JSON objects of a file that have the field `needed`; an incomplete last line, of a killed run, is no problem."""
    try:
        content = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as problem:
        problems.append(f"{path}: cannot be read ({problem.strerror}); left out")
        return ()
    found, damaged = [], 0
    for place, text in enumerate(content):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            damaged += bool(text.strip()) and place < len(content) - 1
            continue
        if isinstance(line, dict) and needed in line:
            found.append(line)
        else:
            damaged += 1
    if damaged:
        problems.append(f"{path}: {damaged} of {len(content)} lines are damaged; left out")
    return tuple(found)
