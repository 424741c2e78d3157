"""Curvature: K-FAC factors from the captured passes, and what they are used for."""

from gramian.curvature.averaging import Average, diagonal_average, fisher_average
from gramian.curvature.block import Block
from gramian.curvature.ewc import EWCPenalty
from gramian.curvature.importance import TokenImportance, parameter_importance, token_importance
from gramian.curvature.influence import Influence, influence_scores
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.laplace import Laplace, LogMarginal
from gramian.curvature.operators import (
    EmpiricalFisherOperator,
    GGNOperator,
    HessianOperator,
    KFACOperator,
    ShiftedOperator,
    from_curvlinops,
    to_curvlinops,
)
from gramian.curvature.overlap import Overlap, fisher_overlap, gradient_conflict, subspace_overlap
from gramian.curvature.parameter_space import ParameterSpace
from gramian.curvature.precondition import precondition
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
    "Average",
    "Block",
    "EWCPenalty",
    "EmpiricalFisherOperator",
    "Estimate",
    "GGNOperator",
    "HessianOperator",
    "Influence",
    "KFACNaturalGradient",
    "KFACOperator",
    "LanczosSpectrum",
    "Laplace",
    "LogMarginal",
    "Operator",
    "Overlap",
    "ParameterSpace",
    "ShiftedOperator",
    "SmoothDensity",
    "SpectralDensity",
    "TokenImportance",
    "diagonal_average",
    "fisher_average",
    "fisher_overlap",
    "from_curvlinops",
    "gradient_conflict",
    "influence_scores",
    "lanczos",
    "log_det",
    "parameter_importance",
    "precondition",
    "spectral_density",
    "stochastic_trace",
    "subspace_overlap",
    "to_curvlinops",
    "token_importance",
]
