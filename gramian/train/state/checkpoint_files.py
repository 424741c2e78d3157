"""The files of a checkpoint: safetensors, JSON, and a manifest with the size and checksum of each.

Reading them runs no code. Files are written, hashed and synced in one pass and have mode 0600.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramian.core.durable_files import FileRecord, HashedFile
from gramian.core.errors import GramianError

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write contiguous host tensors to a new safetensors file without copying them; returns its size and checksum.

    `metadata` are texts for the file's header. Raises a GramianError for a dtype that safetensors does not have.
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
    """Write bytes to a new file of mode 0600 and sync it; returns its size and checksum."""
    file = HashedFile(path, private=True, rename=False)
    try:
        for piece in pieces:
            file.write(piece)
        return file.finish()
    finally:
        file.abandon()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into host memory, {name: tensor}."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_manifest(
    folder: Path, step: int, best: bool, config_hash: Any, files: Mapping[str, FileRecord], tensors: Mapping[str, Any]
) -> None:
    """Write the manifest of a checkpoint, with a checksum of its own.

    `files` has the size and checksum of every other file of the folder, `tensors` [dtype, shape] of the full tensors.
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
    """Return (manifest of a checkpoint folder, None), or (None, text that says why it cannot be used)."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None, f"{MANIFEST}: is missing"
    except OSError as reason:
        return None, f"{MANIFEST}: cannot be read ({reason.strerror})"
    try:
        outer = json.loads(text)
        body: dict[str, Any] = outer["manifest"]
        checksum, version = outer["sha256"], body["format"]
    except (ValueError, KeyError, TypeError):
        return None, f"{MANIFEST}: is damaged"
    if checksum != digest_of(body):
        return None, f"{MANIFEST}: its checksum differs"
    if version != FORMAT:
        return None, f"{MANIFEST}: has format {version}; expected {FORMAT}"
    return body, None


def digest_of(body: Any) -> str:
    """SHA-256 of a manifest's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
