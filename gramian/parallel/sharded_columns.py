"""A matrix U [n, r] whose rows are sharded over processes: rank p stores the rows `Exchange.features(n)[p]`.

K = UᵀU = Σ_p U_pᵀU_p is one all-reduce of [r, r]; eigenvalues, traces and log det follow from it. Products take a full Y and
return a full result, the same on all processes; those of `local()` take and return only this process's rows of Y and result.

With W processes and k columns of Y, where the last two columns are numbers of entries:

| | FLOPs per process | all-reduce | all-gather |
|---|---|---|---|
| `transposed_times` | 2·n/W·r·k | r·k | |
| `times` | 2·n/W·r·k | | n·k; nothing for `local()` |
| `gram` | 2·n/W·r² | r² float64 | |
| `square` | 2·n/W·r | 1 | |
| storing in half precision | | r (largest entry of each column), and 2 (norms) | |

All processes must call the same methods in the same order, and store U on the same type of device.
"""

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import Stored, store_columns
from gramian.parallel.exchange import Exchange


class ShardedColumns(Columns):
    """This process's rows of a matrix U [n, r], with products that use the rows of all processes; most methods are collectives.

    `nbytes` counts the bytes on this process only.
    """

    others: Exchange

    def __init__(self, stored: Stored, n: int, exchange: Exchange) -> None:
        """Reference this process's stored rows of U; nothing is sent.

        Args:
            stored: rows `exchange.features(n)[exchange.rank]` of U.
            n: number of rows of U over all processes.
            exchange: the processes among which the rows are sharded.
        """
        super().__init__(stored)
        self._dim, self.others = n, exchange

    @classmethod
    def of(cls, part_nR: Tensor, n: int, exchange: Exchange, storage: torch.dtype | None = None) -> "ShardedColumns":
        """Store this process's rows of U [n, r]; in half precision with the column scales of all rows. Collective.

        Args:
            part_nR: rows `exchange.features(n)[exchange.rank]` of U.
            n: number of rows of U over all processes.
            exchange: the processes among which the rows are sharded.
            storage: dtype in which the rows are stored; None: that of `part_nR`.
        """
        return cls(store_columns(part_nR, storage or part_nR.dtype, exchange), n, exchange)

    @classmethod
    def cut(cls, columns: Columns, exchange: Exchange) -> "ShardedColumns":
        """Shard `columns`, a matrix [n, r] that every process has in full: this process's rows. Nothing is sent or rounded."""
        full = columns.stored
        body = full.body[exchange.features(columns.dim)[exchange.rank]].clone()
        return cls(Stored(body, None, full.right, full.relative_error), columns.dim, exchange)

    def local(self) -> "LocalRows":
        """The same matrix as `LocalRows`: products take and return only this process's rows. A cached UᵀU is not passed on."""
        return LocalRows(self.stored, self._dim, self.others)

    @property
    def dim(self) -> int:
        """Number of rows n of the matrix, over all processes."""
        return self._dim

    @property
    def part(self) -> slice:
        """Slice of the n rows that this process stores."""
        return self.others.features(self._dim)[self.others.rank]

    def whole(self) -> Columns:
        """The matrix with all rows, on every process. One all-gather of n·r entries in their stored dtype."""
        body = self.others.gather_features(self.stored.body, self._dim)
        return Columns(Stored(body, None, self.stored.right, self.stored.relative_error))

    def alike(self, columns: Columns) -> Columns:
        """`columns`, a matrix with as many rows, sharded over the same processes as this one."""
        return columns if isinstance(columns, ShardedColumns) else self.cut(columns, self.others)

    def _with(self, stored: Stored) -> Columns:
        return type(self)(stored, self._dim, self.others)

    def _rows(self, y: Tensor) -> Tensor:
        _check_rows(y, self._dim)
        return y[self.part]

    def _added(self, part: Tensor) -> Tensor:
        return self.others.sum(part)

    def _given(self, rows: Tensor) -> Tensor:
        return self.others.gather_features(rows, self._dim)


class LocalRows(ShardedColumns):
    """A sharded matrix whose products take and return only this process's rows, so that no process stores a full [n, k]."""

    def _rows(self, y: Tensor) -> Tensor:
        _check_rows(y, len(self.stored.body))
        return y

    def _given(self, rows: Tensor) -> Tensor:
        return rows


def _check_rows(y: Tensor, rows: int) -> None:
    if len(y) != rows:
        raise GramianError(f"y: {len(y)} rows; expected {rows}")
