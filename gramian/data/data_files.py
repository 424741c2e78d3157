"""Find the files that a config names, and open files of token ids."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gramian.core.errors import GramianError
from gramian.data.tokenizer import Ids

Source = Literal["embedded", "text", "jsonl", "parquet", "arrow", "tokens"]

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (
        ".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".java", ".js", ".ts", ".go", ".rs",
        ".sh",
    ),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "tokens": (".npy", ".bin"),
}  # fmt: skip
"""{source: suffixes of the files read from a folder}; a text or JSONL file that the config names may have any suffix."""
RECORDS = ("jsonl", "parquet", "arrow")
"""Sources whose records are objects with keys."""


OTHER_KINDS = {
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "compressed by gzip", b"PK": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstd", b"%PDF": "a PDF", b"PAR1": "a Parquet file",
}  # fmt: skip
"""{first bytes of a file: what it is instead of text}."""


@dataclass(frozen=True)
class File:
    """A file to read; `named` if the config names the file itself and not a folder above it."""

    path: Path
    named: bool


@dataclass(frozen=True)
class Sidecar:
    """The JSON description of a token file: number type of a `.bin`, number of token ids, and the id that ends a document."""

    dtype: np.dtype[Any]
    vocabulary: int
    end: int


def find_files(names: Sequence[str], source: Source, field: str = "data.files") -> list[File]:
    """List the files of `names` in the given order; a folder stands for its files of the right suffix, sorted by path.

    A name with *, ? or [ stands for what it matches, sorted; ** for folders of any depth. Hidden files and folders inside a
    folder are skipped. A path that does not exist, a pattern without a match, or a folder without such a file raises a
    GramianError that names the config field `field`.
    """
    found: list[File] = []
    for name in (path for pattern in names for path in _matches(pattern, field)):
        path = Path(name)
        try:
            folder, exists = path.is_dir(), path.exists()
        except OSError as problem:
            raise GramianError(f"{field}: {unreadable(path, problem)}") from None
        if folder:
            inside = sorted(files_below(path, SUFFIXES[source]), key=lambda file: file.as_posix())
            if not inside:
                raise GramianError(
                    f"{field}: {name} has no file to read; expected files ending in {', '.join(SUFFIXES[source])}"
                )
            found += [File(file, named=False) for file in inside]
        elif exists:
            found.append(File(path, named=True))
        else:
            raise GramianError(f"{field}: {name} does not exist; expected a file or a folder")
    places: dict[Path, Path] = {}
    for file in found:
        other = places.setdefault(file.path.resolve(), file.path)
        if other is not file.path:
            raise GramianError(f"{field}: {file.path} is {other} once more; expected every file once")
    return found


def _matches(name: str, field: str) -> list[str]:
    """The paths that a name stands for: itself, or what it matches if it is a pattern and no path."""
    if not name:
        raise GramianError(f"{field}: a name is empty; expected a file or a folder")
    if not any(mark in name for mark in "*?[") or os.path.lexists(name):
        return [name]
    parts = list(Path(name).parts)
    for place in range(len(parts)):  # a folder that is there is meant by its name, brackets and all
        if not os.path.lexists(Path(*parts[: place + 1])):
            break
        parts[place] = parts[place] if place == 0 and parts[0] == os.sep else glob.escape(parts[place])
    found = sorted(glob.glob(str(Path(*parts)), recursive=True))
    matches = [path for path in found if os.path.isfile(path)] or found
    if not matches:
        raise GramianError(f"{field}: {name} matches nothing; expected a file, a folder or a pattern of them")
    return matches


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises `GramianError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise unreadable(path, problem) from None


def why_not_utf8(content: bytes, *, complete: bool = False, offset: int = 0) -> str | None:
    """Text that says why bytes are not UTF-8, and what else they are; None if they are. Not `complete`: a file's beginning.

    `offset`: bytes of the file before them.
    """
    try:
        content.decode()
        return None
    except UnicodeDecodeError as problem:
        if not complete and problem.reason == "unexpected end of data":
            return None
        kind = next((kind for mark, kind in OTHER_KINDS.items() if content.startswith(mark)), None)
        return f"byte {offset + problem.start} is not UTF-8" if kind is None else f"is {kind} and not UTF-8"


def open_tokens(path: Path) -> tuple[Ids, Sidecar | None]:
    """Open a token file; returns its token ids as a 1-D memory map, and its sidecar, the `.json` that describes it.

    A `.npy` file may have a sidecar (None if it has none), a `.bin` file must have one. Raises `GramianError` if the file
    cannot be read, is truncated or empty, or is not a 1-D array of integers.
    """
    sidecar = read_sidecar(path)
    try:
        if path.suffix.lower() == ".npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix.lower() == ".bin":
            ids = _open_bin(path, sidecar)
        else:
            raise GramianError(f"{path}: is not a token file; expected .npy or .bin")
    except OSError as problem:
        raise unreadable(path, problem) from None
    except (ValueError, EOFError) as problem:
        reason = str(problem).splitlines()[0]
        raise GramianError(f"{path}: is not a complete .npy ({reason}); expected a 1-D array of integers") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise GramianError(f"{path}: contains {ids.dtype} {list(ids.shape)}; expected a 1-D array of integers")
    if not len(ids):
        raise GramianError(f"{path}: is empty; expected token ids")
    return ids, sidecar


def read_sidecar(path: Path) -> Sidecar | None:
    """Read the `.json` beside a token file; None if there is none. Raises if it is incomplete or contradictory."""
    sidecar = path.with_suffix(".json")
    expected = 'expected {"dtype": "uint16", "vocabulary": …, "end": …}'
    if not sidecar.exists():
        return None
    try:
        content = json.loads(read_bytes(sidecar))
    except ValueError:
        raise GramianError(f"{sidecar}: is not JSON; {expected}") from None
    if not isinstance(content, dict):
        raise GramianError(f"{sidecar}: is not an object; {expected}")
    vocabulary, end = content.get("vocabulary"), content.get("end")
    if not isinstance(vocabulary, int) or not isinstance(end, int) or not 0 <= end < vocabulary:
        raise GramianError(f"{sidecar}: vocabulary {vocabulary}, end {end}; {expected} with 0 <= end < vocabulary")
    try:
        dtype: np.dtype[Any] | None = np.dtype(content.get("dtype"))
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.kind not in "iu":
        raise GramianError(f"{sidecar}: dtype {content.get('dtype')!r} is not an integer type; {expected}")
    return Sidecar(dtype, vocabulary, end)


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files below a folder that end in one of `suffixes`, in any order; what is hidden is skipped."""

    def refuse(problem: OSError) -> None:
        raise unreadable(Path(problem.filename), problem) from None

    for place, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                yield path


def unreadable(path: Path, problem: OSError) -> GramianError:
    """Return the GramianError to raise for a file whose reading failed with the OSError `problem`."""
    return GramianError(f"{path}: cannot be read ({problem.strerror}); expected a file that can")


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
