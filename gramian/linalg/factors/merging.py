"""Weighted sums α·M + β·M' of two factors, in the smallest representation that can store the sum.

The columns of low-rank factors are scaled by √weight and concatenated; once there are as many columns as rows, the sum is
formed as a dense matrix, unless it is too wide. Diagonals are added.
"""

import torch

from gramian.core.errors import GramianError
from gramian.linalg.factors.block_diagonal import BlockDiagonal
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.diagonal import Diagonal
from gramian.linalg.factors.diagonal_low_rank import DiagonalLowRank, within_diagonal
from gramian.linalg.factors.factor import WIDEST_DENSE, Factor
from gramian.linalg.factors.low_rank import LowRank


def merge(left: Factor, right: Factor, alpha: float, beta: float) -> Factor:
    """The factor α·left + β·right of two factors with the same number of rows.

    Raises:
        GramianError: if the sizes differ, or if no representation can store the sum (diag(d) − U Uᵀ plus a low-rank factor or
            plus diag(d) + U Uᵀ, and dense sums wider than `WIDEST_DENSE`).
    """
    if left.dim != right.dim:
        raise GramianError(f"merge: sides of {left.dim} and {right.dim}; expected equal ones")
    if isinstance(left, Dense):
        return Dense.summed(left, right, alpha, beta, left.storage_dtype)
    if isinstance(left, LowRank):
        return (
            _add_low_rank(left, right, alpha, beta) if isinstance(right, LowRank) else merge(right, left, beta, alpha)
        )
    if isinstance(left, Diagonal):
        return _add_to_diagonal(left, right, alpha, beta)
    if isinstance(left, BlockDiagonal):
        assert isinstance(right, BlockDiagonal)
        return BlockDiagonal(alpha * left.blocks_RWW + beta * right.blocks_RWW.to(left.blocks_RWW))
    assert isinstance(left, DiagonalLowRank)
    return _add_to_diagonal_low_rank(left, right, alpha, beta)


def _add_low_rank(left: LowRank, right: LowRank, alpha: float, beta: float) -> Factor:
    if left.rank + right.rank >= left.dim <= WIDEST_DENSE:
        return Dense.summed(left, right, alpha, beta, left.storage_dtype)
    return LowRank(left.columns.scaled(alpha**0.5).join(right.columns.scaled(beta**0.5)))


def _add_to_diagonal(left: Diagonal, right: Factor, alpha: float, beta: float) -> Factor:
    if isinstance(right, Diagonal):
        return Diagonal(alpha * left.values_N + beta * right.values_N.to(left.values_N))
    if isinstance(right, DiagonalLowRank):
        return merge(right, left, beta, alpha)
    if isinstance(right, LowRank) and (right.rank < left.dim or left.dim > WIDEST_DENSE):
        return DiagonalLowRank(alpha * left.values_N.to(right.device), right.columns.scaled(beta**0.5), +1)
    return Dense.summed(right, left, beta, alpha, right.storage_dtype)


def _add_to_diagonal_low_rank(left: DiagonalLowRank, right: Factor, alpha: float, beta: float) -> Factor:
    if isinstance(right, Diagonal):
        total = alpha * left.values_N + beta * right.values_N.to(left.values_N)
        return DiagonalLowRank(total, left.columns.scaled(alpha**0.5), left.sign)
    if isinstance(right, Dense):
        return Dense.summed(left, right, alpha, beta, left.storage_dtype)
    if isinstance(right, DiagonalLowRank) and right.sign == left.sign:
        d_N, columns = right.values_N, right.columns
    elif isinstance(right, LowRank) and left.sign > 0:
        d_N, columns = torch.zeros_like(left.values_N), right.columns
    else:
        raise GramianError(f"merge: a {left.kind} and a {right.kind}; expected the same representation")
    if left.rank + columns.count >= left.dim <= WIDEST_DENSE:
        return Dense.summed(left, right, alpha, beta, left.storage_dtype)
    total = alpha * left.values_N + beta * d_N.to(left.values_N)
    both = left.columns.scaled(alpha**0.5).join(columns.scaled(beta**0.5))
    if columns.stored.body.dtype != left.storage_dtype:
        both = within_diagonal(total, both, left.sign)
    return DiagonalLowRank(total, both, left.sign)
