"""A first look at data files: of what kind they are, how large, and under which key JSON lines hold their text.

Files in, the values of `data.source` and `data.field` out. It reads names and first lines alone: what is damaged further on is
found by `gramian doctor` and `gramian train`.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gramian.core.errors import GramianError
from gramian.data.data_files import SUFFIXES, Source, files_below, unreadable, why_not_utf8

BEGINNING = 1 << 20
"""Bytes of a text file that are looked at."""
LINES = 20
"""Lines of a JSONL file that are looked at."""
USUAL_FIELDS = ("text", "content", "body")
"""Keys that are taken first, if all lines have them."""


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
        raise GramianError(f"{argument}: {unreadable(Path(problem.filename), problem)}") from None
    except GramianError as problem:
        raise GramianError(f"{argument}: {problem}") from None
    return FirstLook(kind, field, len(files), size)


_IN_FOLDERS: tuple[Source, ...] = ("text", "jsonl")


def _kind_of(path: Path) -> Source:
    """`data.source` of a file, by its name; "text" if that says nothing."""
    by_name: tuple[Source, ...] = ("jsonl", "tokens")
    return next((kind for kind in by_name if path.suffix.lower() in SUFFIXES[kind]), "text")


def _look(kind: Source, files: Sequence[Path]) -> str:
    """Check the beginnings of files; returns the value of `data.field`."""
    if kind == "jsonl":
        return _field_of(files)
    for file in files if kind == "text" else ():
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
        why = why_not_utf8(beginning)
        if why is None and b"\0" in beginning:
            why = "has zero bytes, as UTF-16 and binary files have"
        if why is not None:
            raise GramianError(f"{file}: {why}; expected text in UTF-8")
    return "text"


def _field_of(files: Sequence[Path]) -> str:
    """The key that holds text in the first lines of all files: the first of `USUAL_FIELDS`, else that of the most text."""
    amounts: dict[str, int] = {}
    for place, file in enumerate(files):
        found = _text_amounts(file)
        amounts = {key: n + found[key] for key, n in amounts.items() if key in found} if place else found
        if not amounts:
            raise GramianError(f"{file}: no key of its lines holds text in all files; expected such a key")
    usual = next((key for key in USUAL_FIELDS if key in amounts), None)
    return usual or max(amounts, key=lambda key: amounts[key])


def _text_amounts(file: Path) -> dict[str, int]:
    """{key: characters of its texts} of the keys that hold text in all of a JSONL file's first lines."""
    expected = "expected one JSON object per line"
    amounts: dict[str, int] | None = None
    with file.open("rb") as lines:
        for line in islice((line for line in lines if line.strip()), LINES):
            try:
                item = json.loads(line.removeprefix(codecs.BOM_UTF8))
            except (ValueError, RecursionError):
                raise GramianError(
                    f"{file}: {why_not_utf8(line) or 'its first lines are not JSON'}; {expected}"
                ) from None
            if not isinstance(item, dict):
                raise GramianError(f"{file}: its first lines are no objects; {expected}")
            texts = {key: len(value) for key, value in item.items() if isinstance(value, str)}
            amounts = texts if amounts is None else {k: n + texts[k] for k, n in amounts.items() if k in texts}
    if amounts is None:
        raise GramianError(f"{file}: is empty; {expected}")
    if not amounts:
        raise GramianError(
            f"{file}: no key of its first lines holds text; {expected}, with a text under one of its keys"
        )
    return amounts
