"""Read the documents of a config into two token streams: training and validation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError
from gramian.data.corpus.read_records import RecordShape, read_piece
from gramian.data.corpus.record_encoder import ENCODERS, RecordEncoder, TextEncoder
from gramian.data.data_files import File, find_files, open_tokens
from gramian.data.embedded_corpus import load_corpus
from gramian.data.options import DataSection
from gramian.data.token_store.build_store import Progress, build_store, no_progress
from gramian.data.token_store.open_store import MANIFEST, open_store
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.token_store.token_buffer import TokenBuffer
from gramian.data.token_stream import CHUNK, Stream
from gramian.data.tokenizer import ByteTokenizer, Ids, Tokenizer

Int64s = npt.NDArray[np.int64]

VALIDATES_BELOW = 2**64 // 20
"""Without validation files, documents whose 64-bit hash is below this bound, about 5 % of all, are for validation."""
KEPT_FROM = 1 << 25
"""Size in bytes from which a corpus' tokens are kept on disk; a smaller one is tokenised at every start."""
READ = '"text", "jsonl", "parquet" or "arrow"'
"""Sources whose records are tokenised."""
USUAL_SHARE = (0.01, 0.2)
"""Least and largest share of the tokens that a split by hashes may hold out; of few documents it is anything from 0 to 1."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a run as two token streams, and how many were read.

    Attributes:
        train: training documents.
        validation: validation documents.
        read: number of documents read, including empty ones.
        empty: number of documents without content; the streams omit them, except those of token files.
        held_out: how validation documents were chosen: by a hash, by their files, or as the tail of the tokens.
    """

    train: Stream
    validation: Stream
    read: int
    empty: int
    held_out: Literal["hash", "files", "tail"] = "hash"


def read_documents(data: DataSection, tokenizer: Tokenizer, progress: Progress = no_progress) -> Documents:
    """Read and tokenise all documents of a config and split them into training and validation.

    Text is stored as tokens of 2 or 4 bytes, of a large corpus in files (`token_store`), which later starts open; `progress` is
    told how far that is. Token files are memory maps and stay on disk. `data.validation_files` are the
    validation split. Without them a hash of its content assigns each document to a split, about 5 % of them to validation, so
    equal documents are in the same split and a document's split does not depend on other documents. If that holds out less
    than 1 % or more than 20 % of the tokens, as it does for one file or for a few, the last 5 % of the tokens are for
    validation instead. The embedded corpus is split by a hash of each file's path.

    Raises:
        GramianError: one line that names the file, or the field that leaves a split empty.
    """
    if data.source == "embedded":
        return _embedded(data, tokenizer)
    if data.validation_files:
        _refuse_common(data)
        train, read, empty = _read(data, data.files, "data.files", tokenizer, data.user, progress)
        validation, more_read, more_empty = _read(
            data, data.validation_files, "data.validation_files", tokenizer, progress=progress
        )
        if (train.vocabulary, train.end) != (validation.vocabulary, validation.end):
            raise GramianError(
                f"data.validation_files: vocabulary {validation.vocabulary}, end {validation.end}; "
                f"expected {train.vocabulary} and {train.end} as in data.files"
            )
        return Documents(train, validation, read + more_read, empty + more_empty, held_out="files")
    stream, read, empty = _read(data, data.files, "data.files", tokenizer, data.user, progress)
    return _split(stream, read, empty, tokenizer, data.length)


def read_stream(data: DataSection, files: Sequence[str], tokenizer: Tokenizer, field: str = "data.files") -> Stream:
    """Read and tokenise all documents of `files` with the options `data` into one token stream; errors name `field`."""
    return _read(data, files, field, tokenizer)[0]


