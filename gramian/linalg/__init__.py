"""Symmetric positive factors under one contract, and the small solvers they stand on."""

from gramian.linalg.cholesky import Attempt, Cholesky
from gramian.linalg.dense import Dense
from gramian.linalg.diagonal import Diagonal
from gramian.linalg.diagonal_low_rank import DiagonalLowRank
from gramian.linalg.eigen import eigendecompose
from gramian.linalg.factor import WIDEST_DENSE, Clip, Compressed, Factor, Spectral
from gramian.linalg.low_rank import LowRank

__all__ = [
    "WIDEST_DENSE",
    "Attempt",
    "Cholesky",
    "Clip",
    "Compressed",
    "Dense",
    "Diagonal",
    "DiagonalLowRank",
    "Factor",
    "LowRank",
    "Spectral",
    "eigendecompose",
]
