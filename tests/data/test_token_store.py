"""Token stores: what is written is what is read in memory, whoever writes it, however often it is interrupted."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.core.folder_lock import FolderLock
from gramian.data import Windows, load_tokenizer, load_windows, read_documents, read_stream
from gramian.data import documents as documents_module
from gramian.data import windows as windows_module
from gramian.data.corpus import record_pieces
from gramian.data.corpus.read_records import RecordShape, read_piece
from gramian.data.corpus.record_encoder import TextEncoder
from gramian.data.data_files import File
from gramian.data.options import DataSection
from gramian.data.token_store import build_store as build_module
from gramian.data.token_store.build_store import build_store
from gramian.data.token_store.checked_array import BLOCK
from gramian.data.token_store.open_store import open_store
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.token_store.token_buffer import TokenBuffer
from gramian.data.token_stream import Stream
from gramian.data.tokenizer import ByteTokenizer
from tests.kit.matrix import examples

WORDS = ("a", "bb", "ünïcode", "line\nbreak", "", " ", "日本", "x" * 40)


def texts_of(seed: int, count: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randrange(12))) for _ in range(count)]


def write(folder: Path, source: str, texts: list[str], files: int = 3) -> list[Path]:
    """The texts in several files of a kind."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(files):
        mine = texts[number::files]
        path = folder / f"{number}.{source}"
        if source == "jsonl":
            path.write_text("".join(json.dumps({"text": text, "who": f"u{len(text) % 5}"}) + "\n" for text in mine))
        else:
            import pyarrow as pa
            from pyarrow import ipc, parquet

            table = pa.table({"text": mine, "who": [f"u{len(text) % 5}" for text in mine], "more": [1] * len(mine)})
            if source == "parquet":
                parquet.write_table(table, path, row_group_size=7)
            else:  # as a file with an index, and as a stream
                make = ipc.new_file if number % 2 else ipc.new_stream
                with make(str(path), table.schema) as writer:
                    writer.write_table(table, max_chunksize=7)
        paths.append(path)
    return paths


def in_memory(plan: StorePlan) -> tuple[Stream, int]:
    buffer = TokenBuffer(TextEncoder(ByteTokenizer()))
    for piece in plan.pieces:
        for record in read_piece(piece, plan.source, plan.shape):
            buffer.add(*record)
    return buffer.stream(), buffer.empty


def told(stream: Stream) -> dict[str, Any]:
    """Everything about a stream."""
    hashes = stream.document_hashes().tolist(), [] if stream.content_hashes is None else stream.content_hashes.tolist()
    return {
        "tokens": stream.read(0, len(stream)).tolist(), "edges": stream.edges.tolist(), "hashes": hashes,
        "text_bytes": None if stream.text_bytes is None else stream.text_bytes.tolist(),
        "users": None if stream.users is None else stream.users.tolist(), "digest": Windows(stream, 8).digest,
    }  # fmt: skip


def plan_of(paths: list[Path], source: str, user: str = "who") -> StorePlan:
    files = [File(path, named=True) for path in paths]
    return StorePlan.of(files, source, RecordShape("text", "text", user), "bytes", TextEncoder(ByteTokenizer()))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_pieces, "PIECE_BYTES", 1500)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrow"])
