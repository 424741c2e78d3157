"""Cut a stream of documents into windows: input tokens, and the next token of each as its target.

Shape suffixes:
    B  windows
    T  predicted tokens of a window, `length`
    S  T + 1: the inputs of a window and the target of the last
"""

import copy
import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gramian.core.errors import GramianError
from gramian.data.token_stream import CHUNK, Stream

Int64s = npt.NDArray[np.int64]

HASHED_WHOLE = 1 << 25
"""Tokens up to which a digest is of all of them: a second of reading."""
NOT_COUNTED = -100
"""Target id of a position that has no loss term: `ignore_index` of torch's cross-entropy."""


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `length` predicted tokens; no token is predicted twice, unless `stride` asks for it.

    With `pack`, window i reads tokens iT … iT + T - 1 of the stream and predicts iT + 1 … iT + T, across document borders; with
    a `stride` it begins at token i · stride instead. Without `pack`, each document is cut separately. The last window of the
    stream, or of each document, is padded with input `end` and target -100.

    With `isolate`, an item also has "documents": the index of each input's document, counted from 0 in the window; padding has
    the index after the last document. The target of a document's last input belongs to the next document and is therefore
    -100. Windows in which every target is -100 are omitted.

    Args:
        stream: the documents.
        length: number of predicted tokens T of a window.
        pack: concatenate documents before cutting.
        isolate: hide packed documents from each other.
        stride: tokens between the starts of consecutive windows, at most `length`; 0: `length`. Another stride than 0 needs
            `pack` without `isolate`.
        truncate: leave out what a document has beyond its first window; needs `pack` to be false.

    Raises:
        GramianError: if the options contradict each other, or no window results.

    Example:
        >>> windows = Windows(stream, length=128)
        >>> windows[0]["tokens"].shape
        torch.Size([128])
    """

    def __init__(
        self,
        stream: Stream,
        length: int,
        *,
        pack: bool = True,
        isolate: bool = False,
        stride: int = 0,
        truncate: bool = False,
    ) -> None:
        if length < 1:
            raise GramianError(f"data.length: expected at least 1, got {length}")
        if isolate and not pack:
            raise GramianError("data.isolate: expected data.pack = true")
        if not 0 <= stride <= length or (stride and (isolate or not pack)):
            raise GramianError(f"data.stride: expected at most {length}, packed and not isolated, got {stride}")
        if truncate and pack:
            raise GramianError("data.truncate: expected data.pack = false")
        self.held_out = "hash"
        """How these windows were held out, if they are for validation: "hash", "files" or "tail" (see `Documents`)."""
        self.stream = stream
        self.length = length
        self.pack = pack
        self.isolate = isolate
        self.truncate = truncate
        self.stride = stride or length
        # Each piece is cut separately: the stream, or each document.
        self._pieces: Int64s = stream.edges[[0, -1]] if pack else stream.edges
        predicted = np.maximum(np.diff(self._pieces) - 1, 0)
        # Piece p gives the windows _firsts[p] … _firsts[p + 1] - 1.
        windows = np.where(predicted > 0, -(-np.maximum(predicted - length, 0) // self.stride) + 1, 0)
        self.left_out = 0
        """Number of tokens that `truncate` leaves out: what documents have beyond their first window."""
        if truncate:
            self.left_out = int(np.maximum(predicted - length, 0).sum())
            windows = np.minimum(windows, 1)
        self._firsts: Int64s = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)
        # Indices of the windows with counted targets, if some have none.
        self._selected: Int64s | None = None
        # Counted targets of each window, where they do not follow from its place.
        self._listed: npt.NDArray[np.int32] | None = None
        if (isolate or not stream.all_targets) and self._firsts[-1]:
            listed = self._count_targets()
            self._selected = None if listed.all() else np.flatnonzero(listed)
            self._listed = listed if self._selected is None else listed[self._selected]
        if not len(self):
            raise GramianError(
                f"data.files: {len(stream)} tokens in {stream.documents} documents make no window; "
                "expected a document of at least 2 tokens, and a target in it"
            )

    def __len__(self) -> int:
        return int(self._firsts[-1]) if self._selected is None else len(self._selected)

    @property
    def counts(self) -> Int64s:
        """Number of targets of each window that have a loss term, int64 [windows]; at least 1."""
        return self.counted(np.arange(len(self)))

    def counted(self, index: Int64s) -> Int64s:
        """Number of targets with a loss term of windows `index`, int64 [chosen]."""
        if self._listed is not None:
            return self._listed[index].astype(np.int64)
        begin, stop = self._places(index)
        return stop - begin - 1

    @property
    def vocabulary(self) -> int:
        """Number of token ids; every token of a window is below it."""
        return self.stream.vocabulary

    @cached_property
    def digest(self) -> str:
        """Hex hash of the tokenizer, the tokens, the document borders and the cutting options.

        Of up to `HASHED_WHOLE` tokens all are hashed; of more, the hashes of their documents, which a large corpus keeps.
        """
        digest = hashlib.blake2b(digest_size=16)
        cut = f"{self.length}/{self.pack}/{self.isolate}/{self.stride}" + "/truncate" * self.truncate
        digest.update(f"{self.stream.tokenizer}/{cut}/{len(self.stream)}\0".encode())
        if len(self.stream) <= HASHED_WHOLE:
            for tokens in self.stream.chunks():
                digest.update(tokens.astype("<u4").tobytes())
        else:
            digest.update(self.stream.document_hashes().astype("<u8").tobytes())
        digest.update(self.stream.edges.astype("<i8").tobytes())
        if not self.stream.all_targets:
            for begin in range(0, len(self.stream), CHUNK):
                digest.update(self.stream.targets(begin, min(len(self.stream), begin + CHUNK)).tobytes())
        if self.stream.users is not None:
            digest.update(self.stream.users.astype("<i8").tobytes())
        return digest.hexdigest()

    def pieces(self, index: Int64s) -> Int64s:
        """The piece that windows `index` were cut from: without `pack` the number of their document; otherwise 0."""
        window = index if self._selected is None else self._selected[index]
        return np.searchsorted(self._firsts, window, side="right").astype(np.int64) - 1

    def only(self, index: Int64s) -> "Windows":
        """These windows alone, int64 [chosen]."""
        found = copy.copy(self)
        found._selected = index if self._selected is None else self._selected[index]
        found._listed = None if self._listed is None else self._listed[index]
        return found

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window: int64 [T] "tokens" and "targets", and "documents" if they are isolated."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return {name: rows[0] for name, rows in self.stack(np.array([index])).items()}

    def stack(self, index: Int64s) -> dict[str, Tensor]:
        """Return windows `index` [B] as rows: int64 [B, T] "tokens" and "targets", and "documents" if they are isolated."""
        T, stream = self.length, self.stream
        begin, stop = self._places(index)
        tokens_BS: Int64s = np.full((len(index), T + 1), stream.end, dtype=np.int64)
        for row, (first, last) in enumerate(zip(begin.tolist(), stop.tolist(), strict=True)):
            tokens_BS[row, : last - first] = stream.read(first, last)
        place_BS = begin[:, None] + np.arange(T + 1)
        targets_BT = np.where(place_BS[:, 1:] < stop[:, None], tokens_BS[:, 1:], NOT_COUNTED)
        if not stream.all_targets:
            for row, (first, last) in enumerate(zip(begin.tolist(), stop.tolist(), strict=True)):
                targets_BT[row, : last - first - 1][~stream.targets(first + 1, last)] = NOT_COUNTED
        rows = {"tokens": tokens_BS[:, :-1], "targets": targets_BT}
        if self.isolate:
            document_BS = np.searchsorted(stream.edges, place_BS, side="right")
            targets_BT[document_BS[:, 1:] != document_BS[:, :-1]] = NOT_COUNTED
            rows["documents"] = document_BS[:, :-1] - document_BS[:, :1]
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in rows.items()}

    def _places(self, index: Int64s) -> tuple[Int64s, Int64s]:
        """Place of the first token of each window, and the place after its last one: at most `length` + 1 tokens."""
        window = index if self._selected is None else self._selected[index]
        piece = np.searchsorted(self._firsts, window, side="right") - 1
        begin = self._pieces[piece] + (window - self._firsts[piece]) * self.stride
        return begin, np.minimum(begin + self.length + 1, self._pieces[piece + 1])

    def _count_targets(self) -> npt.NDArray[np.int32]:
        """Number of targets with a loss term of every window; reads which tokens are targets, if not all are."""
        stream, found = self.stream, np.empty(int(self._firsts[-1]), dtype=np.int32)
        most = max(1, CHUNK // (self.length + 1))
        waiting = [(first, min(len(found), first + most)) for first in range(0, len(found), most)]
        while waiting:
            first, last = waiting.pop()
            begin, stop = self._places(np.arange(first, last))
            before, after = int(begin[0]), int(stop.max())
            if after - before > 2 * CHUNK and last - first > 1:  # `truncate` leaves much out between windows
                middle = (first + last) // 2
                waiting += [(first, middle), (middle, last)]
                continue
            targets = stream.targets(before, after)
            if self.isolate:  # a document's first token is predicted from another document
                edges = stream.edges[np.searchsorted(stream.edges, before) : np.searchsorted(stream.edges, after)]
                targets[edges - before] = False
            sums = np.concatenate([[0], np.cumsum(targets)])
            found[first:last] = sums[stop - before] - sums[begin + 1 - before]
        return found
