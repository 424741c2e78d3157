r"""Bytes that K-FAC sends over W processes, from shapes alone: exactly the bytes that `Exchange.sent` counts.

Legend: W processes; T tokens of all, T_r of process r; N width of a side (bias included), n_r ≈ N/W features of it on process
r; k columns of a gradient; s bytes of an entry of a row (2 for bfloat16 activations), S of a sum (4, or 8 in float64), v of a
gradient (4 or 8). A process sends ring(B) = ⌊2·B·(W−1)/W⌋ bytes in an all-reduce of B bytes.

| one side | "gram" | "gather" | "dense" |
|---|---|---|---|
| refresh: rows or sums | s·T_r·(N − n_r), all-to-all | s·T_r·N·(W−1), all-gather | ring(S·N²), all-reduce |
| refresh: storing in half precision | ring(8·T) + ring(16) | – | – |
| refresh: its trace | ring(8) | – | – |
| first use: the Gram matrix | ring(8·T²) | – | – |
| first use: its factorisation, sent by the process that computes it | (W−1)·v·T², broadcast | (W−1)·v·T² | (W−1)·v·N² |
| every use with k columns | ring(v·T·k) + v·k·⌈N/W⌉·(W−1), all-gather | – | – |
| stored, h bytes an entry | h·T·n_r | h·T·N | h·N² |

A use with a gradient whose rows stay sharded (`local`) has no all-gather. The natural gradient of a weight [o, m] uses its
output side with k = m columns and its input side with k = o.

Break-even points of two reductions, with evenly distributed tokens (T_r = T/W) and without factorisations, which cost each
process v·n²·(W−1)/W, the same for "gram" and "gather" and most for "dense". All terms below have a factor (W−1)/W:

- gather = dense: s·T·N = 2·S·N², so T = 2·N·S/s, for any W.
- gram = dense, refresh alone: s·T·N/W = 2·S·N², so T = 2·W·N·S/s.
- gram = dense, with the Gram matrix: s·T·N/W + 16·T² = 2·S·N², so T = N·(√((s/W)² + 128·S) − s/W)/32, towards N·√(S/8).
- gram = gather, with the Gram matrix: s·T·N/W + 16·T² = s·T·N, so T = s·N·(1 − 1/W)/16.
- Every use adds v·k·(2·T + N) to "gram" alone, so its saving on rows is used up after a number of uses (`uses_until`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gramian.linalg import WIDEST_DENSE

Sent = Mapping[str, int]
"""{kind of collective: bytes that a process sends}, with the names of `Exchange.sent`."""
GRAM_BYTES = 8
"""Bytes of an entry of UᵀU, of a column's scale and of a trace, which are sent in float64."""


