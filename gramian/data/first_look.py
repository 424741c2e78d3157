"""A first look at data files: of what kind they are, how large, and under which key JSON lines hold their text.

Files in, the values of `data.source` and `data.field` out. It reads names and first lines alone: what is damaged further on is
found by `gramian doctor` and `gramian train`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gramian.core.errors import GramianError
from gramian.data.data_files import SUFFIXES, Source, files_below, unreadable, why_not_utf8

BEGINNING = 1 << 20
"""Bytes of a file that are looked at."""


@dataclass(frozen=True)
class FirstLook:
    """What some data files hold."""

    source: Source
    field: str
    """Key under which JSON lines hold their text; "text" for other files."""
    files: int
    size: int
    """Bytes of all files that would be read."""


def look_at_files(paths: Sequence[Path], argument: str) -> FirstLook:
    """Kind and size of data files, or of folders of them; a folder stands for its text or JSONL files.

    Example:
        >>> look_at_files([Path("corpus")], "argument --text").source  # doctest: +SKIP
        'text'

    Raises:
        GramianError: one line that names `argument`, or the file: if one is missing, empty or not text, if there are files of
            several kinds, or if no key of a JSON line holds text.
    """
    kinds: dict[Source, list[Path]] = {}
    for path in paths:
        if path.is_dir():
            found = {kind: list(files_below(path, SUFFIXES[kind])) for kind in _IN_FOLDERS}
            if not any(found.values()):
                suffixes = ", ".join(suffix for kind in _IN_FOLDERS for suffix in SUFFIXES[kind])
                raise GramianError(f"{argument}: {path} has no file to read; expected files ending in {suffixes}")
        elif path.exists():
            found = {_kind_of(path): [path]}
        else:
            raise GramianError(f"{argument}: {path} does not exist; expected text or JSONL files, or folders of them")
        for kind, files in found.items():
            kinds.setdefault(kind, []).extend(sorted(files))
    kinds = {kind: files for kind, files in kinds.items() if files}
    if len(kinds) > 1:
        listed = " and ".join(f"{kind} ({files[0]})" for kind, files in kinds.items())
        raise GramianError(f"{argument}: {listed}; expected files of one kind, named one by one")
    ((kind, files),) = kinds.items()
    try:
        size = sum(file.stat().st_size for file in files)
        field = _look(kind, files)
    except OSError as problem:
        raise unreadable(Path(problem.filename), problem) from None
    return FirstLook(kind, field, len(files), size)


_IN_FOLDERS: tuple[Source, ...] = ("text", "jsonl")


def _kind_of(path: Path) -> Source:
    """`data.source` of a file, by its name; "text" if that says nothing."""
    by_name: tuple[Source, ...] = ("jsonl", "tokens")
    return next((kind for kind in by_name if path.suffix.lower() in SUFFIXES[kind]), "text")


def _look(kind: Source, files: Sequence[Path]) -> str:
    """Check the beginnings of files; returns the value of `data.field`."""
    fields: dict[str, Path] = {}
    for file in files if kind != "tokens" else ():
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
        if kind == "jsonl":
            fields.setdefault(_field_of(beginning, file), file)
            continue
        why = why_not_utf8(beginning)
        if why is None and b"\0" in beginning:
            why = "has zero bytes, as UTF-16 and binary files have"
        if why is not None:
            raise GramianError(f"{file}: {why}; expected text in UTF-8")
    if len(fields) > 1:
        listed = ", ".join(f'"{field}" of {file}' for field, file in fields.items())
        raise GramianError(f"data.field: text stands under {listed}; expected one key for all files")
    return next(iter(fields), "text")


def _field_of(beginning: bytes, file: Path) -> str:
    """The key of the first JSON line that holds text: "text" if there is one, else the only one, or the longest."""
    first = next((line for line in beginning.split(b"\n") if line.strip()), b"")
    expected = "expected one JSON object per line"
    if not first:
        raise GramianError(f"{file}: is empty; {expected}")
    try:
        item = json.loads(first)
    except (ValueError, RecursionError):
        raise GramianError(f"{file}: {why_not_utf8(beginning) or 'its first line is not JSON'}; {expected}") from None
    texts = {key: value for key, value in item.items() if isinstance(value, str)} if isinstance(item, dict) else {}
    if not texts:
        raise GramianError(f"{file}: the first line has no text; {expected}, with a text under one of its keys")
    return "text" if "text" in texts else max(texts, key=lambda key: len(texts[key]))
