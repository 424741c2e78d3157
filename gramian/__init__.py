"""gramian: curvature, DP-SGD and distillation; each layer's input and output gradient are captured once, in the usual backward.

The public names are listed in `__all__`; everything else may change.
"""

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gramian.core.errors import GramianError
from gramian.core.version import VERSION

if TYPE_CHECKING:
    from gramian import distill as distill
    from gramian.curvature import KFACNaturalGradient
    from gramian.optim.precondition import precondition
    from gramian.privacy import PrivacyEngine
    from gramian.statistics import DiagonalFisher, Health, NoiseScale, PerSampleNorms, per_sample_norms
    from gramian.taps import Capture, Site, register_site
    from gramian.verify.user_model.model_check import check

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
    "check",
    "distill",
    "observe",
    "per_sample_norms",
    "precondition",
    "register_site",
]

_OWNERS = {
    "KFACNaturalGradient": "curvature",
    "PrivacyEngine": "privacy",
    "check": "verify.user_model.model_check",
    "precondition": "optim.precondition",
    **dict.fromkeys(("DiagonalFisher", "Health", "NoiseScale", "PerSampleNorms", "per_sample_norms"), "statistics"),
    **dict.fromkeys(("Site", "observe", "register_site"), "taps"),
}
"""{public name: the module below `gramian` that defines it}. It is imported when the name is first used, as torch is."""


def __getattr__(name: str) -> Any:
    """Import the owner of a public name, or the submodule of this name, when it is first accessed."""
    if name in _OWNERS:
        owner = import_module(f"{__name__}.{_OWNERS[name]}")
        globals()[name] = getattr(owner, "Capture" if name == "observe" else name)
        return globals()[name]
    if not name.startswith("_"):
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, whether they were used yet or not."""
    return sorted({*globals(), *__all__})
