"""Curvature: K-FAC factors from the captured passes, and what they are used for."""

from gramian.curvature.blocks.block import Block
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.operators.adapters import from_curvlinops, to_curvlinops
from gramian.curvature.operators.empirical_fisher import EmpiricalFisherOperator
from gramian.curvature.operators.ggn import GGNOperator
from gramian.curvature.operators.hessian import HessianOperator
from gramian.curvature.operators.kfac_operator import KFACOperator
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.curvature.operators.shifted import ShiftedOperator
from gramian.curvature.uses.averaging import Average, diagonal_average, fisher_average
from gramian.curvature.uses.ewc import EWCPenalty
from gramian.curvature.uses.importance import TokenImportance, parameter_importance, token_importance
from gramian.curvature.uses.influence_scores import Influence, influence_scores
from gramian.curvature.uses.laplace import Laplace, LogMarginal
from gramian.curvature.uses.overlap import Overlap, fisher_overlap, gradient_conflict, subspace_overlap
from gramian.linalg import (
    Estimate,
    LanczosSpectrum,
    Operator,
    SmoothDensity,
    SpectralDensity,
    lanczos,
    log_det,
    spectral_density,
    stochastic_trace,
)

__all__ = [
    "Average", "Block", "EWCPenalty", "EmpiricalFisherOperator", "Estimate", "GGNOperator", "HessianOperator",
    "Influence", "KFACNaturalGradient", "KFACOperator", "LanczosSpectrum", "Laplace", "LogMarginal", "Operator",
    "Overlap", "ParameterSpace", "ShiftedOperator", "SmoothDensity", "SpectralDensity", "TokenImportance",
    "diagonal_average", "fisher_average", "fisher_overlap", "from_curvlinops", "gradient_conflict",
    "influence_scores", "lanczos", "log_det", "parameter_importance", "spectral_density", "stochastic_trace",
    "subspace_overlap", "to_curvlinops", "token_importance",
]  # fmt: skip
