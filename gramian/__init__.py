"""gramian: capture each layer's input and output gradient once, in the backward pass that happens anyway.

The public names are listed in `__all__`; everything else may change.
"""

from gramian.curvature import KFACNaturalGradient, precondition
from gramian.errors import GramianError
from gramian.privacy import PrivacyEngine
from gramian.statistics import DiagonalFisher, Health, NoiseScale, PerSampleNorms, per_sample_norms
from gramian.taps import Capture, Site, register_site

observe = Capture

__version__ = "0.1.0"

__all__ = [
    "DiagonalFisher",
    "GramianError",
    "Health",
    "KFACNaturalGradient",
    "NoiseScale",
    "PerSampleNorms",
    "PrivacyEngine",
    "Site",
    "observe",
    "per_sample_norms",
    "precondition",
    "register_site",
]
