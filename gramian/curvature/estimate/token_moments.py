"""Second moments Σ_t w_t x_t x_tᵀ over tokens, as rows while they are few, as a matrix once they are many.

Legend: T tokens, N width of a token, w_t weights.

Storing the rows is exact and small while T < N (the factor is then of rank T); a matrix is exact and small from there on. A
limit selects the `limit` tokens with the smallest random keys (a key follows from seed, sample and position), so the subset
does not depend on the order in which tokens arrive.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.kernels.sums.ragged_products import ragged_products
from gramian.linalg.factors.stored import MatrixSource
from gramian.linalg.wide import wide, wide_moments, wide_square


@dataclass(frozen=True)
class StoragePolicy:
    """How the moment Σ w x xᵀ of one side of a block stores its tokens: as rows, as a matrix, or as a diagonal."""

    rows_up_to: int = 0
    """Largest number of tokens that are stored as rows of a low-rank factor; more are summed to a matrix."""
    limit: int | None = None
    """Size of the random subset of tokens (those with the smallest keys) that is stored as rows; None: all tokens."""
    diagonal: bool = False
    """True if only the diagonal Σ w x² over tokens x with weights w is stored."""
    why: str = ""
    """The change that the option memory_budget made to this policy; empty: none."""


@dataclass
class Tokens:
    """The rows x_t (inputs or output gradients of one layer call) of the tokens that enter a sum, with weights and keys."""

    rows_TN: Tensor
    weights_T: Tensor | None
    """Weights w_t of the rows; None: all are 1."""
    keys_T: Tensor | None
    """Random keys of the tokens, by which a subset is chosen; None: no subset is taken."""
    scale: float | Tensor = 1.0
    """A factor by which every row is still to be multiplied."""
    borrowed: bool = False
    seen: int = 0
    """Number of tokens before any subset was taken."""
    owned: bool = False
    """True if the rows are a copy that no one else can write to."""


class Products:
    """A cache of the last product Σ w x xᵀ and the last sum, so that layers with the same input (q, k, v) share both."""

    def __init__(self) -> None:
        """Begin without a stored product."""
        self._parts: Sequence[Tokens] = ()
        self._product: tuple[Tensor, Tensor] | None = None
        self._sum: tuple[Tensor, Tensor, Tensor] | None = None

    def square(self, parts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Σ w x xᵀ [N, N] and Σ w x [N] over the rows of all parts. 2·T·N² FLOPs, none if they are the last call's rows."""
        if self._product is not None and self._same(parts):
            return self._product
        product, first = _squared(parts[0])
        for tokens in parts[1:]:
            more, more_first = _squared(tokens)
            product, first = product.add_(more), first + more_first
        self._parts, self._product = ([] if any(tokens.borrowed for tokens in parts) else parts), (product, first)
        return self._product

    def add(self, total: Tensor, product: Tensor) -> Tensor:
        """`total` + `product` as a new tensor, the same one for every layer that asks for the same sum."""
        if self._sum is None or self._sum[0] is not total or self._sum[1] is not product:
            self._sum = (total, product, total + product)
        return self._sum[2]

    def forget(self) -> None:
        """Free the stored product and sum, at the end of a pass."""
        self._parts, self._product, self._sum = (), None, None

    def _same(self, parts: Sequence[Tokens]) -> bool:
        """True if `parts` are the rows of the last call; these are still referenced, so equal addresses mean equal rows."""
        return len(parts) == len(self._parts) and all(map(same_tokens, self._parts, parts))


def same_tokens(left: Tokens, right: Tokens) -> bool:
    """True if two sets of tokens are the same memory with the same weights; scales are not compared, since inputs have none."""
    a, b = left.rows_TN, right.rows_TN
    same = a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )
    return same and left.weights_T is right.weights_T


