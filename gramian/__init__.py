"""gramian: curvature, DP-SGD and distillation; each layer's input and output gradient are captured once, in the usual backward.

The public names are listed in `__all__`; everything else may change.
"""

from typing import TYPE_CHECKING, Any

from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.curvature import KFACNaturalGradient
from gramian.optim.precondition import precondition
from gramian.privacy import PrivacyEngine
from gramian.statistics import DiagonalFisher, Health, NoiseScale, PerSampleNorms, per_sample_norms
from gramian.taps import Capture, Site, register_site

if TYPE_CHECKING:
    from gramian import distill as distill

observe = Capture

__version__ = VERSION

__all__ = [
    "DiagonalFisher",
    "GramianError",
    "Health",
    "KFACNaturalGradient",
    "NoiseScale",
    "PerSampleNorms",
    "PrivacyEngine",
    "Site",
    "distill",
    "observe",
    "per_sample_norms",
    "precondition",
    "register_site",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the submodule `distill` when it is first accessed; other unknown names raise AttributeError."""
        if name == "distill":
            import gramian.distill

            return gramian.distill
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