def test_a_store_is_what_memory_holds_for_any_number_of_processes(tmp_path: Path, source: str) -> None:
    texts = texts_of(1, 200)
    plan, encoder = plan_of(write(tmp_path / "in", source, texts), source), TextEncoder(ByteTokenizer())
    assert len(plan.pieces) > 3
    whole, empty = in_memory(plan)
    edges = whole.edges.tolist()
    read = [ByteTokenizer().decode(whole.read(*ends)) for ends in zip(edges[:-1], edges[1:], strict=True)]
    assert sorted(read) == sorted(text for text in texts if text)
    assert empty == texts.count("")
    for processes in (1, 2) if source == "jsonl" else (1,):
        folder = tmp_path / f"store{processes}"
        done: list[tuple[int, int]] = []
        build_store(folder, plan, encoder, lambda a, b, done=done: done.append((a, b)), processes)
        found = open_store(folder, plan, encoder)
        assert found is not None and found[1] == empty
        assert told(found[0]) == told(whole)
        size = sum(span.size for piece in plan.pieces for span in piece)
        assert done[0] == (0, size) and done[-1] == (size, size) and done == sorted(done)
        assert told(pickle.loads(pickle.dumps(found[0]))) == told(whole)
    assert StorePlan.from_json(json.loads(json.dumps(plan.to_json()))).key == plan.key


@settings(max_examples=examples(60), deadline=None)
@given(texts=st.lists(st.text(alphabet="ab\n ü日\r", max_size=12), min_size=1, max_size=12), unit=st.integers(1, 60))
def test_every_line_is_read_once_wherever_pieces_begin(tmp_path_factory: Any, texts: list[str], unit: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n\n".join(lines) + "\n" * (len(texts) % 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_pieces, "PIECE_BYTES", unit)
        plan = plan_of([path], "jsonl", "")
    places = [str(place) for p in plan.pieces for *_, place in read_piece(p, "jsonl", plan.shape)]
    found = [content.decode() for p in plan.pieces for content, *_ in read_piece(p, "jsonl", plan.shape)]
    assert found == texts
    assert places == [f"{path}:{1 + 2 * number}" for number in range(len(texts))]


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(alphabet="ab\n ü日", min_size=1, max_size=200), unit=st.integers(4, 60))
def test_a_large_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path_factory: Any, text: str, unit: int) -> None:
    from gramian.data.corpus import read_records

    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        for module in (record_pieces, read_records):
            patch.setattr(module, "TEXT_BYTES", unit)
        plan = plan_of([path], "text", "")
        found = [content for p in plan.pieces for content, *_ in read_piece(p, "text", plan.shape)]
    assert b"".join(found) == text.encode()
    for part in found[:-1]:
        assert part.endswith(b"\n") or len(part) >= unit - 4  # a line that is longer than a document


def test_a_line_that_cannot_be_read_is_named_in_a_later_piece(tmp_path: Path, small_pieces: None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "x" * 30}) + "\n" for _ in range(40)) + '{"other": 1}\n' + '{"text": "y"}\n'
    )
    plan = plan_of([path], "jsonl", "")
    for processes in (1, 2):
        with pytest.raises(
            GramianError, match=rf'^{path}:41: has no "text" but other; expected an object with a text under'
        ):
            build_store(tmp_path / f"s{processes}", plan, TextEncoder(ByteTokenizer()), processes=processes)
        assert open_store(tmp_path / f"s{processes}", plan, TextEncoder(ByteTokenizer())) is None


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.full)], ids=["interrupted", "killed"])
def test_a_build_that_ended_early_goes_on_with_what_it_wrote(tmp_path: Path, small_pieces: None, killed: bool) -> None:
    paths = write(tmp_path / "in", "jsonl", texts_of(3, 600))
    plan, encoder, folder = plan_of(paths, "jsonl"), TextEncoder(ByteTokenizer()), tmp_path / "store"
    kept: dict[str, int] = {}
    for pieces in (2, 9):
        (build_until_killed if killed else build_until_interrupted)(plan, folder, pieces)
        assert open_store(folder, plan, encoder) is None
        now = times(folder)
        assert kept.items() <= now.items() and len(now) >= pieces - 1
        kept = now
    broken = sorted(folder.glob("[0-9]*.tokens"))[0]
    os.truncate(broken, broken.stat().st_size - 1)  # as of a disk that lost its end
    (folder / ".tmp-00003.tokens").write_text("half")
    build_store(folder, plan, encoder)
    found, after = open_store(folder, plan, encoder), times(folder)
    assert found is not None and told(found[0]) == told(in_memory(plan)[0])
    assert {name for name in kept if kept[name] != after[name]} == {broken.with_suffix(".json").name}
    assert not [*folder.glob(".tmp*")]


