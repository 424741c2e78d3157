"""The manifest of a cache: what it was made from, its columns, its errors, and the checksum of every file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from gramian.core.durable_files import FileRecord, replace_file
from gramian.core.errors import GramianError
from gramian.distill.cache.kind_registry import KINDS
from gramian.distill.cache.layout import CacheLayout, Column
from gramian.distill.cache.storage_errors import StorageErrors

FORMAT = 1
MANIFEST = "manifest.json"
HEAD = "head.safetensors"


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that decides the bytes of a cache: two builds with equal identities make the same folder."""

    kind: str
    """A name of `kind_registry.KINDS`."""
    teacher: str
    """Hash of class, config and weights."""
    autocast: str | None
    """Dtype of the teacher's matrix products, if it is not that of its weights."""
    tokenizer: str
    """Digest of the tokenizer."""
    windows: str
    """Digest of the tokens and of how they are cut into windows."""
    count: int
    """Number of windows."""
    length: int
    """Tokens per window."""
    layers: tuple[int, ...]
    """Layers of the residual stream that are stored too."""
    layer_dtype: str
    layer_width: int
    shard_windows: int
    facts: Mapping[str, Any]
    """Settings of the kind: vocabulary, k, knots, temperatures, …"""

    @property
    def layout(self) -> CacheLayout:
        """The files, and where a window's row is in them."""
        columns = KINDS[self.kind].columns(self.facts)
        columns += tuple(Column(f"layer-{layer}", self.layer_dtype, self.layer_width) for layer in self.layers)
        return CacheLayout(columns, self.count, self.length, self.shard_windows)

    @property
    def vocabulary(self) -> int:
        """Number of ids; all stored ids are below it."""
        return int(self.facts["vocabulary"])

    def _flat(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain.pop("facts"), **plain}

    def difference(self, other: "CacheIdentity") -> str | None:
        """The first field in which another identity differs, with both values; None if they are equal."""
        mine, its = self._flat(), other._flat()
        # Facts belong to a kind, so another kind is reported first.
        for name in dict.fromkeys(["kind", "teacher", "tokenizer", "windows", *mine, *its]):
            if mine.get(name) != its.get(name):
                return f"{name} is {short(mine.get(name))} there, {short(its.get(name))} here"
        return None


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    identity: CacheIdentity
    complete: bool
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """{path inside the cache: size and checksum}."""
    errors: StorageErrors = field(default_factory=StorageErrors)
    """"hidden": of logits, by rounding. "topk": of stored logits, log-normaliser and tail mass in the range of temperatures.
    "sampled": none."""
    measured_windows: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all columns, without the head, which is stored once."""
        return self.identity.layout.bytes_per_token

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder atomically."""
        body = {
            "format": FORMAT,
            "identity": asdict(self.identity),
            "complete": self.complete,
            "bytes_per_token": self.bytes_per_token,
            "measured_windows": self.measured_windows,
            "errors": self.errors.to_json(),
            "files": files_to_json(self.files),
        }
        write_json(folder / MANIFEST, body)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None if there is none; raises if it is damaged, or of another format."""
    body = read_json(folder / MANIFEST)
    if body is None:
        return None
    if body.get("format") != FORMAT:
        raise GramianError(f"format: {folder / MANIFEST} has {body.get('format')}; expected {FORMAT}")
    identity = body["identity"]
    if identity["kind"] not in KINDS:
        raise GramianError(f"kind: {folder / MANIFEST} has {identity['kind']!r}; expected {', '.join(KINDS)}")
    return Manifest(
        CacheIdentity(**{**identity, "layers": tuple(identity["layers"])}),
        body["complete"],
        files_from_json(body["files"]),
        StorageErrors.from_json(body["errors"]),
        body["measured_windows"],
    )


def files_to_json(files: Mapping[str, FileRecord]) -> dict[str, list[Any]]:
    """{path inside the cache: [bytes, SHA-256]}."""
    return {name: [*astuple(record)] for name, record in files.items()}


def files_from_json(files: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The inverse of `files_to_json`."""
    return {name: FileRecord(*record) for name, record in files.items()}


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace a JSON file with a checksum atomically."""
    replace_file(path, json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The body of a file of `write_json`, None if there is no file; raises `GramianError` naming a damaged file."""
    try:
        outer = json.loads(path.read_bytes())
        body: dict[str, Any] = outer["body"]
        if outer["sha256"] == _digest(body):
            return body
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise GramianError(f"cache: {path} cannot be read ({problem.strerror}); expected a file") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise GramianError(f"cache: {path}: its checksum differs; expected the file as it was written")


def short(value: Any) -> str:
    """The first letters of a hash, other values in full."""
    text = str(value)
    return f"{text[:12]}…" if len(text) > 24 and isinstance(value, str) else text


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
