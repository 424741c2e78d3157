"""What the curvature of a model looks like: K-FAC, the Gauss-Newton matrix and their spectra, in numbers, pictures, prose."""

from gramian.analysis.measure import analyse
from gramian.analysis.methods import write_methods
from gramian.analysis.options import Settings
from gramian.analysis.subject import Subject

__all__ = ["Settings", "Subject", "analyse", "write_methods"]
