"""What a look at the data finds before a run: files cut off, documents empty or repeated, too few windows."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gramian.data.data_files import find_files, read_sidecar, unreadable
from gramian.data.documents import Documents
from gramian.data.windows import Windows
from gramian.train.config.config import DataSection

EMPTY = 0.05
"""Share of the documents that may be empty."""
REPEATED = 0.05
"""Share of the documents that may repeat another one."""
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: of what was looked at.
        measured: what was found.
        threshold: the bound it is held to.
        ok: whether it is kept.
        hint: what to do if not.
    """

    name: str
    measured: float
    threshold: float
    ok: bool
    hint: str


def look_at_files(data: DataSection) -> list[Finding]:
    """Files that look cut off: half a character or half a JSON line at the end, an array shorter than its header says.

    Reads the ends of text and JSONL files and the heads of token files.

    Raises:
        GramianError: if a file is missing or cannot be read.
    """
    if data.source == "embedded":
        return []
    files = find_files(data.files, data.source)
    files += find_files(data.validation_files, data.source, "data.validation_files")
    cut: list[str] = []
    for file in files:
        try:
            if not _LOOKS_WHOLE[data.source](file.path):
                cut.append(str(file.path))
        except OSError as problem:
            raise unreadable(file.path, problem) from None
    more = f" and {len(cut) - _NAMED} more" if len(cut) > _NAMED else ""
    hint = f"write again, or leave out: {', '.join(cut[:_NAMED])}{more}"
    return [Finding("files cut off", len(cut), 0, not cut, hint)]


def look_at_documents(documents: Documents) -> list[Finding]:
    """Shares of documents that are empty, that repeat another one, and that validate though they are trained on.

    A pass over all tokens.
    """
    train, validation = documents.train.document_hashes(), documents.validation.document_hashes()
    both = np.concatenate([train, validation])
    empty = documents.empty / documents.read
    repeated = 1 - len(np.unique(both)) / len(both)
    leaked = float(np.isin(validation, train).mean())
    return [
        Finding("empty documents", empty, EMPTY, empty <= EMPTY, "look at what wrote them; they teach nothing"),
        Finding(
            "repeated documents", repeated, REPEATED, repeated <= REPEATED, "remove all but one of equal documents"
        ),
        Finding("validation documents trained on", leaked, REPEATED, leaked <= REPEATED, "remove them from data.files"),
    ]


def look_at_windows(windows: Windows, batch: int) -> list[Finding]:
    """Whether a batch can be filled with windows that differ."""
    hint = "more data, or a smaller data.batch or data.length"
    return [Finding("windows", len(windows), batch, len(windows) >= batch, hint)]


def _ends_in_a_character(path: Path) -> bool:
    with path.open("rb") as content:
        content.seek(max(0, content.seek(0, os.SEEK_END) - 8))
        tail = content.read()
    # The tail may begin with up to three bytes of a character that begins before it.
    for begin in range(4):
        try:
            tail[begin:].decode()
            return True
        except UnicodeDecodeError as problem:
            if problem.reason == "unexpected end of data":
                return False
    return True


def _ends_in_a_line(path: Path) -> bool:
    """Whether the last line has its newline, or is JSON without it."""
    reach = 1 << 16
    with path.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        while True:
            lines.seek(max(0, size - reach))
            _, newline, last = lines.read().rpartition(b"\n")
            if newline or reach >= size:
                break
            reach *= 2
    if not last.strip():
        return True
    try:
        json.loads(last)
    except ValueError:
        return False
    return True


def _is_whole_array(path: Path) -> bool:
    if path.suffix == ".npy":
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            return False
    elif sidecar := read_sidecar(path):
        return path.stat().st_size % sidecar.dtype.itemsize == 0
    return True


_LOOKS_WHOLE: dict[str, Callable[[Path], bool]] = {
    "text": _ends_in_a_character,
    "jsonl": _ends_in_a_line,
    "tokens": _is_whole_array,
}