def write_tokens(
    data: DataSection, tokenizer: Tokenizer, progress: Progress = no_progress
) -> dict[Path, tuple[int, int, float]]:
    """Write the token stores of a config's training and validation files, whatever their size.

    Returns:
        {folder of a store: (documents, tokens, seconds)}.

    Raises:
        GramianError: one line that names the field or the file.
    """
    if not data.cache:
        raise GramianError("data.cache: is empty; expected a folder for the tokens")
    if data.source in ("embedded", "tokens"):
        raise GramianError(f'data.source: "{data.source}" has nothing to tokenise; expected {READ}')
    encoder, found = ENCODERS[data.record](tokenizer), {}
    for names, field, user in (
        (data.files, "data.files", data.user),
        (data.validation_files, "data.validation_files", ""),
    ):
        if names:
            plan = _plan(data, find_files(names, data.source, field), user, encoder)
            folder, begun = Path(data.cache) / plan.key, time.perf_counter()
            build_store(folder, plan, encoder, progress)
            stored = open_store(folder, plan, encoder)
            assert stored is not None
            found[folder] = stored[0].documents, len(stored[0]), time.perf_counter() - begun
    return found


def _read(
    data: DataSection,
    files: Sequence[str],
    field: str,
    tokenizer: Tokenizer,
    user: str = "",
    progress: Progress = no_progress,
) -> tuple[Stream, int, int]:
    """Read and tokenise files; returns their token stream, the number of documents, and the number of empty documents.

    `user`: key of the user of a JSONL object; "": users are not read.
    """
    if data.source == "embedded":
        raise GramianError(f'data.source: "embedded" reads no files; expected {READ} or "tokens"')
    found = find_files(files, data.source, field)
    if data.source == "tokens":
        return _token_stream(found, data.tokenizer, tokenizer)
    encoder: RecordEncoder = ENCODERS[data.record](tokenizer)
    plan = _plan(data, found, user, encoder)
    stored = _stored(Path(data.cache) / plan.key, plan, encoder, progress) if data.cache else None
    if stored is None:
        buffer = TokenBuffer(encoder)
        for piece in plan.pieces:
            buffer.begin_piece()
            for record in read_piece(piece, plan.source, plan.shape):
                buffer.add(*record)
        stored = buffer.stream(), buffer.empty
    stream, empty = stored
    if not stream.documents:
        raise GramianError(f"{field}: all {empty} documents are empty; expected text")
    return stream, stream.documents + empty, empty


def _plan(data: DataSection, files: Sequence[File], user: str, encoder: RecordEncoder) -> StorePlan:
    return StorePlan.of(files, data.source, RecordShape.of(data, user), data.tokenizer, encoder)


def _stored(folder: Path, plan: StorePlan, encoder: RecordEncoder, progress: Progress) -> tuple[Stream, int] | None:
    """The stream of a corpus' token store, which is written first if the corpus is large; None if there is none."""
    if plan.bytes >= KEPT_FROM and not (folder / MANIFEST).exists():
        build_store(folder, plan, encoder, progress)
    return open_store(folder, plan, encoder)


def _embedded(data: DataSection, tokenizer: Tokenizer) -> Documents:
    corpus = load_corpus(data.limit_bytes)
    splits = (TokenBuffer(TextEncoder(tokenizer)), TokenBuffer(TextEncoder(tokenizer)))
    for buffer, files in zip(splits, (corpus.train, corpus.validation), strict=True):
        for name, content in files.items():
            buffer.add(content, "", name)
    return _documents(*splits)


