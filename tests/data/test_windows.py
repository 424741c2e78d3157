"""Windows: the vectorised cut against a loop over tokens, for streams in memory, in files and in pieces."""

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.data.token_stream import Stream, content_hash
from gramian.data.windows import NOT_COUNTED, Windows
from tests.kit.matrix import examples

END = 9
Item = dict[str, list[int]]

contents = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=12)
lengths = st.integers(1, 7)
ways = st.sampled_from([(True, False), (True, True), (False, False)])


def stream_of(documents: list[list[int]], **told: object) -> Stream:
    """Each document, which may be empty, followed by END."""
    flat = [token for document in documents for token in [*document, END]]
    edges = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return Stream([np.array(flat, dtype=np.uint16)], edges, vocabulary=10, end=END, **told)  # type: ignore[arg-type]


def cut(documents: list[list[int]], length: int, pack: bool, isolate: bool, prompt: int = 0) -> list[Item]:
    """The windows, token by token; the first `prompt` tokens of a document are no targets."""
    numbered = [
        (token, at, k >= prompt) for at, document in enumerate(documents) for k, token in enumerate([*document, END])
    ]
    pieces = [numbered] if pack else [[entry for entry in numbered if entry[1] == at] for at in range(len(documents))]
    windows: list[Item] = []
    for piece in pieces:
        for begin in range(0, len(piece), length):
            window: Item = {"tokens": [], "targets": [], "documents": []}
            for place in range(begin, begin + length):
                here = piece[place] if place < len(piece) else (END, len(documents), True)
                after = piece[place + 1] if place + 1 < len(piece) else None
                counted = after is not None and after[2] and not (isolate and after[1] != here[1])
                window["tokens"].append(here[0])
                window["targets"].append(after[0] if counted and after is not None else NOT_COUNTED)
                window["documents"].append(here[1] - piece[begin][1])
            # Padding is one more document, however many the stream has.
            seen = sorted(set(window["documents"]))
            window["documents"] = [seen.index(document) for document in window["documents"]]
            if set(window["targets"]) != {NOT_COUNTED}:
                windows.append(window if isolate else {name: window[name] for name in ("tokens", "targets")})
    return windows


def told(windows: Windows) -> list[Item]:
    return [{name: values.tolist() for name, values in windows[index].items()} for index in range(len(windows))]


@settings(max_examples=examples(200))
@given(contents, lengths, ways, st.integers(0, 3))
def test_windows_are_those_of_the_loop(
    documents: list[list[int]], length: int, way: tuple[bool, bool], prompt: int
) -> None:
    expected = cut(documents, length, *way, prompt)
    flat = [k >= prompt for document in documents for k in range(len(document) + 1)]
    stream = stream_of(documents, counted=[np.array(flat, dtype=np.uint8)] if prompt else None)
    if not expected:
        with pytest.raises(GramianError, match="make no window; expected a document"):
            Windows(stream, length, pack=way[0], isolate=way[1])
        return
    windows = Windows(stream, length, pack=way[0], isolate=way[1])
    assert told(windows) == expected
    ragged = [sum(target != NOT_COUNTED for target in window["targets"]) for window in expected]
    assert windows.counts.dtype == np.int64
    assert windows.counts.tolist() == ragged


@settings(max_examples=examples(100))
@given(contents, lengths, ways, st.data())
def test_a_selection_in_pieces_is_the_stream_of_its_documents(
    documents: list[list[int]], length: int, way: tuple[bool, bool], data: st.DataObject
) -> None:
    """Documents over several arrays, some of them taken: as if those alone had been written end to end."""
    border = data.draw(st.integers(0, len(documents)))
    kept = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    parts = [part for part in (documents[:border], documents[border:]) if part]
    arrays = [np.array([token for document in part for token in [*document, END]], dtype=np.int32) for part in parts]
    whole = Stream(arrays, stream_of(documents).edges, vocabulary=10, end=END)
    chosen = [document for document, keep in zip(documents, kept, strict=True) if keep]
    if not cut(chosen, length, *way):
        return
    selected, alone = whole.select(np.array(kept)), stream_of(chosen)
    assert told(Windows(selected, length, pack=way[0], isolate=way[1])) == cut(chosen, length, *way)
    assert np.concatenate([*selected.chunks()]).tolist() == alone.read(0, len(alone)).tolist()
    assert selected.document_hashes().tolist() == alone.document_hashes().tolist()
    # A part of a part.
    again = selected.select(np.arange(selected.documents) % 2 == 0)
    assert again.read(0, len(again)).tolist() == [token for document in chosen[::2] for token in [*document, END]]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 1000])
