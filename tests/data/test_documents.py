"""Documents from every source: what is read, on which side it falls, and one line for what cannot be read."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramian.core.errors import GramianError
from gramian.data import load_tokenizer, load_windows, read_documents, read_stream
from gramian.data.documents import VALIDATES_BELOW
from gramian.data.embedded_corpus import load_corpus
from gramian.data.options import DataSection
from gramian.data.token_stream import Stream, content_hash
from gramian.data.tokenizer import ByteTokenizer
from tests.data.test_tokenizer import saved as saved_tokenizer

TEXTS = [f"document {index}: ünïcode {'x' * (index % 17)}" for index in range(200)]


def read(source: str, *files: Path, validation: tuple[Path, ...] = (), **told: Any) -> tuple[list[str], list[str]]:
    """Documents of both sides as text."""
    data = data_of(source, *files, validation=validation, **told)
    documents = read_documents(data, ByteTokenizer())
    return texts(documents.train), texts(documents.validation)


def data_of(source: str, *files: Path, validation: tuple[Path, ...] = (), **told: Any) -> DataSection:
    names = {"files": tuple(map(str, files)), "validation_files": tuple(map(str, validation))}
    return DataSection(source=source, **names, **told)  # type: ignore[arg-type]


def texts(stream: Stream) -> list[str]:
    edges = stream.edges.tolist()
    parts = [stream.read(begin, stop) for begin, stop in zip(edges[:-1], edges[1:], strict=True)]
    assert all(part[-1] == stream.end for part in parts)
    return [ByteTokenizer().decode(part) for part in parts]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in documents))
    return path


def write_tokens(path: Path, documents: list[str]) -> Path:
    flat = np.concatenate([np.append(ByteTokenizer().encode(text), 256) for text in documents]).astype("<u2")
    if path.suffix == ".npy":
        np.save(path, flat.astype(">i4"))
    else:
        flat.tofile(path)
        path.with_suffix(".json").write_text('{"dtype": "uint16", "vocabulary": 257, "end": 256}')
    return path


def write_folder(folder: Path, documents: list[str]) -> Path:
    folder.mkdir()
    for index, text in enumerate(documents):
        below = folder / f"{index // 50}"
        below.mkdir(exist_ok=True)
        (below / f"{index:03d}{('.txt', '.md', '.py')[index % 3]}").write_text(text)
    return folder


def written(folder: Path, kind: str, documents: list[str], name: str = "data") -> tuple[str, Path]:
    """A source and where it lies."""
    if kind == "text":
        return "text", write_folder(folder / name, documents)
    if kind == "jsonl":
        return "jsonl", write_jsonl(folder / f"{name}.jsonl", documents)
    return "tokens", write_tokens(folder / f"{name}{kind}", documents)


KINDS = ("text", "jsonl", ".npy", ".bin")


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_falls_on_one_side_in_order(tmp_path: Path, kind: str) -> None:
    train, validation = read(*written(tmp_path, kind, TEXTS))
    assert sorted(train + validation) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train
    assert [text for text in TEXTS if text in set(validation)] == validation
    assert 2 <= len(validation) <= 25


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_keeps_its_side_whatever_lies_beside_it(tmp_path: Path, kind: str) -> None:
    _, validation = read(*written(tmp_path, kind, TEXTS))
    _, of_fewer = read(*written(tmp_path, kind, TEXTS[:10:-1], "fewer"))
    assert set(of_fewer) == set(validation) & set(TEXTS[11:])


@pytest.mark.parametrize("kind", KINDS)
def test_validation_files_validate_whole(tmp_path: Path, kind: str) -> None:
    source, path = written(tmp_path, kind, TEXTS[:20])
    _, other = written(tmp_path, kind, TEXTS[20:23], "validation")
    assert read(source, path, validation=(other,)) == (TEXTS[:20], TEXTS[20:23])


def test_kinds_of_files_give_the_same_windows(tmp_path: Path) -> None:
    digests = set()
    for kind in KINDS:
        source, path = written(tmp_path, kind, TEXTS[:20], f"from{kind.strip('.')}")
        _, other = written(tmp_path, kind, TEXTS[20:23], f"validation{kind.strip('.')}")
        training, validation = load_windows(data_of(source, path, validation=(other,), length=16))
        digests.add((training.digest, validation.digest))
    assert len(digests) == 1


def test_embedded_keeps_the_split_of_the_corpus() -> None:
    data = DataSection(limit_bytes=400_000)
    documents = read_documents(data, ByteTokenizer())
    corpus = load_corpus(400_000)
    expected = [[content.decode() for content in files.values()] for files in (corpus.train, corpus.validation)]
    assert texts(documents.train) == [text for text in expected[0] if text]
    assert texts(documents.validation) == [text for text in expected[1] if text]
    assert documents.read == len(corpus.train) + len(corpus.validation)
    assert documents.empty == sum(not text for text in expected[0] + expected[1])


def test_token_files_stay_files(tmp_path: Path) -> None:
    paths = [write_tokens(tmp_path / "a.npy", TEXTS[:100]), write_tokens(tmp_path / "b.npy", TEXTS[100:])]
    documents = read_documents(data_of("tokens", *paths), ByteTokenizer())
    for stream in (documents.train, documents.validation):
        assert all(isinstance(shared.array, np.memmap) for shared in stream._arrays)
    assert sorted(texts(documents.train) + texts(documents.validation)) == sorted(TEXTS)


def test_text_is_kept_as_narrow_tokens_without_slack(tmp_path: Path) -> None:
    files = []
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_bytes(name.encode() * 60_000)
        files.append(str(tmp_path / name))
    stream = read_stream(DataSection(source="text"), files, ByteTokenizer())
    (shared,) = stream._arrays
    assert shared.array.nbytes == 2 * 3 * (300_000 + 1)
    assert texts(stream) == [name * 60_000 for name in ("a.txt", "b.txt", "c.txt")]


def test_tokens_without_a_last_end_are_a_document_too(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 256, 256, 3]))
    np.save(tmp_path / "b.npy", np.array([4, 256]))
    stream = read_stream(DataSection(source="tokens"), [str(tmp_path)], ByteTokenizer())
    assert stream.edges.tolist() == [0, 3, 4, 5, 7]
    assert stream.read(0, 7).tolist() == [1, 2, 256, 256, 3, 4, 256]


def test_tokens_over_several_looks_are_found_at_the_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramian.data.documents.CHUNK", 4)
    path = write_tokens(tmp_path / "a.npy", ["abc", "abcd", "", "a", "abcdefgh"])
    stream = read_stream(DataSection(source="tokens"), [str(path)], ByteTokenizer())
    assert texts(stream) == ["abc", "abcd", "", "a", "abcdefgh"]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", [*TEXTS, "", ""])
    documents = read_documents(data_of("text", folder), ByteTokenizer())
    assert (documents.read, documents.empty) == (202, 2)
    assert documents.train.documents + documents.validation.documents == 200
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    documents = read_documents(data_of("jsonl", path), ByteTokenizer())
    assert (documents.read, documents.empty) == (201, 1)
    other = write_jsonl(tmp_path / "b.jsonl", ["", "x"])
    documents = read_documents(data_of("jsonl", path, validation=(other,)), ByteTokenizer())
    assert (documents.read, documents.empty) == (203, 2)
    path = write_tokens(tmp_path / "a.npy", [*TEXTS, "", ""])
    documents = read_documents(data_of("tokens", path), ByteTokenizer())
    assert (documents.read, documents.empty) == (202, 2)


def test_folders_are_read_in_the_order_of_paths_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.PY", ".git/config.txt", ".hidden.txt", "picture.png"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    stream = read_stream(DataSection(source="text"), [str(tmp_path / "folder")], ByteTokenizer())
    assert texts(stream) == ["a/y.PY", "a/z.md", "b.txt"]


def test_lines_end_at_newlines_only_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one\u2028\\n"}\r\n\n  \n{"body": "two"}')
    stream = read_stream(DataSection(source="jsonl", field="body"), [str(path)], ByteTokenizer())
    assert texts(stream) == ["one\u2028\n", "two"]


def refused(data: DataSection) -> str:
    with pytest.raises(GramianError) as caught:
        read_documents(data, ByteTokenizer())
    message = str(caught.value)
    assert "\n" not in message
    assert "; expected" in message
    return message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "half', "is not JSON (Unterminated string starting at: column 10)"),
        (b"nonsense", "is not JSON (Expecting value: column 1)"),
        (b'["text"]', "is not an object"),
        (b'{"content": "x", "id": 3}', 'has no "text" but content, id'),
        (b'{"text": 3}', '"text" is not text'),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        (b'{"text": "\\ud800"}', '"text" has half a surrogate pair'),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    assert refused(data_of("jsonl", path)).startswith(f"{path}:3: {reason}")


def sidecar(path: Path, **told: Any) -> Path:
    path.write_bytes(b"\1\0\2\0")
    told = {"dtype": "uint16", "vocabulary": 257, "end": 256} | told
    path.with_suffix(".json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return path


def content(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def array(path: Path, values: Any) -> Path:
    np.save(path, np.asarray(values))
    return path


def shortened(path: Path, by: int) -> Path:
    path.write_bytes(path.read_bytes()[:-by])
    return path


BAD = {
    "missing": ("text", lambda f: f / "none.txt", "data.files: .*none.txt does not exist"),
    "empty text": ("text", lambda f: content(f / "a.txt", b""), ".*a.txt: is empty"),
    "no utf-8": ("text", lambda f: content(f / "a.txt", b"good\xff\xfe"), ".*a.txt: byte 4 is not UTF-8"),
    "no text in folder": ("text", lambda f: f, "data.files: .* has no file to read"),
    "empty jsonl": ("jsonl", lambda f: content(f / "a.jsonl", b"\n \n"), ".*a.jsonl: is empty"),
    "empty npy": ("tokens", lambda f: array(f / "a.npy", np.empty(0, int)), ".*a.npy: is empty"),
    "2-D npy": ("tokens", lambda f: array(f / "a.npy", np.ones((2, 2), int)), ".*a.npy: contains int64 \\[2, 2\\]"),
    "float npy": ("tokens", lambda f: array(f / "a.npy", np.ones(3)), ".*a.npy: contains float64 \\[3\\]"),
    "cut npy": ("tokens", lambda f: shortened(array(f / "a.npy", range(9)), 3), ".*a.npy: is not a complete .npy"),
    "0-byte npy": ("tokens", lambda f: content(f / "a.npy", b""), ".*a.npy: is not a complete .npy"),
    "no npy": ("tokens", lambda f: content(f / "a.npy", b"nonsense"), ".*a.npy: is not a complete .npy"),
    "other suffix": ("tokens", lambda f: content(f / "a.dat", b"12"), ".*a.dat: is not a token file"),
    "large id": ("tokens", lambda f: array(f / "a.npy", [1, 257]), ".*a.npy: token 1 is 257"),
    "negative id": ("tokens", lambda f: array(f / "a.npy", [1, 2, -1]), ".*a.npy: token 2 is -1"),
    "no sidecar": ("tokens", lambda f: content(f / "a.bin", b"1234"), ".*a.json: does not exist"),
    "no end": ("tokens", lambda f: sidecar(f / "a.bin", end=None), ".*a.json: vocabulary 257, end None"),
    "end outside": ("tokens", lambda f: sidecar(f / "a.bin", end=257), ".*a.json: vocabulary 257, end 257"),
    "no dtype": ("tokens", lambda f: sidecar(f / "a.bin", dtype=None), ".*a.json: dtype None"),
    "odd dtype": ("tokens", lambda f: sidecar(f / "a.bin", dtype="nonsense"), ".*a.json: dtype 'nonsense'"),
    "float dtype": ("tokens", lambda f: sidecar(f / "a.bin", dtype="float16"), ".*a.json: dtype 'float16'"),
    "cut bin": ("tokens", lambda f: shortened(sidecar(f / "a.bin"), 1), ".*a.bin: is cut off at 3 bytes"),
    "empty bin": ("tokens", lambda f: shortened(sidecar(f / "a.bin"), 4), ".*a.bin: is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_line_that_names_the_file(tmp_path: Path, case: str) -> None:
    source, made, pattern = BAD[case]
    assert re.match(pattern, refused(data_of(source, made(tmp_path))))


def test_sidecars_that_are_no_json_are_named(tmp_path: Path) -> None:
    path = sidecar(tmp_path / "a.bin")
    for text in ("{", "[]"):
        path.with_suffix(".json").write_text(text)
        assert re.match(".*a.json: is not (JSON|an object); expected", refused(data_of("tokens", path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("source", ["text", "jsonl", "tokens"])
def test_files_without_permission_are_named(tmp_path: Path, source: str) -> None:
    path = tmp_path / "a.npy"
    path.write_text("x")
    path.chmod(0)
    assert "cannot be read (Permission denied)" in refused(data_of(source, path))


def test_files_that_vanish_while_they_are_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gramian.data.data_files import File

    monkeypatch.setattr("gramian.data.documents.find_files", lambda *told: [File(tmp_path / "a.npy", True)])
    for source in ("text", "jsonl", "tokens"):
        assert "a.npy: cannot be read (No such file or directory)" in refused(data_of(source, tmp_path / "a.npy"))


def test_token_files_that_disagree_are_refused(tmp_path: Path) -> None:
    first, second = sidecar(tmp_path / "a.bin"), sidecar(tmp_path / "b.bin", end=255)
    assert refused(data_of("tokens", first, second)) == (
        f"{second}: vocabulary 257, end 255; expected 257 and 256 as in {first}"
    )
    assert "data.validation_files: vocabulary 257, end 255; expected 257 and 256" in refused(
        data_of("tokens", first, validation=(second,))
    )


def test_token_files_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = sidecar(tmp_path / "a.bin", vocabulary=300)
    assert "a.bin: vocabulary 300, end 256; expected 257 and 256 as in data.tokenizer" in refused(
        data_of("tokens", path, tokenizer="some folder")
    )


def test_sidecars_need_no_tokenizer(tmp_path: Path) -> None:
    path = sidecar(tmp_path / "a.bin", vocabulary=50257, end=50256)
    stream = read_stream(DataSection(source="tokens"), [str(path)], ByteTokenizer())
    assert (stream.vocabulary, stream.end, stream.read(0, 2).tolist()) == (50257, 50256, [1, 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["train", "validation"])
def test_too_few_documents_for_a_hash_hold_out_their_tail(tmp_path: Path, kind: str, side: str) -> None:
    train, validation = read(*written(tmp_path, kind, TEXTS))
    few = train[:5] if side == "train" else validation[:2]
    where = written(tmp_path, kind, few, side)
    documents = read_documents(data_of(*where, length=8), ByteTokenizer())
    whole = read_stream(data_of(*where), [str(path) for path in where[1:]], ByteTokenizer())
    tokens = whole.read(0, len(whole)).tolist()
    held_out = max(-(-len(tokens) // 20), 9)
    parts = [part.read(0, len(part)).tolist() for part in (documents.train, documents.validation)]
    assert documents.held_out == "tail" and parts == [tokens[:-held_out], tokens[-held_out:]]
    assert documents.read == len(few) and len(documents.validation.document_hashes()) >= 1
    length = len(tokens) // 2
    assert refused(data_of(*where, length=length)).startswith(
        f"data.files: {len(tokens):,} tokens; expected at least {2 * (length + 1):,}, a window of data.length"
    )


def test_one_text_file_trains_and_validates_on_its_tail(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a book\n" for i in range(2000)))
    training, validation = load_windows(data_of("text", tmp_path / "book.txt", length=64))
    assert len(training) > 10 * len(validation) > 0 and validation.held_out == "tail"
    read = validation.stream.read(0, len(validation.stream))
    assert (
        bytes(read[:-1].astype("uint8").tolist()).endswith(b"line 1999 of a book\n")
        and read[-1] == validation.stream.end
    )


def test_a_file_on_both_sides_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", TEXTS[:5])
    assert "is in data.files too" in refused(data_of("text", folder, validation=(folder / "0" / "." / "000.txt",)))


def test_only_empty_documents_are_refused(tmp_path: Path) -> None:
    path, other = write_jsonl(tmp_path / "a.jsonl", ["x"]), write_jsonl(tmp_path / "b.jsonl", ["", ""])
    assert refused(data_of("jsonl", path, validation=(other,))).startswith(
        "data.validation_files: all 2 documents are empty"
    )


# ---- the share that is held out, and bytes of text --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most_validate", [True, False], ids=["nearly all", "nearly nothing"])
def test_few_documents_of_unlike_sizes_hold_out_their_tail(tmp_path: Path, kind: str, most_validate: bool) -> None:
    train, validation = read(*written(tmp_path, kind, TEXTS))
    large = next(
        text
        for number in range(9999)
        if (content_hash(_hashed(text := f"{number} " + "y" * 9000, kind)) < VALIDATES_BELOW) == most_validate
    )
    few = [large, *(train[:2] if most_validate else validation[:1])]
    data = data_of(*written(tmp_path, kind, few, "few"), length=8)
    documents = read_documents(data, ByteTokenizer())
    whole = sum(len(text.encode()) + 1 for text in few)
    assert documents.held_out == "tail" and len(documents.validation) == -(-whole // 20)


def _hashed(text: str, kind: str) -> bytes:
    content = text.encode()
    return content if kind in ("text", "jsonl") else np.frombuffer(content, np.uint8).astype("<u4").tobytes()


@pytest.mark.parametrize("documents", [1, 200], ids=["tail", "hash"])
@pytest.mark.parametrize("tokenizer", ["bytes", "pairs"])
def test_bytes_of_text_are_those_of_each_side(tmp_path: Path, documents: int, tokenizer: str) -> None:
    name = "bytes" if tokenizer == "bytes" else str(saved_tokenizer(tmp_path / "tokenizer"))
    contents = ["hello world, hello ü " * 40] if documents == 1 else TEXTS
    where = written(tmp_path, "jsonl", contents)
    tokens = load_tokenizer(name)
    found = read_documents(data_of(*where, length=8, tokenizer=name), tokens)
    for stream in (found.train, found.validation):
        text = tokens.decode(stream.read(0, len(stream)))
        assert stream.text_bytes is not None and len(stream.text_bytes) == stream.documents
        assert (
            abs(int(stream.text_bytes.sum()) - len(text.encode())) <= 6
        )  # a cut character is three bytes on each side
        assert stream.bits_per_byte(math.log(2)) == pytest.approx(len(stream) / len(text.encode()), rel=0.1)
    total = sum(len(text.encode()) for text in contents)
    assert sum(int(stream.text_bytes.sum()) for stream in (found.train, found.validation)) == total  # type: ignore[union-attr]


def test_bytes_of_token_files_are_known_of_bytes_alone(tmp_path: Path) -> None:
    stream = read_stream(data_of("tokens"), [str(write_tokens(tmp_path / "a.bin", TEXTS[:3]))], ByteTokenizer())
    assert stream.text_bytes is not None
    assert stream.text_bytes.tolist() == [len(text.encode()) for text in TEXTS[:3]]
    other = read_stream(
        data_of("tokens"), [str(sidecar(tmp_path / "b.bin", vocabulary=50257, end=50256))], ByteTokenizer()
    )
    assert other.text_bytes is None and other.bits_per_byte(1.0) is None


@pytest.mark.parametrize("documents", [1, 200], ids=["tail", "hash"])
def test_bytes_are_not_known_of_a_tokenizer_that_loses_text(tmp_path: Path, documents: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "[UNK]": 1, "hello": 2, "world": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="[UNK]").save_pretrained(
        tmp_path / "t"
    )
    contents = ["hello world " * 40] if documents == 1 else [f"hello {text}" for text in TEXTS]
    data = data_of(*written(tmp_path, "jsonl", contents), length=4, tokenizer=str(tmp_path / "t"))
    found = read_documents(data, load_tokenizer(str(tmp_path / "t")))
    assert found.train.bits_per_byte(1.0) is None and found.validation.bits_per_byte(1.0) is None


def test_a_cut_inside_a_character_counts_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "tea.txt").write_text("茶" * 151)
    found = read_documents(data_of("text", tmp_path / "tea.txt", length=8), ByteTokenizer())
    for stream in (found.train, found.validation):
        tokens = stream.read(0, len(stream))
        assert stream.text_bytes is not None and stream.text_bytes.sum() == (tokens != 256).sum()


def test_a_text_that_would_train_and_validate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(200)))
    (tmp_path / "b.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    twice = data_of("text", tmp_path / "a.txt", tmp_path / "link.txt", length=8)
    assert "link.txt is" in refused(twice) and refused(twice).endswith("once more; expected every file once")
    copies = refused(data_of("text", tmp_path / "a.txt", tmp_path / "b.txt", length=8))
    assert copies.startswith("data.files: the last documents, which validate, are there twice; expected")
