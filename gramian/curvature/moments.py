"""Σ_t w_t x_t x_tᵀ over tokens, as rows while they are few, as a matrix once they are many.

Legend: T tokens, N width of a token, w_t weights.

Keeping the rows is exact and small while T < N (the factor is then of rank T); a matrix is exact and small from there on. A
limit keeps the `limit` tokens with the smallest keys: a random subset that does not depend on how the tokens arrive.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.linalg.wide import wide, wide_dtype, wide_mm


@dataclass(frozen=True)
class Keep:
    """What a moment keeps."""

    rows_up_to: int = 0
    """Tokens up to which rows are kept; beyond, a matrix."""
    limit: int | None = None
    """Tokens of the keyed subset; None: all."""
    diagonal: bool = False
    """Only Σ w x²."""


@dataclass
class Tokens:
    """Rows of one side of one use, chosen and weighted."""

    rows_TN: Tensor
    weights_T: Tensor | None
    """w_t; None: 1."""
    keys_T: Tensor | None
    """For a keyed subset."""
    scale: float | Tensor = 1.0
    """Every row is meant times this."""
    borrowed: bool = False
    seen: int = 0
    """Tokens that these rows stand for, before any subset was taken."""
    owned: bool = False
    """True if nobody else can write to the rows' memory."""


class Products:
    """The last product of a side with itself: layers that share their input (q, k, v) share it and every sum it enters."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._rows: Tensor | None = None
        self._weights: Tensor | None = None
        self._product: tuple[Tensor, Tensor] | None = None
        self._sum: tuple[Tensor, Tensor, Tensor] | None = None

    def square(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Σ w x xᵀ [N, N] and Σ w x [N]. 2·T·N² FLOPs, none if the rows are the last ones."""
        rows = tokens.rows_TN
        if self._product is not None and not tokens.borrowed and self._same(rows, tokens.weights_T):
            return self._product
        self._rows, self._weights = (None, None) if tokens.borrowed else (rows, tokens.weights_T)
        left = rows if tokens.weights_T is None else wide(rows) * tokens.weights_T[:, None].to(wide_dtype(rows))
        self._product = (wide_mm(left.mT, rows), left.sum(0, dtype=wide_dtype(rows)))
        return self._product

    def add(self, total: Tensor, product: Tensor) -> Tensor:
        """Total + product as a new tensor, the same one for everybody who asks for the same sum."""
        if self._sum is None or self._sum[0] is not total or self._sum[1] is not product:
            self._sum = (total, product, total + product)
        return self._sum[2]

    def forget(self) -> None:
        """Let the last ones go: at the end of a pass."""
        self._rows = self._weights = self._product = self._sum = None

    def _same(self, rows: Tensor, weights: Tensor | None) -> bool:
        """True if these are the very numbers of the last call; that one's memory is held, so an address tells."""
        last = self._rows
        return (
            last is not None
            and last.data_ptr() == rows.data_ptr()
            and last.shape == rows.shape
            and last.stride() == rows.stride()
            and last.dtype == rows.dtype
            and self._weights is weights
        )


