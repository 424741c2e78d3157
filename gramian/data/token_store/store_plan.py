"""What a token store is made from, and which pieces it has; a store's folder is named by a hash of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.data.corpus.read_records import RecordShape
from gramian.data.corpus.record_encoder import RecordEncoder
from gramian.data.corpus.record_pieces import Span, cut_into_pieces
from gramian.data.data_files import File, unreadable

FORMAT = 1


@dataclass(frozen=True)
class StorePlan:
    """The files of a corpus, how their records are read and tokenised, and the pieces that are tokenised one by one."""

    source: str
    shape: RecordShape
    files: tuple[tuple[str, int, int], ...]
    """(absolute path, bytes, time of the last change in nanoseconds) of each file."""
    tokenizer: str
    """Value of data.tokenizer: a name or a folder."""
    digest: str
    """Hash of the tokenizer, and of its chat template."""
    pieces: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(
        cls, files: Sequence[File], source: str, shape: RecordShape, tokenizer: str, encoder: RecordEncoder
    ) -> "StorePlan":
        """The plan for files as they are now."""
        found = []
        for file in files:
            try:
                status = file.path.stat()
            except OSError as problem:
                raise unreadable(file.path, problem) from None
            found.append((str(file.path.resolve()), status.st_size, status.st_mtime_ns))
        pieces = tuple(map(tuple, cut_into_pieces(files, source)))  # type: ignore[arg-type]
        return cls(source, shape, tuple(found), tokenizer, encoder.digest, pieces)

    def require_unchanged(self, path: str | None = None) -> None:
        """Raise a GramianError if a file (`path`: only that one) has another size or time than the plan."""
        for name, size, time in self.files:
            if path in (None, name):
                try:
                    status = Path(name).stat()
                except OSError as problem:
                    raise unreadable(Path(name), problem) from None
                if (status.st_size, status.st_mtime_ns) != (size, time):
                    raise GramianError(f"{name}: changed while it was tokenised; expected a file that stays as it is")

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self.files)

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the tokens; a store's folder has it as its name."""
        told = [FORMAT, self.source, self.shape.record, self.shape.columns, self.shape.user, self.files, self.digest]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As JSON values, from which `from_json` makes an equal plan."""
        shape = self.shape
        return {
            "format": FORMAT, "source": self.source, "record": shape.record, "field": shape.field, "user": shape.user,
            "files": self.files, "tokenizer": self.tokenizer, "digest": self.digest,
            "pieces": [
                [(str(s.path.resolve()), s.begin, s.stop, s.size, s.named) for s in piece] for piece in self.pieces
            ],
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "StorePlan":
        """The plan that `to_json` wrote."""
        pieces = tuple(tuple(Span(Path(path), *rest) for path, *rest in piece) for piece in body["pieces"])
        files = tuple((path, size, time) for path, size, time in body["files"])
        shape = RecordShape(body["record"], body["field"], body["user"])
        return cls(body["source"], shape, files, body["tokenizer"], body["digest"], pieces)
