"""Curvature: K-FAC factors from the captured passes, and what they are used for."""

from gramian.curvature.block import Block
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.precondition import precondition

__all__ = ["Block", "KFACNaturalGradient", "precondition"]