def _squared(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Σ w x xᵀ [N, N] and Σ w x [N] over the rows of `tokens`, x a row times the tokens' scale."""
    product, first = wide_moments(tokens.rows_TN, tokens.weights_T)
    scale = tokens.scale
    if isinstance(scale, float) and scale == 1.0:
        return product, first
    return product * scale**2, first * scale


@dataclass
class TokenMoment:
    """The running sum Σ w x xᵀ over tokens for one side (inputs or gradients) of one block."""

    width: int
    keep: StoragePolicy
    chunks: list[Tokens] = field(default_factory=list)
    matrix: Tensor | None = None
    first_N: Tensor | None = None
    """Σ w x [N] over weights w and rows x of tokens, stored beside the matrix or the diagonal."""
    diagonal_N: Tensor | None = None
    weight: float | Tensor = 0.0
    """Sum of the weights w of all tokens so far."""
    seen: int = 0
    """Number of tokens so far, before any subset was taken."""

    @property
    def stored(self) -> int:
        """Number of tokens in the sum, after any subset was taken."""
        summed = self.matrix is not None or self.diagonal_N is not None
        return self.seen if summed else sum(chunk.rows_TN.shape[0] for chunk in self.chunks)

    def add(self, tokens: Tokens, products: Products) -> None:
        """Add tokens to the sum: as rows, to the matrix or to the diagonal, as the storage policy says.

        `products` is the cache through which layers with the same input share a product.
        """
        self.seen += tokens.seen
        weight = float(tokens.rows_TN.shape[0]) if tokens.weights_T is None else tokens.weights_T.double().sum()
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
            waiting, self.chunks = self.chunks, []
            self._add_product([*waiting, tokens], products)

    def add_product(self, product: Tensor, first_N: Tensor, weight: float | Tensor, seen: int) -> None:
        """Add Σ w x xᵀ, Σ w x and Σ w of `seen` tokens x of weights w to the matrix, and all rows that are stored so far."""
        self.seen, self.weight = self.seen + seen, self.weight + weight
        waiting, self.chunks = self.chunks, []
        if waiting:
            self._add_product(waiting, Products())
        self.matrix = product if self.matrix is None else self.matrix + product
        self.first_N = first_N if self.first_N is None else self.first_N + first_N

    def _keep_rows(self, tokens: Tokens) -> None:
        if tokens.borrowed:
            tokens = Tokens(tokens.rows_TN.clone(), tokens.weights_T, tokens.keys_T, tokens.scale, owned=True)
        self.chunks.append(tokens)

    def own(self, copies: dict[tuple[int, ...], Tensor]) -> None:
        """Copy rows that are the user's memory (an input, a gradient given to `backward`), which may change after a pass.

        `copies` collects {(address, shape, strides): copy}, so that layers with the same input share a copy.
        """
        for chunk in self.chunks:
            if not chunk.owned:
                chunk.rows_TN, chunk.owned = shared_copy(chunk.rows_TN, copies), True

    def _choose(self, limit: int) -> None:
        """Keep only the `limit` stored tokens with the smallest keys."""
        if sum(chunk.rows_TN.shape[0] for chunk in self.chunks) > limit:
            self.keep_keys(smallest(self.keys(), limit))

    def keys(self) -> Tensor:
        """Random keys of the stored tokens, [T]."""
        return torch.cat([chunk.keys_T for chunk in self.chunks if chunk.keys_T is not None])

    def keep_keys(self, bound: Tensor) -> None:
        """Drop the stored tokens whose keys are above `bound`."""
        for i, chunk in enumerate(self.chunks):
            assert chunk.keys_T is not None
            index = (chunk.keys_T <= bound).nonzero()[:, 0]
            if len(index) < len(chunk.rows_TN):
                weights = None if chunk.weights_T is None else chunk.weights_T[index]
                self.chunks[i] = Tokens(chunk.rows_TN[index], weights, chunk.keys_T[index], chunk.scale, owned=True)

    def _add_product(self, parts: Sequence[Tokens], products: Products) -> None:
        product, first = products.square(parts)
        if self.matrix is None or self.first_N is None:
            self.matrix, self.first_N = product, first
        else:
            self.matrix, self.first_N = products.add(self.matrix, product), self.first_N + first

    def stored_weight(self) -> float | Tensor:
        """Sum of the weights w of the tokens in the sum, after any subset was taken."""
        if self.keep.limit is None:
            return self.weight
        total: float | Tensor = 0.0
        for chunk in self.chunks:
            total = total + (
                float(chunk.rows_TN.shape[0]) if chunk.weights_T is None else chunk.weights_T.double().sum()
            )
        return total

    def columns(self, bias: bool) -> "WeightedColumns":
        """The matrix with columns √w_t [x_t, 1] (the 1 with a bias only) for the stored tokens, formed on demand."""
        return WeightedColumns(self.chunks, bias)

    def row_matrix(self, bias: bool) -> tuple[Tensor, float]:
        """Rows √w_t [x_t, 1] (the 1 with a bias only) of the stored tokens, [T, n], and a factor still to be multiplied in."""
        columns = self.columns(bias)
        assert columns.factor == 1.0 or not bias  # inputs, which alone have a bias, come unscaled
        if columns.plain and len(self.chunks) == 1 and not bias:
            return self.chunks[0].rows_TN, columns.factor
        rows_TN = torch.empty(columns.shape[::-1], dtype=columns.dtype, device=columns.device)
        columns.write(rows_TN)
        return rows_TN, columns.factor

    def product(self, bias: bool, softmax: bool) -> Tensor:
        """Σ w [x; 1][x; 1]ᵀ (the 1 with a bias only), [n, n]; with `softmax` Σ w (diag x − x xᵀ) of probabilities x."""
        if self.matrix is not None:
            assert self.first_N is not None
            if bias:
                return _augmented(self.matrix, self.first_N, float(self.weight))
            return torch.diag(self.first_N) - self.matrix if softmax else self.matrix
        if softmax:
            rows, roots_T = self.row_matrix(False)[0], self.columns(False).roots()
            return torch.diag((rows * roots_T[:, None]).sum(0)) - rows.mT @ rows
        rows, factor = self.row_matrix(bias)
        product = wide_square(rows)
        return product if factor == 1.0 else product * factor**2

    def product_diagonal(self, bias: bool, softmax: bool) -> Tensor:
        """The diagonal [n] of Σ w [x; 1][x; 1]ᵀ, or with `softmax` of Σ w (diag x − x xᵀ), where only diagonals are stored."""
        assert self.diagonal_N is not None and self.first_N is not None
        if bias:
            return torch.cat([self.diagonal_N, self.diagonal_N.new_full((1,), float(self.weight))])
        return self.first_N - self.diagonal_N if softmax else self.diagonal_N


class WeightedColumns(MatrixSource):
    """The matrix U [n, T] with columns √w_t [x_t, 1] (the 1 with a bias only), formed from stored tokens a chunk at a time.

    U is still to be multiplied by `factor`: the scale of the tokens if it is the same float for all, else 1.
    """

    def __init__(self, chunks: Sequence[Tokens], bias: bool) -> None:
        """Use `chunks` of tokens (at least one, all of one width) without copying; `bias`: append the 1 to each token."""
        self._chunks, self._bias = chunks, bias
        first = chunks[0].scale
        alike = isinstance(first, float) and all(isinstance(c.scale, float) and c.scale == first for c in chunks)
        self.factor = float(first) if alike else 1.0
        self.plain = alike and all(chunk.weights_T is None for chunk in chunks)
        """True if columns are the tokens unchanged: no weights, and one scale (a float) for all."""
        rows = [chunk.rows_TN for chunk in chunks]
        self.shape = (rows[0].shape[1] + bias, sum(part.shape[0] for part in rows))
        self.dtype = rows[0].dtype if self.plain and len({part.dtype for part in rows}) == 1 else wide_dtype(*rows)
        self.device = rows[0].device

    def roots(self) -> Tensor:
        """Square roots of the weights of all tokens, [T]."""
        return torch.cat([self._roots(chunk, slice(None)) for chunk in self._chunks])

    def _roots(self, chunk: Tokens, tokens: slice) -> Tensor:
        if chunk.weights_T is None:
            return torch.ones(len(chunk.rows_TN[tokens]), dtype=self.dtype, device=self.device)
        return chunk.weights_T[tokens].to(self.dtype).clamp(min=0).sqrt()

    def piece(self, columns: slice) -> Tensor:
        """The columns of this slice of the matrix, [n, c], one per token: a view where possible, else a copy."""
        if self.plain and len(self._chunks) == 1 and not self._bias:
            return self._chunks[0].rows_TN[columns].mT
        piece_CN = torch.empty(columns.stop - columns.start, self.shape[0], dtype=self.dtype, device=self.device)
        self.write(piece_CN, columns.start)
        return piece_CN.mT

    def write(self, into_CN: Tensor, first: int = 0) -> None:
        """Write the columns of tokens `first`, `first` + 1, ... into the rows of `into_CN`, as many as it has."""
        at = -first
        for chunk in self._chunks:
            here = slice(max(-at, 0), min(chunk.rows_TN.shape[0], into_CN.shape[0] - at))
            if here.start < here.stop:
                rows_CN, roots_C = chunk.rows_TN[here], self._roots(chunk, here)
                into_Cn, width = into_CN[at + here.start : at + here.stop], rows_CN.shape[1]
                if self.plain:
                    into_Cn[:, :width] = rows_CN
                else:
                    scale = chunk.scale if self.factor == 1.0 else 1.0
                    torch.mul(rows_CN, (roots_C * scale)[:, None], out=into_Cn[:, :width])
                if self._bias:
                    into_Cn[:, width] = roots_C
            at += chunk.rows_TN.shape[0]


def add_groups(
    moments: Sequence[TokenMoment],
    rows_RN: Tensor,
    order_K: Tensor,
    spans: Sequence[tuple[int, int]],
    weights_K: Tensor | None,
    scale: float | Tensor = 1.0,
) -> None:
    """Add rows of several matrices at once: to moment i the rows `order_K[begin:end]` of span i, which is not empty.

    `weights_K`: weights of the rows in that order; None: all are 1. Every row is multiplied by `scale`. Moments must take no
    subset of tokens (`StoragePolicy.limit`). Rows that are stored are views of one copy; those that are summed make one product
    over ragged segments (`kernels.sums.ragged_products`), 2·K·N² FLOPs.
    """
    summed, stored = list[int](), list[int]()
    for i, (moment, (begin, end)) in enumerate(zip(moments, spans, strict=True)):
        crosses = moment.matrix is not None or moment.seen + end - begin > moment.keep.rows_up_to
        (summed if crosses and not moment.keep.diagonal else stored).append(i)
    rows_KN = rows_RN[order_K] if stored or weights_K is not None else None
    for i in stored:
        assert rows_KN is not None
        here = slice(*spans[i])
        weights = None if weights_K is None else weights_K[here]
        moments[i].add(Tokens(rows_KN[here], weights, None, scale, seen=here.stop - here.start, owned=True), Products())
    if not summed:
        return
    ends = [0, *itertools.accumulate(spans[i][1] - spans[i][0] for i in summed)]
    offsets = torch.tensor(ends, device=order_K.device)
    place_S = torch.cat([torch.arange(*spans[i]) for i in summed]).to(order_K.device)
    left_RN, right_RN, order_S = rows_RN, rows_RN, order_K[place_S]
    totals: Sequence[float | Tensor] = [float(end - begin) for begin, end in itertools.pairwise(ends)]
    if weights_K is not None and rows_KN is not None:
        left_RN, right_RN, order_S = wide(rows_KN) * weights_K[:, None].to(wide_dtype(rows_KN)), rows_KN, place_S
        totals = [*torch.segment_reduce(weights_K[place_S].double(), "sum", offsets=offsets, axis=0, unsafe=True)]
    one = torch.ones(1, device=order_K.device)
    products = ragged_products(left_RN, right_RN, order_S, offsets, one, wide_dtype(rows_RN))
    firsts = torch.segment_reduce(wide(left_RN[order_S]), "sum", offsets=offsets, axis=0, unsafe=True)
    if not (isinstance(scale, float) and scale == 1.0):
        products, firsts = products * scale**2, firsts * scale
    for number, i in enumerate(summed):
        moments[i].add_product(products[number], firsts[number], totals[number], spans[i][1] - spans[i][0])


def shared_copy(t: Tensor, copies: dict[tuple[int, ...], Tensor]) -> Tensor:
    """A copy of `t`; `copies`, {(address, shape, strides): copy}, lets layers that share an input share its copy."""
    place = (t.data_ptr(), *t.shape, *t.stride())
    if place not in copies:
        copies[place] = t.detach().clone()
    return copies[place]


def smallest(keys_T: Tensor, limit: int) -> Tensor:
    """The largest key to keep so that at most `limit` tokens stay.

    Tokens with equal keys (a module called twice) are kept or dropped together. If more than `limit` tokens have the smallest
    key, all of these stay.
    """
    ascending = keys_T.sort().values
    bound = ascending[limit - 1]
    below = ascending[ascending < bound]
    return bound if len(below) + (ascending == bound).sum() <= limit or not len(below) else below[-1]


def same_sums(left: TokenMoment, right: TokenMoment) -> bool:
    """True if two moments have the same numbers: the same tensors or memory, with the same policy, width and token count."""
    if left is right:
        return True
    if left.keep != right.keep or left.width != right.width or left.seen != right.seen:
        return False
    if left.matrix is not None and right.matrix is not None:
        return left.matrix is right.matrix
    if left.matrix is None and right.matrix is None and len(left.chunks) == len(right.chunks) and left.chunks:
        return all(map(same_tokens, left.chunks, right.chunks))
    return False


def _augmented(matrix: Tensor, first_N: Tensor, weight: float) -> Tensor:
    """Σ w [x; 1][x; 1]ᵀ from Σ w x xᵀ (`matrix`), Σ w x (`first_N`) and Σ w (`weight`)."""
    total = matrix.new_full((1, 1), weight)
    top = torch.cat([matrix, first_N[:, None]], dim=1)
    return torch.cat([top, torch.cat([first_N[None, :], total], dim=1)])


def _weighted_squares(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Σ w x² [N] and Σ w x [N] over the rows of `tokens`, x a row times the tokens' scale."""
    rows = wide(tokens.rows_TN)
    weighted = rows if tokens.weights_T is None else rows * tokens.weights_T[:, None].to(rows)
    return (rows * weighted).sum(0) * tokens.scale**2, weighted.sum(0) * tokens.scale
