"""Optimizers, and hooks on optimizers, that use the captured curvature."""

from gramian.optim.kfac_optimizer import KFAC
from gramian.optim.precondition import precondition

__all__ = ["KFAC", "precondition"]
