"""The files of a checkpoint: written, synced and hashed in one pass; a manifest that says what each must be.

Everything is safetensors and JSON: reading runs no code. Files have mode 0600.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 1 << 24
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write a safetensors file from host memory, hashed on the way, without another copy of it.

    Args:
        path: of a file that is not there yet.
        tensors: contiguous, on the CPU.
        metadata: for its header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # everything stays aligned
    end = 0
    for name in order:
        if tensors[name].dtype not in DTYPES:
            raise GramianError(f"{name}: has dtype {tensors[name].dtype}; expected one that safetensors knows")
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, _pieces(len(text).to_bytes(8, "little") + text, (tensors[name] for name in order)))


def _pieces(first: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield first
    for t in tensors:
        if t.numel() > 0:
            yield t.contiguous().view(-1).view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file of mode 0600 and sync it."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                rest = memoryview(piece)[start : start + CHUNK]
                digest.update(rest)
                size += len(rest)
                while len(rest) > 0:
                    rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileRecord(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """What was created, renamed or removed in it is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in host memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def compared(path: Path, expected: FileRecord) -> str | None:
    """What differs from the record."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size} bytes; expected {expected.bytes}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                return "its checksum differs"
    except FileNotFoundError:
        return "is missing"
    except OSError as reason:
        return f"cannot be read ({reason.strerror})"
    return None


def write_manifest(
    folder: Path, step: int, best: bool, config_hash: Any, files: Mapping[str, FileRecord], tensors: Mapping[str, Any]
) -> None:
    """Write what the files of a folder must be; itself checksummed.

    Args:
        folder: of the checkpoint.
        step: it is after.
        best: by validation, when it was written.
        config_hash: of its run.
        files: of the folder.
        tensors: [dtype, shape] of the whole tensors by name.
    """
    body = {
        "format": FORMAT,
        "step": step,
        "best": best,
        "config_hash": config_hash,
        "files": {name: asdict(record) for name, record in sorted(files.items())},
        "tensors": dict(tensors),
    }
    write_file(folder / MANIFEST, [json.dumps({"manifest": body, "sha256": digest_of(body)}).encode()])


def read_manifest(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest of a folder, or what is wrong with it."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None, f"{MANIFEST}: is missing"
    except OSError as reason:
        return None, f"{MANIFEST}: cannot be read ({reason.strerror})"
    try:
        outer = json.loads(text)
        body: dict[str, Any] = outer["manifest"]
        told, kind = outer["sha256"], body["format"]
    except (ValueError, KeyError, TypeError):
        return None, f"{MANIFEST}: is not whole"
    if told != digest_of(body):
        return None, f"{MANIFEST}: its checksum differs"
    if kind != FORMAT:
        return None, f"{MANIFEST}: has format {kind}; expected {FORMAT}"
    return body, None


def manifest_of(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder, if it is whole."""
    return read_manifest(path)[0]


def digest_of(body: Any) -> str:
    """SHA-256 of a manifest's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
