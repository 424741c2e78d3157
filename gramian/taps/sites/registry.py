"""Which site stands for which class of layer."""

from torch import nn

from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site import Site

_BY_CLASS: dict[type, Site] = {}
_BY_NAME: dict[str, Site] = {}


def register_site(layer: type[nn.Module] | str, site: Site) -> None:
    """Tap instances of a class with this site.

    Args:
        layer: the class, or "package.module.Class" for one that should not have to be imported. Subclasses count as long
            as they keep the class's `forward`.
        site: what to keep and what the gradients are.
    """
    if isinstance(layer, str):
        _BY_NAME[layer] = site
    else:
        _BY_CLASS[layer] = site


def site_for(module: nn.Module) -> Site | None:
    """The site of a module, a generic one for unknown layers, None for modules without parameters of their own.

    A class is known if it, or a base class whose `forward` it inherits, is registered, and its parameters are ordinary
    ones (not computed by a parametrization).
    """
    if hasattr(module, "parametrizations"):
        return Generic(whole=True)
    for base in type(module).__mro__:
        site = _BY_CLASS.get(base) or _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if site is not None and getattr(type(module), "forward", None) is getattr(base, "forward", None):
            return site
    return Generic(whole=False) if any(p is not None for p in module._parameters.values()) else None
