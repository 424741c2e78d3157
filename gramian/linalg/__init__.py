"""Symmetric positive factors under one contract, the small solvers they stand on, and spectra of maps known by products."""

from gramian.linalg.cholesky import Attempt, Cholesky
from gramian.linalg.dense import Dense
from gramian.linalg.diagonal import Diagonal
from gramian.linalg.diagonal_low_rank import DiagonalLowRank
from gramian.linalg.eigen import eigendecompose
from gramian.linalg.factor import WIDEST_DENSE, Clip, Compressed, Factor, Spectral
from gramian.linalg.lanczos import LanczosSpectrum, lanczos
from gramian.linalg.low_rank import LowRank
from gramian.linalg.operator import DenseOperator, Operator
from gramian.linalg.quadrature import SmoothDensity, SpectralDensity, log_det, spectral_density
from gramian.linalg.trace import Estimate, stochastic_trace

__all__ = [
    "WIDEST_DENSE",
    "Attempt",
    "Cholesky",
    "Clip",
    "Compressed",
    "Dense",
    "DenseOperator",
    "Diagonal",
    "DiagonalLowRank",
    "Estimate",
    "Factor",
    "LanczosSpectrum",
    "LowRank",
    "Operator",
    "SmoothDensity",
    "Spectral",
    "SpectralDensity",
    "eigendecompose",
    "lanczos",
    "log_det",
    "spectral_density",
    "stochastic_trace",
]
