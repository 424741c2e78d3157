"""U [n, r] whose rows lie on several processes: features of all tokens on each, `Exchange.features(n)`.

K = UᵀU = Σ_p U_pᵀU_p is one all-reduce of [r, r], and so is all that follows from it: eigenvalues, traces, log det. Products
take a Y and give a result that are whole and the same on all processes, or (`local`) this process's rows of both.

| | FLOPs here | all-reduce | all-gather |
|---|---|---|---|
| `transposed_times` | 2·n/W·r·k | r·k | |
| `times` | 2·n/W·r·k | | n·k, `local`: nothing |
| `gram` | 2·n/W·r² | r² float64 | |
| `square` | 2·n/W·r | 1 | |
| storing in half precision | | r (the largest entries), 2 | |

All processes do the same with it in the same order, and keep it on the same kind of device.
"""

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import Stored, store_columns
from gramian.parallel.exchange import Exchange


class ShardedColumns(Columns):
    """This process's rows of U, and the products of all of U. `nbytes` counts what is here."""

    others: Exchange

    def __init__(self, stored: Stored, n: int, others: Exchange) -> None:
        """Keep rows; nothing is sent.

        Args:
            stored: rows `others.features(n)[others.rank]` of U.
            n: rows of all of U.
            others: the processes.
        """
        super().__init__(stored)
        self._dim, self.others = n, others

    @classmethod
    def of(cls, part_nR: Tensor, n: int, others: Exchange, storage: torch.dtype | None = None) -> "ShardedColumns":
        """Store rows, with the scales that all of U would have.

        Args:
            part_nR: rows `others.features(n)[others.rank]` of U.
            n: rows of all of U.
            others: the processes.
            storage: dtype at rest; None: its own.
        """
        return cls(store_columns(part_nR, storage or part_nR.dtype, others), n, others)

    @classmethod
    def cut(cls, columns: Columns, others: Exchange) -> "ShardedColumns":
        """This process's rows of columns that every process holds. Nothing is sent, nothing rounded."""
        whole = columns.stored
        body = whole.body[others.features(columns.dim)[others.rank]].clone()
        return cls(Stored(body, None, whole.right, whole.relative_error), columns.dim, others)

    def local(self) -> "LocalRows":
        """The same U for a Y that is this process's rows, with results that are; the Gram is summed anew."""
        return LocalRows(self.stored, self._dim, self.others)

    @property
    def dim(self) -> int:
        """n, of all processes."""
        return self._dim

    @property
    def part(self) -> slice:
        """The rows that lie here."""
        return self.others.features(self._dim)[self.others.rank]

    def whole(self) -> Columns:
        """All rows, on every process. One all-gather of n·r entries as they are stored."""
        body = self.others.gather_features(self.stored.body, self._dim)
        return Columns(Stored(body, None, self.stored.right, self.stored.relative_error))

    def alike(self, columns: Columns) -> Columns:
        """Cut as these are."""
        return columns if isinstance(columns, ShardedColumns) else self.cut(columns, self.others)

    def _with(self, stored: Stored) -> Columns:
        return type(self)(stored, self._dim, self.others)

    def _rows(self, y: Tensor) -> Tensor:
        _expect(y, self._dim)
        return y[self.part]

    def _added(self, part: Tensor) -> Tensor:
        return self.others.sum(part)

    def _given(self, rows: Tensor) -> Tensor:
        return self.others.gather_features(rows, self._dim)


class LocalRows(ShardedColumns):
    """Sharded columns for callers whose tensors are sharded alike: no [n, k] is ever whole. A `LowRank` may stand on them."""

    def _rows(self, y: Tensor) -> Tensor:
        _expect(y, len(self.stored.body))
        return y

    def _given(self, rows: Tensor) -> Tensor:
        return rows


def _expect(y: Tensor, rows: int) -> None:
    if len(y) != rows:
        raise GramianError(f"y: {len(y)} rows; expected {rows}")