def times(folder: Path) -> dict[str, int]:
    """When each piece was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[0-9]*.json")}


def build_until_interrupted(plan: StorePlan, folder: Path, pieces: int) -> None:
    seen: list[int] = []

    def progress(done: int, size: int) -> None:
        seen.append(done)
        if len(seen) > pieces:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(folder, plan, TextEncoder(ByteTokenizer()), progress)


def build_until_killed(plan: StorePlan, folder: Path, pieces: int) -> None:
    program = f"""
import json
from pathlib import Path
from gramian.data.corpus.record_encoder import TextEncoder
from gramian.data.token_store.build_store import build_store
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.tokenizer import ByteTokenizer
plan = StorePlan.from_json(json.loads({json.dumps(plan.to_json())!r}))
build_store(Path({str(folder)!r}), plan, TextEncoder(ByteTokenizer()), lambda done, size: print(done, flush=True), 1)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(pieces):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_one_process_writes_and_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, encoder = plan_of(write(tmp_path / "in", "jsonl", texts_of(4, 30)), "jsonl"), TextEncoder(ByteTokenizer())
    folder = tmp_path / "store"
    folder.mkdir()
    lock, waits = FolderLock(folder), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            lock.release()

    monkeypatch.setattr(time, "sleep", wait)
    build_store(folder, plan, encoder)
    assert len(waits) == 3 and open_store(folder, plan, encoder) is not None
    monkeypatch.setattr(build_module, "tokenize_piece", None)
    build_store(folder, plan, encoder)  # complete: nothing is written


def damaged_store(tmp_path: Path) -> tuple[StorePlan, Path]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " * 40000}) + "\n" for number in range(20)))
    plan = plan_of([path], "jsonl", "")
    build_store(tmp_path / "store", plan, TextEncoder(ByteTokenizer()))
    return plan, tmp_path / "store"


def test_a_damaged_block_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    plan, folder = damaged_store(tmp_path)
    with (folder / "00000.tokens").open("r+b") as file:
        file.seek(BLOCK + 77)
        file.write(b"\xff")
    found = open_store(folder, plan, TextEncoder(ByteTokenizer()))
    assert found is not None
    stream, half = found[0], BLOCK // 2  # two bytes a token
    stream.read(0, half)
    stream.read(2 * half, 2 * half + 9)
    with pytest.raises(GramianError, match=r"00000\.tokens: block 1 \(of 1 MiB\) is not as it was written; expected "):
        stream.read(half, half + 1)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("00000.documents", b"\1", "its checksum differs; expected the folder removed"),
        ("manifest.json", b"}", "is damaged"),
        ("00000.tokens", None, "does not exist; expected the folder removed"),
    ],
)
def test_a_damaged_store_is_one_line(tmp_path: Path, name: str, change: bytes | None, words: str) -> None:
    plan, folder = damaged_store(tmp_path)
    path = folder / name
    path.unlink() if change is None else path.write_bytes(change + path.read_bytes()[1:])
    with pytest.raises(GramianError, match=rf"{name}: {words}"):
        open_store(folder, plan, TextEncoder(ByteTokenizer()))


def test_other_files_options_or_times_are_another_store(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "jsonl", texts_of(5, 9), files=1)[0]
    first = plan_of([path], "jsonl")
    keys = {first.key, plan_of([path], "jsonl", "").key}
    os.utime(path, ns=(0, first.files[0][2] + 1))
    keys.add(plan_of([path], "jsonl").key)
    path.write_text(path.read_text() + json.dumps({"text": "more", "who": "a"}) + "\n")
    keys.add(plan_of([path], "jsonl").key)
    assert len(keys) == 4


