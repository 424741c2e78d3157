"""Windows of single documents, and rows into which they are packed without seeing each other, for units of privacy.

Shape suffixes:
    N  windows of a batch
    R  rows
    T  tokens of a row, `length`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gramian.data.windows import NOT_COUNTED, Windows

Int64s = npt.NDArray[np.int64]
NO_UNIT = -1
"""Unit of a token that pads a row."""


class DocumentWindows(Dataset[dict[str, Tensor]]):
    """The windows of a stream, each of one document, without padding, and the number of its document.

    An item has int64 "tokens" and "targets" [n], n ≤ `length`, and "unit", the document or its user.

    Example:
        >>> rows = DocumentWindows(windows)
        >>> PackedRows(rows.windows.length, rows.windows.stream.end)([rows[0], rows[1]])["units"].shape
        torch.Size([1, 128])
    """

    def __init__(self, windows: Windows, by_user: bool = False) -> None:
        """Cut the documents of `windows` again, each by itself, into windows of the same length.

        `by_user`: the unit of a window is its document's user, which the stream must know.
        """
        self.windows, self._by_user = (
            Windows(windows.stream, windows.length, pack=False, truncate=windows.truncate),
            by_user,
        )

    @cached_property
    def documents(self) -> Int64s:
        """The document of each window, int64 [windows]."""
        return self.windows.pieces(np.arange(len(self.windows)))

    @cached_property
    def units(self) -> Int64s:
        """The unit of each window, int64 [windows]: its document, or its user."""
        if not self._by_user:
            return self.documents
        assert self.windows.stream.users is not None  # `check_data` requires records with users
        found: Int64s = self.windows.stream.users[self.documents]
        return found

    def first_of_units(self) -> Windows:
        """The first window of every unit, padded, as windows of their own."""
        return self.windows.only(np.unique(self.units, return_index=True)[1])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window, without the padding behind its last target."""
        row, length = self.windows[index], int(self.windows.counted(np.array([index]))[0])
        return {name: t[:length] for name, t in row.items()} | {"unit": torch.tensor(int(self.units[index]))}


@dataclass(frozen=True)
class PackedRows:
    """Packs windows of different lengths into rows of `length` tokens: a `collate_fn` of a DataLoader.

    Longest first, each into the first row that has room: at most 11/9 of the least number of rows, and 1 more. Cost: O(N·R).
    """

    length: int
    end: int
    """Token that pads a row."""

    def __call__(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pack items of `DocumentWindows`.

        Returns:
            int64 [R, T]: "tokens"; "targets", −100 in padding; "documents", the number of each token's window in its row, by
            which a model hides windows from each other; "units", the unit of each token, −1 in padding.
        """
        rows: list[list[dict[str, Tensor]]] = []
        room: list[int] = []
        for item in sorted(items, key=lambda item: -len(item["tokens"])):
            size = len(item["tokens"])
            row = next((row for row, free in enumerate(room) if free >= size), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(self.length)
            rows[row].append(item)
            room[row] -= size
        shape = (len(rows), self.length)
        found = {
            "tokens": torch.full(shape, self.end),
            "targets": torch.full(shape, NOT_COUNTED),
            "documents": torch.zeros(shape, dtype=torch.int64),
            "units": torch.full(shape, NO_UNIT),
        }
        for number, row_items in enumerate(rows):
            at = 0
            for place, item in enumerate(row_items):
                stop = at + len(item["tokens"])
                found["tokens"][number, at:stop] = item["tokens"]
                found["targets"][number, at:stop] = item["targets"]
                found["documents"][number, at:stop] = place
                found["units"][number, at:stop] = item["unit"]
                at = stop
            found["documents"][number, at:] = len(row_items)
        return found
