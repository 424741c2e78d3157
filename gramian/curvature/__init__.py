"""Curvature: K-FAC factors from the captured passes, and what they are used for."""

from gramian.curvature.block import Block
from gramian.curvature.ewc import EWCPenalty
from gramian.curvature.importance import TokenImportance, parameter_importance, token_importance
from gramian.curvature.influence import Influence, influence_scores
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.laplace import Laplace, LogMarginal
from gramian.curvature.precondition import precondition

__all__ = [
    "Block",
    "EWCPenalty",
    "Influence",
    "KFACNaturalGradient",
    "Laplace",
    "LogMarginal",
    "TokenImportance",
    "influence_scores",
    "parameter_importance",
    "precondition",
    "token_importance",
]
