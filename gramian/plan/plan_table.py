"""The table that every planner prints: a header, one line for each planned part, and notes below.

A planner describes each part as a row object with named fields and `cells()` (`PlanRow`); `PlanTable` aligns their text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class PlanRow(Protocol):
    """One line of a plan's table: a layer of the curvature, a parameter of a clipped step, a part of a GPU's memory."""

    def cells(self) -> tuple[str, ...]:
        """The texts of this line, one for each column of the table."""


@dataclass(frozen=True)
class PlanTable:
    """Text in left-aligned columns, two spaces apart; `str()` is the table.

    ```python
    print(PlanTable(("layer", "bytes"), [("fc", "8.0 KB"), ("all", "8.0 KB")], notes=["budget none"]))
    ```
    """

    columns: Sequence[str]
    rows: Sequence[PlanRow | tuple[str, ...]]
    """Lines of the table: planned parts, or tuples of texts, such as a sum."""
    notes: Sequence[str] = ()
    """Lines below the table, printed as they are."""

    def __str__(self) -> str:
        """The table as text: the header, the rows and the notes, joined by newlines."""
        lines = [self.columns, *self._texts()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        return "\n".join([*aligned, *self.notes])

    def facts(self) -> dict[str, Any]:
        """The table as a JSON object: {"columns": headings, "rows": texts of each line, "notes": lines below it}."""
        return {"columns": [*self.columns], "rows": [[*row] for row in self._texts()], "notes": [*self.notes]}

    def _texts(self) -> list[tuple[str, ...]]:
        return [row if isinstance(row, tuple) else row.cells() for row in self.rows]