def test_a_large_corpus_is_kept_and_a_later_start_tokenises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "KEPT_FROM", 1000)
    paths = write(tmp_path / "in", "jsonl", texts_of(6, 300))
    data = DataSection(source="jsonl", files=(str(tmp_path / "in"),), cache=str(tmp_path / "kept"), length=16)
    written = load_windows(data)
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    opened = load_windows(data)
    monkeypatch.undo()
    plain = load_windows(DataSection(source="jsonl", files=tuple(map(str, paths)), cache="", length=16))
    for mine, again, memory in zip(written, opened, plain, strict=True):
        assert mine.digest == again.digest == memory.digest
        assert mine[3]["tokens"].tolist() == memory[3]["tokens"].tolist()
    assert not (tmp_path / "small").exists()
    load_windows(DataSection(source="jsonl", files=tuple(map(str, paths)), cache=str(tmp_path / "small"), length=16))
    assert not (tmp_path / "small").exists()  # little text is not kept


@pytest.mark.parametrize("whole", [0, 1 << 25])
def test_a_digest_does_not_tell_where_the_tokens_lie(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(windows_module, "HASHED_WHOLE", whole)
    paths = write(tmp_path / "in", "jsonl", texts_of(10, 90))
    plan, encoder = plan_of(paths, "jsonl"), TextEncoder(ByteTokenizer())
    build_store(tmp_path / "store", plan, encoder)
    found = open_store(tmp_path / "store", plan, encoder)
    assert found is not None
    stream, memory = found[0], in_memory(plan)[0]
    digest = Windows(stream, 8).digest
    assert digest == Windows(memory, 8).digest
    bare = Stream(
        [memory.read(0, len(memory))],
        memory.edges,
        vocabulary=257,
        end=256,
        tokenizer=memory.tokenizer,
        users=memory.users,
    )
    assert digest == Windows(bare, 8).digest  # hashes that are computed
    other = memory.read(0, len(memory))
    other[5] ^= 1
    changed = Stream([other], memory.edges, vocabulary=257, end=256, tokenizer=memory.tokenizer, users=memory.users)
    assert digest not in (Windows(changed, 8).digest, Windows(stream, 9).digest)


def test_the_command_writes_the_tokens_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", "jsonl", texts_of(7, 300))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\nsource = "jsonl"\nfiles = ["{tmp_path}/in/*.jsonl"]\ncache = "{tmp_path}/kept"\nlength = 16\n'
        f'[run]\nfolder = "{tmp_path}/run"\ndevice = "cpu"\n'
    )
    assert main(["cache", str(config), "--tokens"]) == 0
    (folder,) = (tmp_path / "kept").iterdir()
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: ") and " documents, " in out and " tokens; " in out
    documents = read_documents(
        DataSection(source="jsonl", files=(f"{tmp_path}/in/*.jsonl",), cache=f"{tmp_path}/kept"),
        load_tokenizer("bytes"),
    )
    assert documents.train.documents + documents.validation.documents == int(
        out.split(": ")[1].split()[0].replace(",", "")
    )
    assert main(["cache", str(config), "--tokens", "data.cache="]) == 2
    assert "data.cache: is empty; expected a folder" in capsys.readouterr().err


def test_patterns_stand_for_what_they_match(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("deep/a.jsonl", "deep/er/b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    data = DataSection(source="jsonl", files=(f"{tmp_path}/**/*.jsonl",), validation_files=(str(tmp_path / "c.jsonl"),))
    with pytest.raises(GramianError, match="c.jsonl is in data.files too"):
        read_documents(data, ByteTokenizer())
    with pytest.raises(GramianError, match=r"data.files: .*\*.parquet matches nothing; expected"):
        read_documents(DataSection(source="jsonl", files=(f"{tmp_path}/*.parquet",)), ByteTokenizer())


@pytest.mark.parametrize("source", ["parquet", "arrow"])
def test_tables_that_cannot_be_read_are_one_line(tmp_path: Path, source: str) -> None:
    (path,) = write(tmp_path / "in", source, ["a", "b"], files=1)
    with pytest.raises(GramianError, match=f'{path}: has no "body" but text, who, more; expected the columns'):
        read_documents(DataSection(source=source, files=(str(path),), field="body"), ByteTokenizer())  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:-9] if source == "parquet" else b"no table")
    kind = source.capitalize()
    with pytest.raises(GramianError, match=f"{path}: is not a complete {kind} file"):
        read_documents(DataSection(source=source, files=(str(path),)), ByteTokenizer())  # type: ignore[arg-type]


