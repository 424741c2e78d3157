"""Symmetric positive semi-definite matrices ("factors") with one interface, and spectra of matrix-free operators."""

from gramian.linalg.factors.block_diagonal import BlockDiagonal
from gramian.linalg.factors.cholesky import Cholesky, CholeskyAttempt
from gramian.linalg.factors.compression import Compressed, compress
from gramian.linalg.factors.dense import Dense
from gramian.linalg.factors.diagonal import Diagonal
from gramian.linalg.factors.diagonal_low_rank import DiagonalLowRank
from gramian.linalg.factors.eigendecomposition import eigendecompose
from gramian.linalg.factors.factor import WIDEST_DENSE, Clip, Factor, Spectral
from gramian.linalg.factors.low_rank import LowRank
from gramian.linalg.factors.merging import merge
from gramian.linalg.spectra.lanczos import LanczosSpectrum, lanczos
from gramian.linalg.spectra.operator import DenseOperator, Operator
from gramian.linalg.spectra.quadrature import SmoothDensity, SpectralDensity, log_det, spectral_density
from gramian.linalg.spectra.trace import Estimate, stochastic_trace

__all__ = [
    "WIDEST_DENSE", "BlockDiagonal", "CholeskyAttempt", "Cholesky", "Clip", "Compressed", "Dense", "DenseOperator", "Diagonal",
    "DiagonalLowRank", "Estimate", "Factor", "LanczosSpectrum", "LowRank", "Operator", "SmoothDensity", "Spectral",
    "SpectralDensity", "compress", "eigendecompose", "lanczos", "log_det", "merge", "spectral_density",
    "stochastic_trace",
]  # fmt: skip
