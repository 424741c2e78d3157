"""Which files a config names, and what is in one of them: text, JSON lines, or tokens."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gramian.core.errors import GramianError
from gramian.data.tokenizer import Ids

Source = Literal["embedded", "text", "jsonl", "tokens"]

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (
        ".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".java", ".js", ".ts", ".go", ".rs",
        ".sh",
    ),
    "jsonl": (".jsonl", ".ndjson"),
    "tokens": (".npy", ".bin"),
}  # fmt: skip
"""What is taken of a folder; a file that is named is read whatever its suffix, tokens excepted."""


@dataclass(frozen=True)
class File:
    """A file to read; `named` if the config names it, not a folder above it."""

    path: Path
    named: bool


@dataclass(frozen=True)
class Sidecar:
    """What is said of a token file: the type of an id in a `.bin`, the number of ids, and the one that ends a document."""

    dtype: np.dtype[Any]
    vocabulary: int
    end: int


def find_files(names: Sequence[str], source: Source, field: str = "data.files") -> list[File]:
    """The files that `names` and the folders among them hold, in the order given, those of a folder sorted by path.

    Hidden files and folders inside a folder are passed over.

    Raises:
        GramianError: if one is missing, or a folder holds no file of its kind.
    """
    found: list[File] = []
    for name in names:
        path = Path(name)
        try:
            folder, exists = path.is_dir(), path.exists()
        except OSError as problem:
            raise unreadable(path, problem) from None
        if folder:
            inside = sorted(_files_below(path, SUFFIXES[source]), key=lambda file: file.as_posix())
            if not inside:
                raise GramianError(
                    f"{field}: {name} holds no file to read; expected files ending in {', '.join(SUFFIXES[source])}"
                )
            found += [File(file, named=False) for file in inside]
        elif exists:
            found.append(File(path, named=True))
        else:
            raise GramianError(f"{field}: {name} does not exist; expected a file or a folder")
    return found


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        GramianError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as problem:
        raise unreadable(path, problem) from None


def read_text(file: File) -> bytes:
    """The content of a text file, which is UTF-8; empty where a file of a folder is.

    Raises:
        GramianError: if it cannot be read, is no UTF-8, or is empty though it is named.
    """
    content = read_bytes(file.path)
    try:
        content.decode()
    except UnicodeDecodeError as problem:
        raise GramianError(f"{file.path}: byte {problem.start} is no UTF-8; expected text in UTF-8") from None
    if not content and file.named:
        raise GramianError(f"{file.path}: is empty; expected text")
    return content


def read_lines(path: Path, field: str) -> Iterator[bytes]:
    """The text under `field` of each line of a JSONL file, as UTF-8; blank lines are passed over.

    Raises:
        GramianError: with file:line, if a line is no object with such a text; if the file is unreadable or has no line.
    """
    count = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    count += 1
                    yield _text_of(line, field, f"{path}:{number}")
    except OSError as problem:
        raise unreadable(path, problem) from None
    if not count:
        raise GramianError(f"{path}: is empty; expected one JSON object a line")


def open_tokens(path: Path) -> tuple[Ids, Sidecar | None]:
    """A file of tokens as a 1-D memory map, and its sidecar: `.npy`, which may have one, or `.bin`, which must.

    Raises:
        GramianError: if it cannot be read, is shorter than it says, is empty, or holds no 1-D array of integers.
    """
    sidecar = read_sidecar(path)
    try:
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".bin":
            ids = _open_bin(path, sidecar)
        else:
            raise GramianError(f"{path}: is no file of tokens; expected .npy or .bin")
    except OSError as problem:
        raise unreadable(path, problem) from None
    except (ValueError, EOFError) as problem:
        reason = str(problem).splitlines()[0]
        raise GramianError(f"{path}: is no whole .npy ({reason}); expected a 1-D array of integers") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise GramianError(f"{path}: holds {ids.dtype} {list(ids.shape)}; expected a 1-D array of integers")
    if not len(ids):
        raise GramianError(f"{path}: is empty; expected token ids")
    return ids, sidecar


def read_sidecar(path: Path) -> Sidecar | None:
    """What the `.json` beside a token file says; None if there is none.

    Raises:
        GramianError: if it does not say all, or what cannot be.
    """
    sidecar = path.with_suffix(".json")
    expected = 'expected {"dtype": "uint16", "vocabulary": …, "end": …}'
    if not sidecar.exists():
        return None
    try:
        told = json.loads(read_bytes(sidecar))
    except ValueError:
        raise GramianError(f"{sidecar}: is no JSON; {expected}") from None
    if not isinstance(told, dict):
        raise GramianError(f"{sidecar}: is no object; {expected}")
    vocabulary, end = told.get("vocabulary"), told.get("end")
    if not isinstance(vocabulary, int) or not isinstance(end, int) or not 0 <= end < vocabulary:
        raise GramianError(f"{sidecar}: vocabulary {vocabulary}, end {end}; {expected} with 0 <= end < vocabulary")
    try:
        dtype: np.dtype[Any] | None = np.dtype(told.get("dtype"))
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.kind not in "iu":
        raise GramianError(f"{sidecar}: dtype {told.get('dtype')!r} is no integer type; {expected}")
    return Sidecar(dtype, vocabulary, end)


def unreadable(path: Path, problem: OSError) -> GramianError:
    """What to raise for a file that cannot be read."""
    return GramianError(f"{path}: cannot be read ({problem.strerror}); expected a file that can")


def _files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def refuse(problem: OSError) -> None:
        raise unreadable(Path(problem.filename), problem) from None

    for place, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                yield path


def _open_bin(path: Path, sidecar: Sidecar | None) -> Ids:
    if sidecar is None:
        raise GramianError(
            f"{path.with_suffix('.json')}: does not exist; "
            f'expected {{"dtype": "uint16", "vocabulary": …, "end": …}} for {path.name}'
        )
    size, dtype = path.stat().st_size, sidecar.dtype
    if size % dtype.itemsize:
        raise GramianError(f"{path}: is cut off at {size} bytes; expected a multiple of {dtype.itemsize} for {dtype}")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)


def _text_of(line: bytes, field: str, place: str) -> bytes:
    expected = f'expected an object with a text under "{field}"'
    try:
        told = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as problem:
        raise GramianError(f"{place}: byte {problem.start} is no UTF-8; {expected}") from None
    except (ValueError, RecursionError) as problem:
        reason = str(problem)
        if isinstance(problem, json.JSONDecodeError):
            reason = f"{problem.msg}: column {problem.colno}"
        raise GramianError(f"{place}: is no JSON ({reason}); {expected}") from None
    if not isinstance(told, dict):
        raise GramianError(f"{place}: is no object; {expected}")
    if field not in told:
        raise GramianError(f'{place}: has no "{field}" but {", ".join(told) or "nothing"}; {expected}')
    text = told[field]
    if not isinstance(text, str):
        raise GramianError(f'{place}: "{field}" is no text; {expected}')
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise GramianError(f'{place}: "{field}" has half a surrogate pair; {expected}') from None