def _token_stream(files: Sequence[File], name: str, tokenizer: Tokenizer) -> tuple[Stream, int, int]:
    """Open token files; returns their token stream, the number of documents, and the number of empty documents.

    Vocabulary and end id of a file are its sidecar's, or the tokenizer's if it has none. Raises a GramianError if the files
    differ in them, or differ from the tokenizer although the config names one (`name`: `data.tokenizer`).
    """
    arrays: list[Ids] = []
    edges: list[Int64s] = [np.zeros(1, dtype=np.int64)]
    contents: list[Int64s] = []
    described = True
    kinds: dict[tuple[int, int], Path] = {}
    empty = 0
    for file in files:
        ids, sidecar = open_tokens(file.path)
        described = described and sidecar is not None
        ours = (tokenizer.vocabulary, tokenizer.end)
        kind = ours if sidecar is None else (sidecar.vocabulary, sidecar.end)
        kinds.setdefault(kind, file.path)
        if len(kinds) > 1:
            (first, path), *_ = kinds.items()
            raise GramianError(
                f"{file.path}: vocabulary {kind[0]}, end {kind[1]}; expected {first[0]} and {first[1]} as in {path}"
            )
        if name not in ("auto", "bytes") and kind != ours:
            raise GramianError(
                f"{file.path}: vocabulary {kind[0]}, end {kind[1]}; expected {ours[0]} and {ours[1]} as in data.tokenizer"
            )
        stops = _stops(ids, *kind, file.path)
        contents.append(np.diff(stops, prepend=0) - (ids[stops - 1] == kind[1]))
        empty += int((contents[-1] == 0).sum())
        edges.append(edges[-1][-1] + stops)
        arrays.append(ids)
    vocabulary, end = next(iter(kinds))
    digest = tokenizer.digest if (vocabulary, end) == (tokenizer.vocabulary, tokenizer.end) else f"{vocabulary}/{end}"
    are_bytes = described and digest == ByteTokenizer.digest  # a file without a description may hold anything
    text_bytes = np.concatenate(contents) if are_bytes else None
    stream = Stream(
        arrays, np.concatenate(edges), vocabulary=vocabulary, end=end, tokenizer=digest, text_bytes=text_bytes
    )
    return stream, stream.documents, empty


def _stops(ids: Ids, vocabulary: int, end: int, path: Path) -> Int64s:
    """Position after the last token of each document of a token file, int64 [documents]; the last document may lack `end`.

    Raises a GramianError if a token id is not in 0 … vocabulary - 1.
    """
    stops: list[Int64s] = []
    for begin in range(0, len(ids), CHUNK):
        part = ids[begin : begin + CHUNK]
        outside = np.flatnonzero((part < 0) | (part >= vocabulary))
        if len(outside):
            at = int(outside[0])
            raise GramianError(
                f"{path}: token {begin + at} is {part[at]}; expected less than the vocabulary of {vocabulary}"
            )
        stops.append(np.flatnonzero(part == end) + (begin + 1))
    if ids[-1] != end:
        stops.append(np.array([len(ids)]))
    return np.concatenate(stops)


def _refuse_common(data: DataSection) -> None:
    train = {file.path.resolve() for file in find_files(data.files, data.source)}
    for file in find_files(data.validation_files, data.source, "data.validation_files"):
        if file.path.resolve() in train:
            raise GramianError(f"data.validation_files: {file.path} is in data.files too; expected different files")


def _split(stream: Stream, read: int, empty: int, tokenizer: Tokenizer, length: int) -> Documents:
    """Hold out the documents with low hashes of their content, or the stream's last 5 % if those are too few or too many.

    The last 5 % are at least the tokens of one window of `length`. Where the stream is too short for that, the documents are
    held out whatever their share. Raises a GramianError if they leave a split empty, or if a document at the end of the stream
    is also before it.
    """
    hashes = stream.document_hashes() if stream.content_hashes is None else stream.content_hashes
    validates = hashes < np.uint64(VALIDATES_BELOW)
    share = int(np.diff(stream.edges)[validates].sum()) / len(stream)
    tail = max(-(-len(stream) // 20), length + 1)
    fits = len(stream) - tail > length
    least, most = USUAL_SHARE
    if least <= share <= most or (not fits and 0 < share < 1):
        return Documents(stream.select(~validates), stream.select(validates), read, empty)
    if not fits:
        raise GramianError(
            f"data.files: {len(stream):,} tokens; expected at least {2 * (length + 1):,}, a window of data.length {length:,} "
            "for training and one for validation, or a smaller data.length"
        )
    at = len(stream) - tail
    last = int(np.searchsorted(stream.edges, at, side="right")) - 1  # the first document with a token in the tail
    if np.isin(hashes[last:], hashes[:last]).any():
        raise GramianError(
            "data.files: the last documents, which validate, are there twice; expected every document once, or "
            "data.validation_files"
        )
    return Documents(*stream.split(at, tokenizer), read, empty, held_out="tail")


def _documents(train: TokenBuffer, validation: TokenBuffer) -> Documents:
    empty = train.empty + validation.empty
    return Documents(train.stream(), validation.stream(), train.documents + validation.documents + empty, empty)
