"""The files of one piece of a token store: written by a worker, described by a record that is written last."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gramian.core.durable_files import HashedFile, replace_file
from gramian.core.errors import GramianError
from gramian.data.token_store.checked_array import CheckedArray, block_checksums
from gramian.data.token_store.token_buffer import COLUMNS, TokenBuffer


@dataclass(frozen=True)
class PieceRecord:
    """Counts and checksums of the files of a piece."""

    documents: int
    tokens: int
    empty: int
    dtype: str
    """Of the token ids, as numpy writes it, such as "<u2"."""
    loses_text: bool
    users: tuple[str, ...]
    """Users in order of first appearance; ("",) if they are not read."""
    table: str
    """SHA-256 of the table of documents."""
    blocks: dict[str, str]
    """{"tokens" and, if some are no targets, "counted": checksums of the blocks of that file, hexadecimal}."""

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "PieceRecord":
        """The record that was written as JSON."""
        return cls(**{**body, "users": tuple(body["users"])})


def name_of(piece: int, what: str) -> str:
    """File name of a part of a piece: "tokens", "documents", "counted" or "json"."""
    return f"{piece:05d}.{what}"


def write_piece(folder: Path, piece: int, buffer: TokenBuffer) -> None:
    """Write the files of a piece, then its record; an OSError leaves no record."""
    arrays = {name: array.astype(array.dtype.newbyteorder("<")) for name, array in buffer.arrays().items()}
    blocks, table = {}, ""
    for name, array in arrays.items():
        file = HashedFile(folder / name_of(piece, name))
        content = array.data.cast("B") if array.size else memoryview(b"")
        try:
            file.write(content)
            written = file.finish()
        finally:
            file.abandon()
        if name == "documents":
            table = written.sha256
        else:
            blocks[name] = block_checksums(content)
    body = {
        "documents": buffer.documents, "tokens": len(arrays["tokens"]), "empty": buffer.empty,
        "dtype": arrays["tokens"].dtype.str, "loses_text": buffer.loses_text, "users": list(buffer.users), "table": table,
        "blocks": blocks,
    }  # fmt: skip
    replace_file(folder / name_of(piece, "json"), json.dumps(body).encode())


def read_record(folder: Path, piece: int) -> PieceRecord | None:
    """The record of a piece; None if it has no valid one, or one of its files is missing or of another size."""
    try:
        record = PieceRecord.from_json(json.loads((folder / name_of(piece, "json")).read_bytes()))
        sizes = {
            name: record.tokens * (1 if name == "counted" else np.dtype(record.dtype).itemsize)
            for name in record.blocks
        }
        sizes["documents"] = record.documents * len(COLUMNS) * 8
        complete = all((folder / name_of(piece, name)).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if complete else None


def open_piece(folder: Path, piece: int, record: PieceRecord, *, all_targets: bool) -> dict[str, Any]:
    """The arrays of a piece as `TokenBuffer.arrays` has them, those of tokens read when they are asked for.

    `all_targets`: no piece of the store has tokens that are no targets.

    Raises:
        GramianError: if the table of documents is not as it was written.
    """
    path = folder / name_of(piece, "documents")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != record.table:
        raise GramianError(f"{path}: its checksum differs; expected the folder removed, so that it is written again")
    table = np.frombuffer(content, dtype="<u8").reshape(-1, len(COLUMNS))
    if len(table) != record.documents or (int(table[-1, 0]) if len(table) else 0) != record.tokens:
        raise GramianError(
            f"{path}: is not that of its record; expected the folder removed, so that it is written again"
        )
    found: dict[str, Any] = {"documents": table}
    for name in ("tokens", "counted"):
        if name in record.blocks:
            dtype = record.dtype if name == "tokens" else "|u1"
            found[name] = CheckedArray(folder / name_of(piece, name), dtype, record.tokens, record.blocks[name])
        elif not all_targets:
            found[name] = np.ones(record.tokens, dtype=np.uint8)
    return found
