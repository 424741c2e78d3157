"""Windows of documents in packed rows: every target once, beside its own document alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramian.data.document_rows import NO_UNIT, DocumentWindows, PackedRows
from gramian.data.tokenizer import ByteTokenizer
from gramian.data.windows import NOT_COUNTED, Windows
from tests.data.test_windows import END, stream_of

contents = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=12)


@given(contents, st.integers(1, 7), st.data())
def test_rows_have_the_windows_of_each_document_and_nothing_else(
    documents: list[list[int]], length: int, data: st.DataObject
) -> None:
    windows = DocumentWindows(Windows(stream_of(documents), length))
    chosen = data.draw(st.sets(st.integers(0, len(windows) - 1), min_size=1))
    rows = PackedRows(length, END)([windows[i] for i in sorted(chosen)])
    shapes = {tuple(t.shape) for t in rows.values()}
    assert len(shapes) == 1 and shapes.pop()[1] == length
    found = []
    for row in zip(*(rows[name].tolist() for name in ("tokens", "targets", "documents", "units")), strict=True):
        columns = list(zip(*row, strict=True))
        for number in dict.fromkeys(column[2] for column in columns):
            part = [column for column in columns if column[2] == number]
            if part[0][3] == NO_UNIT:
                assert {(token, target) for token, target, _, _ in part} == {(END, NOT_COUNTED)}
            else:
                assert len({unit for *_, unit in part}) == 1
                found.append((part[0][3], [token for token, *_ in part], [target for _, target, *_ in part]))
    want = []
    for i in chosen:
        document = [*documents[windows.documents[i]], END]
        at = length * sum(int(other) == int(windows.documents[i]) for other in windows.documents[:i])
        inputs, targets = document[at : at + length], document[at + 1 : at + 1 + length]
        want.append((int(windows.documents[i]), inputs[: len(targets)], targets))
    assert sorted(found) == sorted(want)
    total, rows_needed = sum(len(tokens) for _, tokens, _ in want), rows["tokens"].shape[0]
    assert rows_needed <= 11 / 9 * -(-total // length) + 1 or rows_needed <= 2 * -(-total // length)


def test_packing_recovers_the_waste_of_padding() -> None:
    torch.manual_seed(0)
    documents = [[1] * int(n) for n in torch.randint(1, 60, (200,))]
    windows = DocumentWindows(Windows(stream_of(documents), 64))
    items = [windows[i] for i in range(len(windows))]
    rows = PackedRows(64, END)(items)
    counted = int((rows["targets"] != NOT_COUNTED).sum())
    assert counted == sum(len(document) for document in documents)
    assert counted / (64 * len(items)) < 0.5 and counted / rows["targets"].numel() > 0.95


def test_the_first_window_of_each_document_and_user() -> None:
    stream = stream_of([[1] * 9, [], [2] * 3, [3] * 7])
    windows = Windows(stream, 4, pack=False)
    firsts = DocumentWindows(windows).first_of_units()
    assert windows.pieces(torch.arange(len(windows)).numpy()).tolist() == [0, 0, 0, 2, 3, 3]
    assert [firsts[i]["tokens"].tolist() for i in range(len(firsts))] == [[1] * 4, [2, 2, 2, END], [3] * 4]
    assert firsts.counts.tolist() == [4, 3, 4] and len(windows) == 6
    stream.users = np.array([5, 0, 2, 5])
    of_users = DocumentWindows(windows, by_user=True)
    assert of_users.units.tolist() == [5, 5, 5, 2, 5, 5] and int(of_users[3]["unit"]) == 2
    assert [of_users.first_of_units()[i]["tokens"].tolist() for i in range(2)] == [[2, 2, 2, END], [1] * 4]


def test_users_go_with_their_documents() -> None:
    stream = stream_of([[1] * 3, [2] * 5, [3] * 2])
    stream.users = np.array([4, 7, 4])
    parts = (stream.select(np.array([False, True, True])), *stream.split(6, ByteTokenizer()))
    assert [np.asarray(part.users).tolist() for part in parts] == [[7, 4], [4, 7], [7, 4]]
