"""Collect the tokens of records in arrays that grow by doubling, with a table of their documents."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError
from gramian.data.corpus.record_encoder import RecordEncoder
from gramian.data.token_stream import Stream, content_hash
from gramian.data.tokenizer import token_type

COMPARED = 1 << 16
"""Bytes of text from which it is seen whether a tokenizer loses text, such as spaces or unknown words."""
COLUMNS = ("stop", "text_bytes", "content_hash", "token_hash", "user")
"""Of the table of documents, all 64 bits: the place after the last token, and the number of the user."""


class TokenBuffer:
    """The tokens of some records, which of them are targets, and a table with a row of `COLUMNS` for each document."""

    def __init__(self, encoder: RecordEncoder) -> None:
        self._encoder = encoder
        self._tokens = np.empty(1 << 16, dtype=token_type(encoder.tokenizer.vocabulary))
        self._counted: npt.NDArray[np.uint8] | None = None
        self._rows: list[tuple[int, ...]] = []
        self.users: dict[str, int] = {}
        """{user: number}, in order of first appearance; {"": 0} if users are not read."""
        self._compared = 0
        self.loses_text = False
        """True if the tokenizer loses text or adds some: the bytes of a document's text say nothing about its tokens then."""
        self.empty = 0
        """Number of records without a token."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._rows)

    def begin_piece(self) -> None:
        """Look at the beginning of another piece, too, whether the tokenizer loses text."""
        self._compared = 0

    def add(self, content: bytes, user: str, place: Any) -> None:
        """Tokenise a record and append it; an empty one is only counted. `place` names it in errors."""
        try:
            ids, counted = self._encoder.encode(content)
        except GramianError as problem:
            raise GramianError(f"{place}: {problem}") from None
        if not len(ids):
            self.empty += 1
            return
        begin = self._rows[-1][0] if self._rows else 0
        stop = begin + len(ids)
        if stop > len(self._tokens):
            self._tokens.resize(max(stop, 2 * len(self._tokens)), refcheck=False)
        self._tokens[begin:stop] = ids
        if counted is not None:
            self._count(begin, counted)
        without_end = ids[:-1] if ids[-1] == self._encoder.tokenizer.end else ids
        number = self.users.setdefault(user, len(self.users))
        hashes = content_hash(content), content_hash(without_end.astype("<u4").tobytes())
        self._rows.append((stop, len(content), *hashes, number))
        if counted is not None:
            self.loses_text = True
        elif self._compared < COMPARED:
            self._compared += len(content)
            self.loses_text = self.loses_text or self._encoder.tokenizer.text_bytes(without_end) != len(content)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """{"tokens": [n], "documents": uint64 [documents, COLUMNS]} and "counted", uint8 [n], if not all tokens are targets.

        Nothing can be added afterwards.
        """
        count = self._rows[-1][0] if self._rows else 0
        self._tokens.resize(count, refcheck=False)
        table = np.array(self._rows, dtype=np.uint64).reshape(-1, len(COLUMNS))
        found: dict[str, npt.NDArray[Any]] = {"tokens": self._tokens, "documents": table}
        return found if self._counted is None else {**found, "counted": self._counted[:count]}

    def stream(self) -> Stream:
        """The stream of all documents that were added; nothing can be added afterwards."""
        found, named = self.arrays(), [*self.users] != [""]
        return stream_of([found], self._encoder, named=named, loses_text=self.loses_text)

    def _count(self, begin: int, counted: npt.NDArray[np.bool_]) -> None:
        stop = begin + len(counted)
        if self._counted is None:
            self._counted = np.ones(len(self._tokens), dtype=np.uint8)
        elif stop > len(self._counted):
            self._counted.resize(len(self._tokens), refcheck=False)
        self._counted[begin:stop] = counted


def stream_of(parts: list[dict[str, Any]], encoder: RecordEncoder, *, named: bool, loses_text: bool) -> Stream:
    """The stream of the arrays of several buffers, one after the other.

    Args:
        parts: what `TokenBuffer.arrays` returns of each; users have one numbering in all of them.
        encoder: what made the tokens.
        named: whether users were read.
        loses_text: whether the bytes of text are to be left out.
    """
    counts = np.cumsum([0, *(len(part["tokens"]) for part in parts)])
    tables = [part["documents"] for part in parts]
    stops = [table[:, 0].astype(np.int64) + before for table, before in zip(tables, counts[:-1], strict=True)]

    def column(number: int, dtype: Any) -> Any:
        return np.concatenate([table[:, number] for table in tables]).astype(dtype)

    return Stream(
        [part["tokens"] for part in parts],
        np.concatenate([np.zeros(1, np.int64), *stops]),
        vocabulary=encoder.tokenizer.vocabulary,
        end=encoder.tokenizer.end,
        tokenizer=encoder.digest,
        text_bytes=None if loses_text else column(1, np.int64),
        users=column(4, np.int64) if named else None,
        content_hashes=column(2, np.uint64),
        token_hashes=column(3, np.uint64),
        counted=[part["counted"] for part in parts] if parts and all("counted" in part for part in parts) else None,
    )