@dataclass(frozen=True)
class TrafficSide:
    """One side of a block on several processes.

    ```python
    side = TrafficSide.even(width=4096, tokens=8192, ranks=8)
    side.join("gram"), side.gram("gram")  # {"all_to_all": …}, {"all_reduce": …}
    ```
    """

    width: int
    """N."""
    tokens: tuple[int, ...]
    """T_r of every process; of a subset its kept tokens."""
    row_bytes: int = 2
    """s."""
    sum_bytes: int = 4
    """S."""

    @classmethod
    def even(cls, width: int, tokens: int, ranks: int, row_bytes: int = 2, sum_bytes: int = 4) -> TrafficSide:
        """A side whose tokens are distributed over the ranks as evenly as possible, ranks with one more first."""
        each, more = divmod(tokens, ranks)
        return cls(width, (each + 1,) * more + (each,) * (ranks - more), row_bytes, sum_bytes)

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.tokens)

    @property
    def total(self) -> int:
        """T."""
        return sum(self.tokens)

    def features(self, rank: int) -> int:
        """n_r: as even as possible, ranks with one more first."""
        each, more = divmod(self.width, self.ranks)
        return each + (rank < more)

    def taken(self, option: str, low_rank_up_to: int) -> str:
        """How processes join the side under the option: "dense" above `representation.low_rank_up_to` tokens."""
        if self.total > low_rank_up_to:
            return "dense"
        return "gather" if option == "dense" and self.width > WIDEST_DENSE else option

    # ---- bytes that a process sends --------------------------------------------------------------------------------

    def join(self, reduction: str, rank: int = 0) -> Sent:
        """Bytes of the rows or sums of a refresh."""
        own = self.tokens[rank]
        if reduction == "gram":
            return _sent(all_to_all=self.row_bytes * own * (self.width - self.features(rank)))
        if reduction == "gather":
            return _sent(all_gather=self.row_bytes * own * self.width * (self.ranks - 1))
        return _sent(all_reduce=self._ring(self.sum_bytes * self.width**2))

    def settle(self, reduction: str, half: bool = True) -> Sent:
        """Other bytes of a refresh: the scales and the error of half precision, and the trace."""
        if reduction != "gram":
            return {}
        scales = self._ring(GRAM_BYTES * self.total) + self._ring(2 * GRAM_BYTES)
        return _sent(all_reduce=scales * half + self._ring(GRAM_BYTES))

    def gram(self, reduction: str) -> Sent:
        """Bytes of UᵀU at the first use."""
        return _sent(all_reduce=self._ring(GRAM_BYTES * self.total**2)) if reduction == "gram" else {}

    def factorisation(self, reduction: str, value_bytes: int = 4) -> Sent:
        """Bytes of a Cholesky factor at the first use, sent by the process that computes it."""
        side = self.width if reduction == "dense" else self.total
        return _sent(broadcast=(self.ranks - 1) * value_bytes * side**2)

    def use(self, reduction: str, columns: int, value_bytes: int = 4, local: bool = False) -> Sent:
        """Bytes of a power of the damped side times [N, k]; `local`: operand and result stay sharded by rows."""
        if reduction != "gram":
            return {}
        rows = 0 if local else value_bytes * columns * -(-self.width // self.ranks) * (self.ranks - 1)
        return _sent(all_reduce=self._ring(value_bytes * self.total * columns), all_gather=rows)

    def stored(self, reduction: str, rank: int = 0, storage_bytes: int = 2) -> int:
        """Bytes of the stored factor on a process."""
        entries = {"gram": self.total * self.features(rank), "gather": self.total * self.width, "dense": self.width**2}
        return storage_bytes * entries[reduction]

    def _ring(self, size: int) -> int:
        return 2 * size * (self.ranks - 1) // self.ranks


def natural_gradient(
    outputs: TrafficSide, inputs: TrafficSide, reductions: tuple[str, str], value_bytes: int = 4, local: bool = False
) -> Sent:
    """Bytes of (G + λ_G)⁻¹ Y (A + λ_A)⁻¹ for Y [o, m], without the Gram matrices.

    `reductions` of G and of A; `local`: the rows of Y stay sharded, as FSDP2 shards them.
    """
    return total(
        outputs.use(reductions[0], inputs.width, value_bytes, local),
        inputs.use(reductions[1], outputs.width, value_bytes),
    )


def total(*parts: Sent) -> dict[str, int]:
    """The sum of several amounts by kind of collective."""
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


def _sent(**bytes_: int) -> Sent:
    return {kind: count for kind, count in bytes_.items() if count}


# ---- break-even points -----------------------------------------------------------------------------------------------


def gather_meets_dense(width: int, row_bytes: int = 2, sum_bytes: int = 4) -> float:
    """T below which "gather" sends less than "dense", for any W: 2·N·S/s."""
    return 2 * width * sum_bytes / row_bytes


def gram_meets_dense(
    width: int, ranks: int, row_bytes: int = 2, sum_bytes: int = 4, with_gram_matrix: bool = True
) -> float:
    """T below which "gram" sends less than "dense"; without UᵀU, which the first use sends, it is 2·W·N·S/s."""
    if not with_gram_matrix:
        return 2 * ranks * width * sum_bytes / row_bytes
    share = row_bytes / ranks
    return width * (math.sqrt(share**2 + 128 * sum_bytes) - share) / 32


def gram_meets_gather(width: int, ranks: int, row_bytes: int = 2) -> float:
    """T below which "gram", its Gram matrix counted, sends less than "gather": s·N·(1 − 1/W)/16."""
    return row_bytes * width * (1 - 1 / ranks) / 16


def uses_until(side: TrafficSide, other: str, columns: int, value_bytes: int = 4) -> float:
    """Uses of one refresh, with k columns each, after which "gram" has sent more than "gather" or "dense".

    Below 0: "gram" sends more from the start.
    """
    saved = sum(side.join(other).values()) - sum(total(side.join("gram"), side.gram("gram")).values())
    return saved / sum(side.use("gram", columns, value_bytes).values())
