"""An influence index on disk: passages, factors, and shards of compressed gradients, each with its checksum.

| file | content |
|---|---|
| index.json | format, model, passages, options, what is complete, and the checksum of every other file; replaced atomically |
| passages.safetensors | tokens and targets of the passages, int32 [N, T] |
| factors.safetensors | the Fisher's factors, as `KFACNaturalGradient.save` writes them |
| gradients-00000.safetensors … | compressed gradients of consecutive passages, [passages of the shard, columns] |
| .lock | empty; locked by a build as long as it runs |

A build that was interrupted goes on after the last file that index.json names. Nothing is pickled.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramian.core.durable_files import TEMPORARY, FileRecord, replace_text, replacing
from gramian.core.errors import GramianError
from gramian.core.folder_lock import LOCK, FolderLock

INDEX = "index.json"
PASSAGES = "passages.safetensors"
FACTORS = "factors.safetensors"
FORMAT = 1


class IndexFolder:
    """The files of one index; `facts` is the content of index.json."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts

    @classmethod
    def open(cls, path: str | Path, field: str = "index") -> "IndexFolder":
        """Read index.json; a GramianError that begins with `field` if it is missing, damaged or of another format."""
        place = Path(path)
        try:
            facts = json.loads((place / INDEX).read_text())
        except FileNotFoundError:
            raise GramianError(
                f"{field}: {place} has no {INDEX}; expected a folder of gramian influence build"
            ) from None
        except (OSError, ValueError):
            raise GramianError(
                f"{field}: {place / INDEX} cannot be read; expected that of an influence index"
            ) from None
        if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("files"), dict):
            raise GramianError(f"{field}: {place / INDEX} has another format; expected format {FORMAT}")
        return cls(place, facts)

    @classmethod
    def begin(cls, path: str | Path, identity: Mapping[str, Any]) -> "IndexFolder":
        """Begin an index that belongs to `identity` in a folder that `build_lock` made, or open what an earlier build left.

        Raises a GramianError if the folder has an index of another model, text or options, or other files.
        """
        place = Path(path)
        if (place / INDEX).exists():
            found = cls.open(place, "out")
            wanted = json.loads(json.dumps(identity))
            if FACTORS not in found.facts["files"]:  # nothing that the options have shaped is there yet
                found.facts |= {"options": wanted["options"]}
            elif not any(name.startswith("gradients-") for name in found.facts["files"]):
                asked = wanted["options"]["gradients"]
                found.facts["complete"] &= asked == found.facts["options"]["gradients"]
                found.facts["options"] |= {"gradients": asked}
            found.facts["options"] |= {"batch": wanted["options"]["batch"]}  # any is one pass
            for key, value in wanted.items():
                if found.facts.get(key) != value:
                    raise GramianError(
                        f"out: {place} is an index of another {_differing(key, found.facts.get(key), value)}"
                    )
            return found
        if any(not file.name.startswith(TEMPORARY) and file.name != LOCK for file in place.iterdir()):
            raise GramianError(f"out: {place} is not empty; expected a new folder, or an index of this model and text")
        folder = cls(place, {"format": FORMAT, **identity, "files": {}, "complete": False})
        folder.write_facts()
        return folder

    def write_facts(self) -> None:
        """Replace index.json."""
        replace_text(self.path / INDEX, json.dumps(self.facts, indent=1) + "\n")

    # ---- files -----------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a file is complete: named in index.json, and there with its size and checksum."""
        if name not in self.facts["files"]:
            return False
        size, sha256 = self.facts["files"][name]
        return FileRecord(size, sha256).difference(self.path / name) is None

    def require(self, name: str) -> Path:
        """The path of a file whose checksum was verified; a GramianError if it is missing or damaged."""
        if name not in self.facts["files"]:
            raise GramianError(f"index: {self.path} has no {name} yet; expected a complete build")
        size, sha256 = self.facts["files"][name]
        problem = FileRecord(size, sha256).difference(self.path / name)
        if problem is not None:
            raise GramianError(f"index: {self.path / name} {problem}; expected the file that was built")
        return self.path / name

    def add(self, name: str, record: FileRecord) -> None:
        """Name a file that was written in index.json, with its checksum."""
        self.facts["files"][name] = [record.bytes, record.sha256]
        self.write_facts()

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> FileRecord:
        """Write a safetensors file atomically; returns its record, which `add` takes."""
        from safetensors.torch import save_file

        try:
            with replacing(self.path / name) as temporary:
                save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, temporary)
        except OSError as problem:
            raise GramianError(f"{self.path / name}: {problem.strerror}; expected room for it") from None
        return FileRecord.of(self.path / name)

    def read_tensors(self, name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Read a safetensors file whose checksum was verified."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(self.require(name), device=str(device))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all complete files."""
        return sum(size for size, _ in self.facts["files"].values())


@contextmanager
def build_lock(path: str | Path) -> Iterator[None]:
    """Context manager: make the folder of an index and lock it, so that one build at a time writes there.

    What this has made is removed at the end if no index was begun in it. A GramianError says that another build is running, or
    why the folder cannot be written; a build that was killed leaves no lock.
    """
    place = Path(path)
    try:
        made = [one for one in (place / LOCK, place) if not one.exists()]
        place.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(place)
    except BlockingIOError:
        raise GramianError(
            f"out: {place} is being built by another process; expected another folder, or that one to end"
        ) from None
    except (OSError, ValueError) as problem:  # ValueError: of a name that holds a zero byte
        why = getattr(problem, "strerror", problem)
        raise GramianError(f"out: {place}: {why}; expected a folder that can be written") from None
    try:
        yield
    finally:
        if not (place / INDEX).exists():
            for one in made:
                with suppress(OSError):
                    one.rmdir() if one.is_dir() else one.unlink()
        lock.release()


def shard_name(number: int) -> str:
    """File name of a shard of compressed gradients."""
    return f"gradients-{number:05d}.safetensors"


def _differing(key: str, old: Any, new: Any) -> str:
    """Name what differs between an index and what was asked for."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next((name for name in {**old, **new} if old.get(name) != new.get(name)), key)
        return (
            f"{key}.{inner}: {old.get(inner)!r}, not {new.get(inner)!r}; expected another folder, or the same {inner}"
        )
    return f"{key}; expected another folder, or the same {key}"
