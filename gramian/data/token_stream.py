"""Concatenated documents as one flat sequence of tokens, without copying the arrays and files that contain them."""

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramian.data.tokenizer import Ids, Tokenizer

Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

CHUNK = 1 << 22
"""Number of tokens that a pass over a stream reads at once."""


class Stream:
    """Concatenated documents: document d is the tokens `edges[d]` … `edges[d + 1] - 1`, including its `end` token.

    The tokens are runs of the given arrays; a run is contiguous in its array and consists of complete documents. Another
    process opens an `np.memmap` again by name, and other arrays move to shared memory: a worker never gets a copy.

    Args:
        arrays: 1-D arrays of any integer type, in the order of their documents.
        edges: int64 [documents + 1], increasing, from 0 to the number of tokens; no document spans two arrays.
        vocabulary: number of token ids; every token is below it.
        end: the token that ends a document.
        tokenizer: digest of the tokenizer that produced the tokens.
        text_bytes: UTF-8 bytes of each document's text, int64 [documents]; None: not known, as of token files.
        users: number of the user of each document, int64 [documents]; None: not known.
        content_hashes: hash of the record that each document was made from, uint64 [documents]; None: that of its tokens.
        token_hashes: what `document_hashes` returns, uint64 [documents]; None: it is computed when it is asked for.
        counted: arrays like `arrays`, 1 where a token is a target; None: all are.

    Example:
        >>> Stream([np.array([5, 6, 0, 7, 0])], np.array([0, 3, 5]), vocabulary=8, end=0).documents
        2
    """

    def __init__(
        self,
        arrays: Sequence[Ids],
        edges: Int64s,
        *,
        vocabulary: int,
        end: int,
        tokenizer: str = "",
        text_bytes: Int64s | None = None,
        users: Int64s | None = None,
        content_hashes: Hashes | None = None,
        token_hashes: Hashes | None = None,
        counted: Sequence[Any] | None = None,
    ) -> None:
        self.edges, self.users = edges, users
        self.content_hashes, self._token_hashes = content_hashes, token_hashes
        self.text_bytes = text_bytes
        self.vocabulary = vocabulary
        self.end = end
        self.tokenizer = tokenizer
        self._arrays = tuple(_Shared(array) for array in arrays)
        self._counted = None if counted is None else tuple(_Shared(array) for array in counted)
        lengths = [len(array) for array in arrays]
        # Run r is the tokens _starts[r] … _starts[r + 1] - 1 of the stream, in array _array_of[r] from _begins[r] on.
        self._starts: Int64s = np.cumsum([0, *lengths], dtype=np.int64)
        self._array_of: Int64s = np.arange(len(lengths))
        self._begins: Int64s = np.zeros(len(lengths), dtype=np.int64)

    def __len__(self) -> int:
        return int(self.edges[-1])

    @property
    def documents(self) -> int:
        """Number of documents of the stream."""
        return len(self.edges) - 1

    @property
    def all_targets(self) -> bool:
        """True if a model is to predict every token; false for prompts with completions, and for chats."""
        return self._counted is None

    def read(self, begin: int, stop: int) -> Int64s:
        """Return the stream's tokens `begin` … `stop - 1` as int64; costs O(stop - begin + log(number of runs))."""
        return self._gather(self._arrays, begin, stop)

    def targets(self, begin: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether each of the stream's tokens `begin` … `stop - 1` is one that a model is to predict."""
        if self._counted is None:
            return np.ones(stop - begin, dtype=bool)
        return self._gather(self._counted, begin, stop).astype(bool)

    def _gather(self, arrays: "Sequence[_Shared]", begin: int, stop: int) -> Int64s:
        tokens: Int64s = np.empty(stop - begin, dtype=np.int64)
        run = int(np.searchsorted(self._starts, begin, side="right")) - 1
        at = begin
        while at < stop:
            until = min(stop, int(self._starts[run + 1]))
            inside = int(self._begins[run]) + at - int(self._starts[run])
            array = arrays[self._array_of[run]].array
            tokens[at - begin : until - begin] = array[inside : inside + until - at]
            at = until
            run += 1
        return tokens

    def chunks(self) -> Iterator[Int64s]:
        """Yield all tokens of the stream in order, as int64 arrays of at most `CHUNK`."""
        for begin in range(0, len(self), CHUNK):
            yield self.read(begin, min(len(self), begin + CHUNK))

    def select(self, selected: npt.NDArray[np.bool_]) -> "Stream":
        """Return a stream of the documents where `selected` [documents] is true; it shares the arrays with this one."""
        chosen = np.flatnonzero(selected)
        begins, stops = self.edges[chosen], self.edges[chosen + 1]
        run = np.searchsorted(self._starts, begins, side="right") - 1
        first = np.ones(len(chosen), dtype=bool)
        first[1:] = (np.diff(chosen) != 1) | (np.diff(run) != 0)
        edges = np.concatenate([[0], np.cumsum(stops - begins)]).astype(np.int64)
        part = copy.copy(self)
        part.edges = edges
        part.text_bytes = None if self.text_bytes is None else self.text_bytes[chosen]
        part.users = None if self.users is None else self.users[chosen]
        part.content_hashes = None if self.content_hashes is None else self.content_hashes[chosen]
        part._token_hashes = None if self._token_hashes is None else self._token_hashes[chosen]
        part._starts = np.concatenate([edges[:-1][first], edges[-1:]])
        part._array_of = self._array_of[run[first]]
        part._begins = self._begins[run[first]] + begins[first] - self._starts[run[first]]
        return part

    def split(self, at: int, tokenizer: Tokenizer) -> tuple["Stream", "Stream"]:
        """Return two streams: the first `at` tokens, and those after them. A document across the cut is one document in each.

        `tokenizer` counts the bytes of text on both sides of such a cut; they are not known if it does not count all bytes of
        the document, because it loses or adds some.
        """
        whole = copy.copy(self)
        whole.edges = np.union1d(self.edges, [at])
        whole.content_hashes = None
        if self._token_hashes is not None and len(whole.edges) > len(self.edges):
            cut = int(np.searchsorted(whole.edges, at))
            halves = [self._hash(int(whole.edges[cut + side - 1]), int(whole.edges[cut + side])) for side in (0, 1)]
            whole._token_hashes = np.concatenate(
                [self._token_hashes[: cut - 1], np.array(halves, dtype=np.uint64), self._token_hashes[cut:]]
            )
        if self.text_bytes is not None and len(whole.edges) > len(self.edges):
            cut = int(np.searchsorted(whole.edges, at))
            begin, stop, all_bytes = int(whole.edges[cut - 1]), int(whole.edges[cut + 1]), int(self.text_bytes[cut - 1])
            whole.text_bytes = None
            if tokenizer.text_bytes(self.read(begin, stop)) == all_bytes:
                after = min(all_bytes, tokenizer.text_bytes(self.read(at, stop)))
                whole.text_bytes = np.insert(self.text_bytes, cut, after)
                whole.text_bytes[cut - 1] -= after
        if self.users is not None:
            whole.users = self.users[np.searchsorted(self.edges, whole.edges[:-1], side="right") - 1]
        before = whole.edges[:-1] < at
        return whole.select(before), whole.select(~before)

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte of text for a mean loss in nats per token: loss / (ln 2 · mean bytes of a token); None: not known.

        Models with different tokenizers compare by it. The end of a document is a token of no bytes.
        """
        if self.text_bytes is None or not (total := int(self.text_bytes.sum())):
            return None
        return loss / math.log(2) * len(self) / total

    def document_hashes(self) -> npt.NDArray[np.uint64]:
        """64-bit hash of each document's tokens without the end id, uint64 [documents]; may read the stream once."""
        if self._token_hashes is not None:
            return self._token_hashes
        hashes = np.empty(self.documents, dtype=np.uint64)
        first = 0
        while first < self.documents:
            # As many documents as fit into a chunk, or one that is longer.
            begin = self.edges[first]
            last = max(first + 1, int(np.searchsorted(self.edges, begin + CHUNK, side="right")) - 1)
            tokens = self.read(int(begin), int(self.edges[last]))
            starts, stops = self.edges[first:last] - begin, self.edges[first + 1 : last + 1] - begin
            stops = stops - (tokens[stops - 1] == self.end)
            content = memoryview(tokens.astype("<u4").tobytes())
            for index, (start, stop) in enumerate(zip((4 * starts).tolist(), (4 * stops).tolist(), strict=True), first):
                hashes[index] = content_hash(content[start:stop])
            first = last
        self._token_hashes = hashes
        return hashes

    def _hash(self, begin: int, stop: int) -> int:
        """Hash of one document, the tokens `begin` … `stop - 1`, without the end id."""
        stop -= int(self.read(stop - 1, stop)[0]) == self.end
        digest = _content_digest()
        for at in range(begin, stop, CHUNK):
            digest.update(self.read(at, min(stop, at + CHUNK)).astype("<u4").tobytes())
        return int.from_bytes(digest.digest(), "little")


def content_hash(content: bytes | memoryview) -> int:
    """Return a 64-bit hash of a document's content."""
    digest = _content_digest()
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def _content_digest() -> Any:
    return hashlib.blake2b(digest_size=8, person=b"document")


class _Shared:
    """A flat array that is pickled without a copy: the other process opens its file again, or maps the same shared memory."""

    def __init__(self, array: Ids) -> None:
        self.array = array
        self._memory: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        array = self.array
        if not isinstance(array, np.ndarray):  # it knows how to be opened again
            return _Shared, (array,)
        if isinstance(array, np.memmap) and array.filename is not None:
            return _reopened, (str(array.filename), array.dtype.str, array.offset, len(array))
        if self._memory is None:
            self._memory = torch.from_numpy(array).share_memory_()
            self.array = self._memory.numpy()
        return _received, (self._memory,)


def _reopened(name: str, dtype: str, offset: int, length: int) -> _Shared:
    return _Shared(np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=(length,)))


def _received(memory: Tensor) -> _Shared:
    shared = _Shared(memory.numpy())
    shared._memory = memory
    return shared