def test_hashes_do_not_depend_on_what_is_read_together(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("gramian.data.token_stream.CHUNK", chunk)
    documents = [[1, 2, 3], [], [4], [1, 2, 3], [5, 6, 7, 8, 1, 2], [4, 4]]
    hashes = stream_of(documents).document_hashes().tolist()
    assert hashes == [content_hash(np.array(document, dtype="<u4").tobytes()) for document in documents]
    assert len(set(hashes)) == 5
    endless = Stream([np.array([1, 2, 3])], np.array([0, 3]), vocabulary=10, end=END)
    assert endless.document_hashes().tolist() == hashes[:1]


def test_a_stream_of_no_documents_is_refused() -> None:
    with pytest.raises(GramianError, match="^data.files: 0 tokens in 0 documents make no window"):
        Windows(stream_of([[1]]).select(np.array([False])), 4)


@pytest.mark.parametrize(("pack", "isolate"), [(True, False), (True, True), (False, False)])
def test_no_token_is_predicted_twice_and_none_is_forgotten(pack: bool, isolate: bool) -> None:
    """Tokens that all differ: what is predicted is every token but the first, of the stream or of each document."""
    sizes = [1, 5, 13, 2, 30]
    edges = np.cumsum([0, *sizes])
    stream = Stream([np.arange(edges[-1])], edges, vocabulary=1000, end=999)
    windows = Windows(stream, 4, pack=pack, isolate=isolate)
    targets = [target for index in range(len(windows)) for target in windows[index]["targets"].tolist()]
    predicted = sorted(target for target in targets if target != NOT_COUNTED)
    firsts = {0} if pack and not isolate else set(edges.tolist())
    assert predicted == [token for token in range(51) if token not in firsts]


def test_windows_over_a_file_read_only_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(50, dtype="<u2"))
    ids = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    mapped = Windows(Stream([ids], np.array([0, 20, 50]), vocabulary=50, end=49), 8, isolate=True)
    copied = Windows(Stream([np.arange(50)], np.array([0, 20, 50]), vocabulary=50, end=49), 8, isolate=True)
    assert told(mapped) == told(copied)
    assert mapped.digest == copied.digest


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_windows_travel_to_a_worker_by_name(tmp_path: Path, kind: str) -> None:
    ids: np.ndarray = np.arange(1_000_000, dtype=np.uint16)
    if kind == "file":
        np.save(tmp_path / "tokens.npy", ids)
        ids = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    windows = Windows(Stream([ids], np.array([0, len(ids)]), vocabulary=2**16, end=0), 1000)
    messages = [ForkingPickler.dumps(windows) for _ in range(2)]
    assert max(map(len, messages)) < 20_000
    for message in messages:
        arrived: Windows = pickle.loads(message)
        assert torch.equal(arrived[3]["tokens"], windows[3]["tokens"])
        array = arrived.stream._arrays[0].array
        if kind == "file":
            assert isinstance(array, np.memmap)
            assert str(array.filename) == str(tmp_path / "tokens.npy")
        else:  # the same memory, not a copy of it
            windows.stream._arrays[0].array[3000] += 1
            assert arrived[3]["tokens"][0] == windows[3]["tokens"][0]


def test_digest_sees_whatever_changes_a_window() -> None:
    documents = [[1, 2, 3], [4, 5]]
    digests = {
        Windows(stream_of(documents), 2).digest,
        Windows(stream_of(documents), 3).digest,
        Windows(stream_of(documents), 2, pack=False).digest,
        Windows(stream_of(documents), 2, isolate=True).digest,
        Windows(stream_of([[1, 2, 4], [4, 5]]), 2).digest,
        Windows(stream_of([[1, 2, 3, END, 4, 5]]), 2, isolate=True).digest,
        Windows(stream_of(documents, tokenizer="other"), 2).digest,
    }
    assert len(digests) == 7
    assert Windows(stream_of(documents), 2).digest in digests


def test_items_are_tensors_and_end_where_the_windows_do() -> None:
    windows = Windows(stream_of([[1, 2, 3], [4]]), 2, isolate=True)
    assert windows.vocabulary == 10
    for item in (windows[0], windows.stack(np.array([1, 0]))):
        assert {name: values.dtype for name, values in item.items()} == dict.fromkeys(item, torch.int64)
        assert all(values.is_contiguous() for values in item.values())
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


@pytest.mark.parametrize(
    ("told", "field"), [({"length": 0}, "data.length"), ({"length": 2, "pack": False, "isolate": True}, "data.isolate")]
)
def test_options_that_cannot_be_are_refused_by_name(told: dict[str, int], field: str) -> None:
    with pytest.raises(GramianError, match=f"^{field}: expected"):
        Windows(stream_of([[1, 2]]), **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [2, 3, 9, 10, 11, 40, 41, 47])
@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_windows_with_a_stride_begin_every_so_many_tokens_and_reach_the_end(tokens: int, stride: int) -> None:
    stream = Stream([np.arange(tokens)], np.array([0, tokens]), vocabulary=tokens, end=0)
    windows = Windows(stream, 8, stride=stride)
    rows = windows.stack(np.arange(len(windows)))
    begins = rows["tokens"][:, 0].tolist()
    assert begins == list(range(0, len(windows) * stride, stride))
    assert set(rows["targets"].flatten().tolist()) - {-100} == set(range(1, tokens))
    assert (rows["targets"] != -100).sum(1).tolist() == windows.counts.tolist()
    # All but the last are full, and one more would add nothing.
    assert windows.counts[:-1].tolist() == [8] * (len(windows) - 1)
    assert begins[-1] + 8 >= tokens - 1
    assert (windows.digest == Windows(stream, 8).digest) == (stride == 8)
