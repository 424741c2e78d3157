"""The embedded corpus: the source of the running interpreter's standard library, as bytes.

Every Python installation contains this text, so the demo and the tests need no download. Stable hashes of a file's relative
path determine whether it is used within the size limit, and whether it is for training or validation.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gramian.core.errors import GramianError

VALIDATION_FRACTION = 0.05

# Folders that are not part of the library: installed packages, tests and their data, caches.
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Files written per build or per installation, which would make the corpus differ between equal interpreters.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Disjoint training and validation files, {relative posix path: content} in the order of the paths."""

    train: dict[str, bytes]
    validation: dict[str, bytes]


def load_corpus(limit_bytes: int = 8_000_000, root: Path | None = None) -> Corpus:
    """Read the embedded corpus, Python source files, and split it by path into training and validation.

    Args:
        limit_bytes: upper bound on the bytes read; files are added in the order of their hash until the next one exceeds it.
        root: folder of `*.py` files; None: the standard library of the running interpreter.

    Example:
        >>> "textwrap.py" in load_corpus(limit_bytes=20_000_000).train
        True

    Raises:
        GramianError: if there is no such folder, it has no source, or the limit leaves either split empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    if not root.is_dir():
        raise GramianError(f"corpus: {root} is not a folder; expected an unpacked standard library with its *.py files")
    paths = sorted(_source_files(root), key=lambda path: _path_hash(path, "order"))
    if not paths:
        raise GramianError(f"corpus: no *.py files in {root}; expected an unpacked standard library with its source")

    contents: dict[str, bytes] = {}
    total = 0
    for path in paths:
        content = (root / path).read_bytes()
        total += len(content)
        if total > limit_bytes:
            break
        contents[path] = content

    splits: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
    for path in sorted(contents):
        splits[_path_hash(path, "split") < VALIDATION_FRACTION * 2**64][path] = contents[path]
    train, validation = (sum(map(len, split.values())) for split in splits)
    if not train or not validation:
        raise GramianError(
            f"corpus: limit_bytes={limit_bytes} leaves {train} bytes to train and {validation} to validate; "
            "expected a limit that leaves both above 0"
        )
    return Corpus(*splits)


def _source_files(root: Path) -> Iterator[str]:
    """Yield the relative posix paths of the source files below `root`."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS and not _per_build(name)]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and not _per_build(name) and path.is_file():
                yield path.relative_to(root).as_posix()


def _per_build(name: str) -> bool:
    return name.startswith(_EXCLUDED_PREFIXES)


def _path_hash(path: str, purpose: str) -> int:
    """64-bit hash of a path; each `purpose` ("order", "split") gives an independent hash."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8, person=purpose.encode()).digest(), "little")
