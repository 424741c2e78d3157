"""Find data files that are truncated: half a character or JSON line at the end, an array or table shorter than its header."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gramian.core.errors import GramianError
from gramian.data.corpus.arrow_files import arrow_groups
from gramian.data.data_files import find_files, read_sidecar, unreadable
from gramian.data.options import DataSection


def truncated_files(data: DataSection) -> list[str]:
    """Paths of the config's files that are cut off; reads the ends of text and JSONL files, and the headers of others."""
    files = find_files(data.files, data.source)
    files += find_files(data.validation_files, data.source, "data.validation_files")
    truncated: list[str] = []
    for file in files:
        try:
            if not _IS_COMPLETE[data.source](file.path):
                truncated.append(str(file.path))
        except OSError as problem:
            raise unreadable(file.path, problem) from None
    return truncated


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
    """Return whether the last line of a JSONL file ends in a newline, or is complete JSON without it."""
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


def _is_complete_array(path: Path) -> bool:
    if path.suffix == ".npy":
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            return False
    elif sidecar := read_sidecar(path):
        return path.stat().st_size % sidecar.dtype.itemsize == 0
    return True


def _is_complete_table(path: Path) -> bool:
    try:
        return bool(arrow_groups(path))
    except GramianError:
        return False


_IS_COMPLETE: dict[str, Callable[[Path], bool]] = {
    "text": _ends_in_a_character,
    "jsonl": _ends_in_a_line,
    "parquet": _is_complete_table,
    "arrow": _is_complete_table,
    "tokens": _is_complete_array,
}
