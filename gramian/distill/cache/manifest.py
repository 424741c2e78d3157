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
    """Everything that determines the bytes of a cache: two builds with equal identities write equal folders."""

    kind: str
    """Name of the kind of cache: "hidden", "topk" or "sampled"."""
    teacher: str
    """Hash of the teacher's class, config and weights."""
    autocast: str | None
    """Dtype of the teacher's matrix products under autocast; None without autocast."""
    tokenizer: str
    """Digest of the tokenizer."""
    windows: str
    """Hash of the training tokens and of how they are cut into windows."""
    count: int
    """Number of windows."""
    length: int
    """Tokens per window."""
    layers: tuple[int, ...]
    """Numbers of the layers whose residual stream is stored too."""
    layer_dtype: str
    layer_width: int
    shard_windows: int
    facts: Mapping[str, Any]
    """Settings of the kind of cache, such as vocabulary, k, knots and temperatures."""

    @property
    def layout(self) -> CacheLayout:
        """The columns and shards of the cache, from which file names and the position of every window follow."""
        columns = KINDS[self.kind].columns(self.facts)
        columns += tuple(Column(f"layer-{layer}", self.layer_dtype, self.layer_width) for layer in self.layers)
        return CacheLayout(columns, self.count, self.length, self.shard_windows)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the cache covers; all stored ids are below it."""
        return int(self.facts["vocabulary"])

    def _flat(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain.pop("facts"), **plain}

    def difference(self, other: "CacheIdentity") -> str | None:
        """The first field in which `other` differs, with both values as text; None if both are equal."""
        mine, its = self._flat(), other._flat()
        # Facts belong to a kind, so another kind is reported first.
        for name in dict.fromkeys(["kind", "teacher", "tokenizer", "windows", *mine, *its]):
            if mine.get(name) != its.get(name):
                return f"{name} is {short(mine.get(name))} there, {short(its.get(name))} here"
        return None


@dataclass(frozen=True)
class Manifest:
    """The content of a cache's `manifest.json`: identity, files with checksums, and storage errors."""

    identity: CacheIdentity
    complete: bool
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """{path inside the cache: size and checksum} of all files."""
    errors: StorageErrors = field(default_factory=StorageErrors)
    """Measured storage errors. Kind "hidden": of logits, by rounding. "topk": of stored logits, and of log-normaliser and tail
    mass in the range of temperatures. "sampled": none.
    """
    measured_windows: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all columns; the head, which is stored once, is not counted."""
        return self.identity.layout.bytes_per_token

    def write(self, folder: Path) -> None:
        """Write this manifest into a cache's folder atomically, replacing an older one."""
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
    """Read the manifest of a cache's folder; None if there is none.

    Raises a GramianError if it is damaged, has another format version, or names an unknown kind of cache.
    """
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
    """Convert {path inside the cache: record} to JSON values {path: [bytes, SHA-256]}."""
    return {name: [*astuple(record)] for name, record in files.items()}


def files_from_json(files: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Convert {path inside the cache: [bytes, SHA-256]}, as `files_to_json` makes it, to {path: record}."""
    return {name: FileRecord(*record) for name, record in files.items()}


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write `body` and its checksum to a JSON file atomically."""
    replace_file(path, json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The body of a file that `write_json` wrote; None if there is no file. Raises a GramianError that names a damaged file."""
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
    """Format a value for a message: a long string, such as a hash, by its first 12 characters, other values in full."""
    text = str(value)
    return f"{text[:12]}…" if len(text) > 24 and isinstance(value, str) else text


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