def test_a_worker_that_dies_is_one_line(tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(write(tmp_path / "in", "jsonl", texts_of(8, 100)), "jsonl")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        GramianError,
        match=r"data.cache: a process that tokenises died \(exit 1\); what it said stands above; expected enough",
    ):
        build_store(tmp_path / "store", plan, TextEncoder(ByteTokenizer()), processes=2)
    assert np.all([p.name in ("plan.json", ".lock") for p in (tmp_path / "store").iterdir()])


def test_a_file_of_tokens_that_lost_whole_blocks_is_one_line(tmp_path: Path) -> None:
    plan, folder = damaged_store(tmp_path)
    os.truncate(folder / "00000.tokens", BLOCK)
    with pytest.raises(GramianError, match=r"00000\.tokens: has 1,048,576 bytes; expected 2,000,020 tokens"):
        open_store(folder, plan, TextEncoder(ByteTokenizer()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_changes_while_it_is_tokenised_is_refused(tmp_path: Path, small_pieces: None, when: str) -> None:
    paths = write(tmp_path / "in", "jsonl", texts_of(9, 300))
    plan, told_of = plan_of(paths, "jsonl"), []

    def change(done: int, size: int) -> None:
        told_of.append(done)
        if len(told_of) == (2 if when == "before" else len(plan.pieces) + 1):
            with paths[-1 if when == "before" else 0].open("a") as file:
                file.write(json.dumps({"text": "more", "who": "a"}) + "\n")

    with pytest.raises(GramianError, match="jsonl: changed while it was tokenised; expected a file that stays"):
        build_store(tmp_path / "store", plan, TextEncoder(ByteTokenizer()), change)
    assert open_store(tmp_path / "store", plan, TextEncoder(ByteTokenizer())) is None


class Losing(ByteTokenizer):
    """Loses the letter z."""

    def encode(self, text: Any) -> Any:
        return super().encode(text.replace(b"z", b""))


def test_bytes_of_text_are_known_in_memory_as_in_a_store(tmp_path: Path, small_pieces: None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * 900 + "z" * (number > 150)}) + "\n" for number in range(200)))
    data = DataSection(source="jsonl", files=(str(path),), cache="")
    encoder = TextEncoder(Losing())
    plan = plan_of([path], "jsonl", "")
    build_store(tmp_path / "store", plan, encoder)
    found = open_store(tmp_path / "store", plan, encoder)
    assert found is not None and found[0].text_bytes is None
    assert read_stream(data, [str(path)], Losing()).text_bytes is None


def test_a_user_that_is_the_text_is_another_store(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "jsonl", ["a", "b"], files=1)[0]
    assert plan_of([path], "jsonl", "text").key != plan_of([path], "jsonl", "").key


def test_brackets_of_a_folder_are_its_name(tmp_path: Path) -> None:
    for name in ("x[1]", "x1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("".join(json.dumps({"text": f"{name} {k}"}) + "\n" for k in range(40)))
    data = DataSection(source="jsonl", files=(f"{tmp_path}/x[1]/*.jsonl",), cache="", length=4)
    stream = load_windows(data)[0].stream
    assert ByteTokenizer().decode(stream.read(0, 4)) == "x[1]"
