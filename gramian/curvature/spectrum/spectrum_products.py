"""Sums over all products α_j·σ_i of two spectra, which are the eigenvalues of G ⊗ A, and the largest of them.

Legend: R eigenvalues of one side, S of the other, λ damping. Sums form `CHUNK` products at a time, and zeros are counted in
closed form. Products are formed as float64 logarithms, so factors such as σ = 1e300 and α = 1e-300 do not overflow.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**20
"""Largest number of products that are formed at a time: three float64 tensors of 8 MB."""


@dataclass(frozen=True)
class Values:
    """Positive eigenvalues of one side with their multiplicities; all other directions have the eigenvalue 0."""

    positive_R: Tensor
    """Eigenvalues σ > 0, descending, float64 on the CPU."""
    dim: int
    """n, the number of all eigenvalues, zeros included."""
    weights_R: Tensor | None = None
    """Multiplicities of the eigenvalues, float64 (fractions for a quadrature); None: all are 1."""

    @classmethod
    def of(cls, values_R: Tensor, dim: int | None = None, weights_R: Tensor | None = None) -> "Values":
        """`Values` of these eigenvalues: the positive ones, sorted. `dim`: number of all eigenvalues; None: len(values_R).

        `weights_R`: their multiplicities; None: all are 1.
        """
        values, order = values_R.detach().to("cpu", torch.float64).sort(descending=True)
        count = int((values > 0).sum())
        weights = None if weights_R is None else weights_R.to("cpu", torch.float64)[order[:count]]
        return cls(values[:count].clone(), len(values_R) if dim is None else dim, weights)

    @property
    def count(self) -> float:
        """Number of positive eigenvalues, by their multiplicities."""
        return float(len(self.positive_R)) if self.weights_R is None else float(self.weights_R.sum())

    @property
    def largest(self) -> float:
        """The largest eigenvalue; 0 if none is positive."""
        return float(self.positive_R[0]) if len(self.positive_R) else 0.0

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue; 0 if some are not positive."""
        return float(self.positive_R[-1]) if len(self.positive_R) == self.dim else 0.0


def damped_sums(left: Values, right: Values, damping: float, device: torch.device | None = None) -> tuple[float, float]:
    """Σ log(σα + λ) and Σ σα/(σα + λ) over all products of two spectra σ, α: log det and effective dimension of F + λI.

    Computed on `device` (None: the CPU). Cost: R·S logarithms and exponentials, 3·8·`CHUNK` bytes.
    """
    log_damping = math.log(damping)
    log_sigma, log_alpha = (side.positive_R.log().to(device) for side in (left, right))
    w_R, v_S = (None if side.weights_R is None else side.weights_R.to(device) for side in (left, right))
    logs, shares = [(left.dim * right.dim - left.count * right.count) * log_damping], [0.0]
    for rows, columns in _tiles(len(log_sigma), len(log_alpha)):
        products = log_sigma[rows, None] + log_alpha[columns]
        w, v = (None if w_R is None else w_R[rows]), (None if v_S is None else v_S[columns])
        logs.append(_weighted_sum(torch.logaddexp(products, products.new_tensor(log_damping)), w, v))
        shares.append(_weighted_sum(products.sub_(log_damping).sigmoid_(), w, v))
    return math.fsum(logs), math.fsum(shares)


def count_above(left: Values, right: Values, share: float) -> float:
    """Number of products σα of two spectra that exceed `share` times the largest, by multiplicities.

    O((R + S) log S): a binary search, no product is formed.
    """
    if not (len(left.positive_R) and len(right.positive_R)):
        return 0.0
    sigma, alpha = (side.positive_R / side.positive_R[0] for side in (left, right))
    ascending = alpha.flip(0)
    unseen = torch.searchsorted(ascending, share / sigma, right=True)
    v_S = torch.ones_like(alpha) if right.weights_R is None else right.weights_R
    seen = torch.cat([v_S.new_zeros(1), v_S.cumsum(0)])[len(alpha) - unseen]
    return float(seen.sum() if left.weights_R is None else (seen * left.weights_R).sum())


def largest_products(pairs: Sequence[tuple[Values, Values]], k: int) -> list[float]:
    """The k largest products σ_iα_j of several pairs of spectra without weights, descending, padded with zeros.

    A heap over sorted spectra: (i, j) is followed by (i, j+1), and (i, 0) also by (i+1, 0). O(k log k).
    """
    tops = [tuple(side.positive_R[:k].tolist() for side in pair) for pair in pairs]
    heap = [(-left[0] * right[0], pair, 0, 0) for pair, (left, right) in enumerate(tops) if left and right]
    heapq.heapify(heap)
    found: list[float] = []
    while heap and len(found) < k:
        negative, pair, i, j = heapq.heappop(heap)
        found.append(-negative)
        left, right = tops[pair]
        following = [(i, j + 1)] if j else [(i, 1), (i + 1, 0)]
        for i, j in following:
            if i < len(left) and j < len(right):
                heapq.heappush(heap, (-left[i] * right[j], pair, i, j))
    return found + [0.0] * (k - len(found))


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) slices that cover a matrix in tiles of at most `CHUNK` entries."""
    wide = max(1, min(columns, CHUNK))
    high = max(1, CHUNK // wide)
    for top in range(0, rows, high):
        for start in range(0, columns, wide):
            yield slice(top, top + high), slice(start, start + wide)


def _weighted_sum(matrix_RS: Tensor, w_R: Tensor | None, v_S: Tensor | None) -> float:
    summed_R = matrix_RS.sum(1) if v_S is None else matrix_RS @ v_S
    return float(summed_R.sum() if w_R is None else summed_R @ w_R)
