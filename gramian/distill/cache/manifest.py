"""The manifest of a cache: what it holds, what it was made from, how exact it is, and the checksum of every file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_files import FileRecord, write_whole
from gramian.distill.cache.cache_kind import Kind
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.layout import CacheLayout, Column
from gramian.distill.cache.sampled_cache import Samples
from gramian.distill.cache.storage_errors import Errors
from gramian.distill.cache.topk_cache import TopK

FORMAT = 1
MANIFEST = "manifest.json"
HEAD = "head.safetensors"
KINDS: dict[str, Kind] = {kind.name: kind for kind in (Hidden(), TopK(), Samples())}
"""By name; for reading, where a kind's options come from the manifest's facts."""


@dataclass(frozen=True)
class Identity:
    """What decides every byte of a cache: two builds that agree in it make the same folder."""

    kind: str
    """"hidden", "topk" or "sampled"."""
    teacher: str
    """Hash of class, config and weights."""
    autocast: str | None
    """The dtype of the teacher's products, where it is not that of its weights."""
    tokenizer: str
    """Its digest."""
    windows: str
    """Digest of the tokens and the way they are cut."""
    count: int
    """Windows."""
    length: int
    """Tokens of a window."""
    layers: tuple[int, ...]
    """Of the residual stream that are stored too."""
    layer_dtype: str
    layer_width: int
    facts: Mapping[str, Any]
    """Of the kind: vocabulary, k, knots, temperatures, …"""
    shard_windows: int

    @property
    def layout(self) -> CacheLayout:
        """Where rows lie."""
        columns = KINDS[self.kind].columns(self.facts)
        columns += tuple(Column(f"layer-{layer}", self.layer_dtype, self.layer_width) for layer in self.layers)
        return CacheLayout(columns, self.count, self.length, self.shard_windows)

    @property
    def vocabulary(self) -> int:
        """Every id is below it."""
        return int(self.facts["vocabulary"])

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "facts"}
        return {**own, "layers": list(self.layers), "facts": dict(self.facts)}

    def _flat(self) -> dict[str, Any]:
        plain = self.plain()
        return {**plain.pop("facts"), **plain}

    def difference(self, other: "Identity") -> str | None:
        """The first field in which another differs, with both values; None if there is none."""
        mine, its = self._flat(), other._flat()
        # Facts belong to a kind, so another kind is told first.
        for name in dict.fromkeys(["kind", "teacher", "tokenizer", "windows", *mine, *its]):
            if mine.get(name) != its.get(name):
                return f"{name} is {short(mine.get(name))} there, {short(its.get(name))} here"
        return None


@dataclass(frozen=True)
class Manifest:
    """All that is known of a cache."""

    identity: Identity
    complete: bool
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """{path inside the cache: size and checksum}."""
    errors: Errors = field(default_factory=Errors)
    """"hidden": of logits, by rounding. "topk": of the log-normaliser and the tail's mass in its range of temperatures, and of
    the kept logits. "sampled": none."""
    measured_windows: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Without the head, which is stored once."""
        return self.identity.layout.bytes_per_token

    def write(self, folder: Path) -> None:
        """Whole, or as it was before."""
        body = {
            "format": FORMAT,
            "identity": self.identity.plain(),
            "complete": self.complete,
            "bytes_per_token": self.bytes_per_token,
            "measured_windows": self.measured_windows,
            "errors": self.errors.plain(),
            "files": {name: [record.bytes, record.sha256] for name, record in self.files.items()},
        }
        write_json(folder / MANIFEST, body)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if there is none.

    Raises:
        GramianError: if it is damaged, or of another format.
    """
    body = read_json(folder / MANIFEST)
    if body is None:
        return None
    if body.get("format") != FORMAT:
        raise GramianError(f"format: {folder / MANIFEST} has {body.get('format')}; expected {FORMAT}")
    told = body["identity"]
    if told["kind"] not in KINDS:
        raise GramianError(f"kind: {folder / MANIFEST} has {told['kind']!r}; expected {', '.join(KINDS)}")
    return Manifest(
        Identity(**{**told, "layers": tuple(told["layers"])}),
        body["complete"],
        {name: FileRecord(*record) for name, record in body["files"].items()},
        Errors.from_plain(body["errors"]),
        body["measured_windows"],
    )


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """A checksummed JSON file, whole or as it was before."""
    write_whole(path, json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The body of such a file; None if it is not there.

    Raises:
        GramianError: naming a file that is damaged.
    """
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
    """A hash by its first letters, other values as they are."""
    text = str(value)
    return f"{text[:12]}…" if len(text) > 24 and isinstance(value, str) else text


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
