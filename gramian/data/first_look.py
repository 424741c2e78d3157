"""A first look at data files: of what kind they are, how large, and under which key their records hold text or messages.

Files in, the values of `data.source`, `data.record` and `data.field` out. It reads names and first lines alone: what is damaged
further on is found by `gramian doctor` and `gramian train`.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.data.corpus.arrow_files import arrow_groups, arrow_records
from gramian.data.data_files import RECORDS, SUFFIXES, Source, files_below, unreadable, why_not_utf8

BEGINNING = 1 << 20
"""Bytes of a text file that are looked at."""
LINES = 20
"""Lines of a JSONL file that are looked at."""
EXPECTED = "expected one JSON object per line"
USUAL_FIELDS = ("text", "content", "body")
"""Keys that are taken first, if all lines have them."""


@dataclass(frozen=True)
class FirstLook:
    """What some data files hold."""

    source: Source
    record: str
    """What a record holds: "text", "completion" or "chat"."""
    field: str
    """Key under which records hold their text or messages; "text" for text files."""
    files: int
    size: int
    """Bytes of all files that would be read."""


def look_at_files(paths: Sequence[Path], argument: str) -> FirstLook:
    """Kind and size of data files, or of folders of them; a folder stands for its files of one kind.

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
            raise GramianError(
                f"{argument}: {path} does not exist; expected files of text or records, or folders of them"
            )
        for kind, files in found.items():
            kinds.setdefault(kind, []).extend(sorted(files))
    kinds = {kind: files for kind, files in kinds.items() if files}
    if len(kinds) > 1:
        listed = " and ".join(f"{kind} ({files[0]})" for kind, files in kinds.items())
        raise GramianError(f"{argument}: {listed}; expected files of one kind, named one by one")
    ((kind, files),) = kinds.items()
    try:
        size = sum(file.stat().st_size for file in files)
        record, field = _look(kind, files)
    except OSError as problem:
        raise GramianError(f"{argument}: {unreadable(Path(problem.filename), problem)}") from None
    except GramianError as problem:
        raise GramianError(f"{argument}: {problem}") from None
    return FirstLook(kind, record, field, len(files), size)


_IN_FOLDERS: tuple[Source, ...] = ("text", "jsonl", "parquet", "arrow")


def _kind_of(path: Path) -> Source:
    """`data.source` of a file, by its name; "text" if that says nothing."""
    by_name: tuple[Source, ...] = ("jsonl", "parquet", "arrow", "tokens")
    return next((kind for kind in by_name if path.suffix.lower() in SUFFIXES[kind]), "text")


def _look(kind: Source, files: Sequence[Path]) -> tuple[str, str]:
    """Check the beginnings of files; returns the values of `data.record` and `data.field`."""
    if kind in RECORDS:
        return _record_of(kind, files)
    for file in files if kind == "text" else ():
        with file.open("rb") as opened:
            beginning = opened.read(BEGINNING)
        why = why_not_utf8(beginning)
        if why is None and b"\0" in beginning:
            why = "has zero bytes, as UTF-16 and binary files have"
        if why is not None:
            raise GramianError(f"{file}: {why}; expected text in UTF-8")
    return "text", "text"


def _record_of(kind: Source, files: Sequence[Path]) -> tuple[str, str]:
    """(`data.record`, `data.field`) of files of records, from the first ones of each."""
    chats: set[str] | None = None
    pairs, amounts = True, None
    for file in files:
        found = _keys_of(file, _first_items(kind, file))
        chats = found.chats if chats is None else chats & found.chats
        pairs = pairs and {"prompt", "completion"} <= found.texts.keys()
        amounts = (
            found.texts if amounts is None else {k: n + found.texts[k] for k, n in amounts.items() if k in found.texts}
        )
        if not (chats or amounts):
            raise GramianError(f"{file}: no key of its lines holds text or messages in all files; expected such a key")
    if chats:
        return "chat", "text" if "messages" in chats else min(chats)
    assert amounts is not None
    if pairs:
        return "completion", "text"
    usual = next((key for key in USUAL_FIELDS if key in amounts), None)
    return "text", usual or max(amounts, key=lambda key: amounts[key])


@dataclass(frozen=True)
class _Keys:
    """Keys that hold text in all of a file's first records, with the characters of their texts; and keys of messages."""

    texts: dict[str, int]
    chats: set[str]


def _keys_of(file: Path, items: Iterable[Any]) -> _Keys:
    texts: dict[str, int] | None = None
    chats: set[str] = set()
    for item in items:
        if not isinstance(item, dict):
            raise GramianError(f"{file}: its first lines are no objects; {EXPECTED}")
        found = {key: len(value) for key, value in item.items() if isinstance(value, str)}
        talks = {key for key, value in item.items() if _is_chat(value)}
        chats = talks if texts is None else chats & talks
        texts = found if texts is None else {k: n + found[k] for k, n in texts.items() if k in found}
    if texts is None:
        raise GramianError(f"{file}: is empty; {EXPECTED}")
    return _Keys(texts, chats)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _first_items(kind: Source, file: Path) -> Iterator[Any]:
    """The first records of a file."""
    if kind != "jsonl":
        if arrow_groups(file):
            yield from (item for _, item in islice(arrow_records(file, 0, 1), LINES))
        return
    with file.open("rb") as lines:
        for line in islice((line for line in lines if line.strip()), LINES):
            try:
                yield json.loads(line.removeprefix(codecs.BOM_UTF8))
            except (ValueError, RecursionError):
                raise GramianError(
                    f"{file}: {why_not_utf8(line) or 'its first lines are not JSON'}; {EXPECTED}"
                ) from None
