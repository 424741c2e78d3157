"""Curvature of a model: K-FAC, Gauss-Newton matrix, Hessian and their spectra, as numbers, pictures and a Methods text."""

from gramian.analysis.measure import analyse
from gramian.analysis.methods import write_methods
from gramian.analysis.options import Settings
from gramian.analysis.subject import Subject

__all__ = ["Settings", "Subject", "analyse", "write_methods"]
