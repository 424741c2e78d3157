"""Cut the files of a corpus into pieces of about 32 MiB that are read and tokenised independently of each other.

A piece is a list of spans: bytes of text and JSONL files, row groups of Parquet files, record batches of Arrow files. Pieces
depend on names and sizes of the files alone, so the documents and their order are the same for any number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gramian.core.errors import GramianError
from gramian.data.corpus.arrow_files import arrow_groups
from gramian.data.data_files import File, Source, unreadable

PIECE_BYTES = 1 << 25
"""Bytes of a piece, at least; a row group or a line may make it larger."""
TEXT_BYTES = 1 << 24
"""A text file of more bytes is several documents, cut at the first line end after each multiple of this."""


@dataclass(frozen=True)
class Span:
    """A part of a file."""

    path: Path
    begin: int
    """First byte, row group or record batch; a line that begins before it belongs to the span before."""
    stop: int
    size: int
    """Bytes of the file that the part stands for."""
    named: bool = False
    """True if the config names the file itself and not a folder above it."""


def cut_into_pieces(files: Sequence[File], source: Source) -> list[list[Span]]:
    """The pieces of all files, in order."""
    pieces: list[list[Span]] = [[]]
    room = PIECE_BYTES
    for span in (span for file in files for span in _SPANS[source](file)):
        if room <= 0 and pieces[-1]:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append(span)
        room -= span.size
    return pieces


def whole(file: File) -> Span:
    """All bytes of a file."""
    try:
        size = file.path.stat().st_size
    except OSError as problem:
        raise unreadable(file.path, problem) from None
    return Span(file.path, 0, size, size, file.named)


def _bytes(file: File, unit: int) -> Iterator[Span]:
    """Spans of `unit` bytes, at least one."""
    size = whole(file).size
    for begin in range(0, max(size, 1), unit):
        stop = min(size, begin + unit)
        yield Span(file.path, begin, stop, stop - begin, file.named)


def _groups(file: File) -> Iterator[Span]:
    sizes = arrow_groups(file.path)
    if not sizes:
        raise GramianError(f"{file.path}: has no rows; expected at least one record")
    begin, size = 0, 0
    for group, more in enumerate(sizes):
        size += more
        if size >= PIECE_BYTES or group + 1 == len(sizes):
            yield Span(file.path, begin, group + 1, size, file.named)
            begin, size = group + 1, 0


_SPANS: dict[str, Callable[[File], Iterator[Span]]] = {
    "text": lambda file: _bytes(file, TEXT_BYTES),
    "jsonl": lambda file: _bytes(file, PIECE_BYTES),
    "parquet": _groups,
    "arrow": _groups,
}
