"""Read the records of a piece of a corpus: text, prompt and completion, or the messages of a chat, and whose they are.

A record's content is bytes, of which a hash says on which side of a split it falls: UTF-8 of a text, else canonical JSON:
["prompt", "completion"], or a list of messages [{"role": …, "content": …}, …].
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gramian.core.errors import GramianError
from gramian.data.corpus.arrow_files import arrow_records
from gramian.data.corpus.record_pieces import TEXT_BYTES, Span
from gramian.data.data_files import unreadable, why_not_utf8
from gramian.data.options import DataSection

SHAPES = {
    "text": 'an object with a text under "{field}", as data.field says',
    "completion": 'an object with texts under "prompt" and "completion", as data.record says',
    "chat": 'an object with messages {{"role": …, "content": …}} under "{field}", as data.field says',
}
"""{data.record: what one record must be}."""


@dataclass(frozen=True)
class RecordShape:
    """How records are read: what one holds, under which keys."""

    record: str
    field: str
    user: str
    """Key of the record's user; "": users are not read."""

    @classmethod
    def of(cls, data: DataSection, user: str = "") -> "RecordShape":
        """The shape that a config's section says."""
        return cls(data.record, "messages" if (data.record, data.field) == ("chat", "text") else data.field, user)

    @property
    def columns(self) -> list[str]:
        """Keys of a record that are read."""
        keys = ["prompt", "completion"] if self.record == "completion" else [self.field]
        return [*keys, self.user] if self.user and self.user not in keys else keys

    def content(self, item: Any, place: Any) -> tuple[bytes, str]:
        """(content, user) of one record; `place` names it in errors."""
        expected = f"expected {SHAPES[self.record].format(field=self.field)}"
        if not isinstance(item, dict):
            raise GramianError(f"{place}: is not an object; {expected}")
        for key in self.columns[: 2 if self.record == "completion" else 1]:
            if key not in item:
                raise GramianError(f'{place}: has no "{key}" but {", ".join(item) or "nothing"}; {expected}')
            if self.record != "chat" and not isinstance(item[key], str):
                raise GramianError(f'{place}: "{key}" is not text; {expected}')
        user = item.get(self.user)
        if self.user and (not isinstance(user, str | int) or isinstance(user, bool) or user == ""):
            shown = f'"{self.user}" is {json.dumps(user)[:40]}' if self.user in item else f'has no "{self.user}"'
            raise GramianError(f"{place}: {shown}; expected text or an integer that names the user, as data.user says")
        try:
            if self.record == "text":
                content = item[self.field].encode()
            elif self.record == "completion":
                content = _canonical([item["prompt"], item["completion"]])
            else:
                content = _canonical(self._messages(item[self.field], place, expected))
        except UnicodeEncodeError:
            raise GramianError(f'{place}: "{self.columns[0]}" has half a surrogate pair; {expected}') from None
        except TypeError as problem:
            raise GramianError(f"{place}: a message holds what is not JSON ({problem}); {expected}") from None
        return content, str(user) if self.user else ""

    def _messages(self, messages: Any, place: Any, expected: str) -> list[dict[str, Any]]:
        if not isinstance(messages, list) or not messages:
            raise GramianError(f'{place}: "{self.field}" is no list of messages; {expected}')
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise GramianError(f'{place}: message {number} has no text under "role" and "content"; {expected}')
        return [_without_nulls(message) for message in messages]


def _without_nulls(value: Any) -> Any:
    """A message without the keys of no value, which rows of a table have because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def read_piece(spans: Sequence[Span], source: str, shape: RecordShape) -> Iterator[tuple[bytes, str, Any]]:
    """Yield (content, user, place) of each record of a piece; `place` names its file and line in errors, which are raised."""
    for span in spans:
        if source == "text":
            content = read_text(span)
            if content or not span.begin:
                yield content, "", span.path
        elif source == "jsonl":
            yield from _read_lines(span, shape)
        else:
            for row, item in arrow_records(span.path, span.begin, span.stop, shape.columns):
                place = f"{span.path}: {row}"
                yield *shape.content(item, place), place


def read_text(span: Span) -> bytes:
    """The bytes of a text file, or of the lines of a large one that begin in a span; raises if they are not UTF-8."""
    try:
        with span.path.open("rb") as file:
            size = span.path.stat().st_size
            begin, stop = (_line_start(file, place, size) for place in (span.begin, span.stop))
            file.seek(begin)
            content = file.read(stop - begin)
    except OSError as problem:
        raise unreadable(span.path, problem) from None
    why = why_not_utf8(content, complete=True, offset=begin)
    if why is not None:
        raise GramianError(f"{span.path}: {why}; expected text in UTF-8")
    content = content.removeprefix(codecs.BOM_UTF8) if not span.begin else content
    if not content and span.named and not span.begin:
        raise GramianError(f"{span.path}: is empty; expected text")
    return content


def _line_start(file: Any, place: int, size: int) -> int:
    """The first line start at or after a place of a binary file; in a line of more than `TEXT_BYTES` a character's start."""
    if not 0 < place < size:
        return place
    file.seek(place - 1)
    line = file.readline(TEXT_BYTES)
    if line.endswith(b"\n") or place - 1 + len(line) == size:
        return place - 1 + len(line)
    return place + next((k for k, byte in enumerate(line[1:5]) if byte & 0xC0 != 0x80), 0)


def _read_lines(span: Span, shape: RecordShape) -> Iterator[tuple[bytes, str, Any]]:
    count = 0
    try:
        with span.path.open("rb") as lines:
            if span.begin:
                lines.seek(span.begin - 1)
                lines.readline()
            for number, line in enumerate(_lines_before(lines, span.stop), start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 and not span.begin else line
                if line.strip():
                    count += 1
                    place = _Line(span, number)
                    yield *shape.content(_parsed(line, place, shape), place), place
    except OSError as problem:
        raise unreadable(span.path, problem) from None
    if not count and not span.begin and span.stop == span.path.stat().st_size:
        raise GramianError(f"{span.path}: is empty; expected one JSON object per line")


def _lines_before(lines: Any, stop: int) -> Iterator[bytes]:
    while lines.tell() < stop and (line := lines.readline()):
        yield line


@dataclass(frozen=True)
class _Line:
    """A line as messages name it, file:number; its number in the file is counted only if it is asked for."""

    span: Span
    number: int

    def __str__(self) -> str:
        before = 0
        if self.span.begin:
            with self.span.path.open("rb") as file:
                rest = self.span.begin
                while rest > 0 and (part := file.read(min(rest, 1 << 20))):
                    before += part.count(b"\n")
                    rest -= len(part)
                file.seek(self.span.begin - 1)
                before += file.read(1) != b"\n"
        return f"{self.span.path}:{before + self.number}"


def _parsed(line: bytes, place: _Line, shape: RecordShape) -> Any:
    expected = f"expected {SHAPES[shape.record].format(field=shape.field)}"
    try:
        return json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as problem:
        raise GramianError(f"{place}: byte {problem.start} is not UTF-8; {expected}") from None
    except (ValueError, RecursionError) as problem:
        reason = str(problem)
        if isinstance(problem, json.JSONDecodeError):
            reason = f"{problem.msg}: column {problem.colno}"
        raise GramianError(f"{place}: is not JSON ({reason}); {expected}") from None


def _canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
