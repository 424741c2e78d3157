"""Curvature matrices as operators with matrix-vector products: Hessian, Gauss-Newton, empirical Fisher, K-FAC."""

from gramian.curvature.operators.adapters import from_curvlinops, to_curvlinops
from gramian.curvature.operators.empirical_fisher import EmpiricalFisherOperator
from gramian.curvature.operators.ggn import GGNOperator
from gramian.curvature.operators.hessian import HessianOperator
from gramian.curvature.operators.kfac_operator import KFACOperator
from gramian.curvature.operators.shifted import ShiftedOperator

__all__ = [
    "EmpiricalFisherOperator",
    "GGNOperator",
    "HessianOperator",
    "KFACOperator",
    "ShiftedOperator",
    "from_curvlinops",
    "to_curvlinops",
]