@dataclass
class Moment:
    """The running sum of one side of one block."""

    width: int
    keep: Keep
    chunks: list[Tokens] = field(default_factory=list)
    matrix: Tensor | None = None
    first_N: Tensor | None = None
    """Σ w x, beside the matrix or the diagonal."""
    diagonal_N: Tensor | None = None
    weight: float | Tensor = 0.0
    """Σ w over all tokens."""
    seen: int = 0
    """Tokens over which the sum runs, before any subset was taken."""

    @property
    def kept(self) -> int:
        """Tokens that are in the sum."""
        whole = self.matrix is not None or self.diagonal_N is not None
        return self.seen if whole else sum(len(chunk.rows_TN) for chunk in self.chunks)

    def add(self, tokens: Tokens, products: Products) -> None:
        """Add tokens."""
        self.seen += tokens.seen
        weight = float(len(tokens.rows_TN)) if tokens.weights_T is None else tokens.weights_T.double().sum()
        self.weight = self.weight + weight
        if self.keep.diagonal:
            squares, first = _weighted_squares(tokens)
            self.diagonal_N = squares if self.diagonal_N is None else self.diagonal_N + squares
            self.first_N = first if self.first_N is None else self.first_N + first
            return
        if self.keep.limit is not None:
            self._keep_rows(tokens)
            self._choose(self.keep.limit)
        elif self.matrix is None and self.seen <= self.keep.rows_up_to:
            self._keep_rows(tokens)
        else:
            chunks, self.chunks = self.chunks, []
            for chunk in chunks:
                self._add_product(chunk, Products())
            self._add_product(tokens, products)

    def _keep_rows(self, tokens: Tokens) -> None:
        if tokens.borrowed:
            tokens = Tokens(tokens.rows_TN.clone(), tokens.weights_T, tokens.keys_T, tokens.scale, owned=True)
        self.chunks.append(tokens)

    def own(self, copies: dict[tuple[int, ...], Tensor]) -> None:
        """Copy rows that are the user's memory (an input, a gradient handed to `backward`), who may write to it after a pass.

        Args:
            copies: {place of rows: their copy}, shared by all moments, so that layers with one input go on sharing it.
        """
        for chunk in self.chunks:
            if not chunk.owned:
                rows = chunk.rows_TN
                place = (rows.data_ptr(), *rows.shape, *rows.stride())
                if place not in copies:
                    copies[place] = rows.clone()
                chunk.rows_TN, chunk.owned = copies[place], True

    def _choose(self, limit: int) -> None:
        """Keep the tokens with the smallest keys."""
        if sum(len(chunk.rows_TN) for chunk in self.chunks) <= limit:
            return
        keys = [chunk.keys_T for chunk in self.chunks]
        joined = torch.cat([k for k in keys if k is not None])
        bound = joined.sort().values[limit - 1]
        for i, chunk in enumerate(self.chunks):
            assert chunk.keys_T is not None
            index = (chunk.keys_T <= bound).nonzero()[:, 0]
            if len(index) < len(chunk.rows_TN):
                weights = None if chunk.weights_T is None else chunk.weights_T[index]
                self.chunks[i] = Tokens(chunk.rows_TN[index], weights, chunk.keys_T[index], chunk.scale, owned=True)

    def _add_product(self, tokens: Tokens, products: Products) -> None:
        product, first = products.square(tokens)
        scale = tokens.scale
        if not (isinstance(scale, float) and scale == 1.0):
            product, first = product * scale**2, first * scale
        if self.matrix is None or self.first_N is None:
            self.matrix, self.first_N = product, first
        else:
            self.matrix, self.first_N = products.add(self.matrix, product), self.first_N + first

    def rows(self) -> tuple[Tensor, Tensor]:
        """√w_t x_t [T, N] and √w_t [T], wide, of the tokens kept."""
        parts, roots = [], []
        for chunk in self.chunks:
            rows = wide(chunk.rows_TN)
            root = (
                rows.new_ones(len(rows))
                if chunk.weights_T is None
                else chunk.weights_T.to(rows.dtype).clamp(min=0).sqrt()
            )
            if chunk.weights_T is not None or not (isinstance(chunk.scale, float) and chunk.scale == 1.0):
                rows = rows * (root * chunk.scale)[:, None]
            parts.append(rows)
            roots.append(root)
        return (parts[0], roots[0]) if len(parts) == 1 else (torch.cat(parts), torch.cat(roots))

    def kept_weight(self) -> float | Tensor:
        """Σ w over the tokens kept."""
        if self.keep.limit is None:
            return self.weight
        total: float | Tensor = 0.0
        for chunk in self.chunks:
            total = total + (float(len(chunk.rows_TN)) if chunk.weights_T is None else chunk.weights_T.double().sum())
        return total


def _weighted_squares(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Σ w x² and Σ w x."""
    rows = wide(tokens.rows_TN)
    weighted = rows if tokens.weights_T is None else rows * tokens.weights_T[:, None].to(rows)
    return (rows * weighted).sum(0) * tokens.scale**2, weighted.sum(0) * tokens.scale
