"""The registry {class of layer: its site}; a site defines how one kind of layer is tapped."""

from collections.abc import Callable

from torch import nn

from gramian.taps.sites.borrowed import own_parameters
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.site import Site
from gramian.taps.sites.weight_hooks import weight_hooks

_BY_CLASS: dict[type, Site] = {}
_BY_NAME: dict[str, Site] = {}
_RECOGNISERS: list[Callable[[nn.Module], Site | None]] = []
"""Functions that find the site of a module of an unknown class by what it computes."""


def register_site(layer: type[nn.Module] | str, site: Site) -> None:
    """Register a site for a class of layers: captures then tap its instances with this site.

    ```python
    gramian.register_site(MyLinear, MyLinearSite())
    gramian.register_site("my_package.layers.MyNorm", MyNormSite())
    ```

    Args:
        layer: the class, or "package.module.Class" for one that should not have to be imported. Subclasses count as long
            as they inherit the class's `forward`.
        site: how the layer runs and which gradients its parameters get.
    """
    if isinstance(layer, str):
        _BY_NAME[layer] = site
    else:
        _BY_CLASS[layer] = site


def register_recogniser(recognise: Callable[[nn.Module], Site | None]) -> None:
    """Register a function that returns the site of a module whose class is not registered, or None, by what it computes."""
    _RECOGNISERS.append(recognise)


def site_for(module: nn.Module) -> Site | None:
    """The site of a module, which defines how it is tapped; a `Generic` for unknown layers, None without direct parameters.

    A class is known if it, or a base class whose `forward` it inherits, is registered; others may be recognised by what they
    compute. A module whose parameters are computed by a parametrization or a hook, or whose instance has a `forward` that
    other code replaced, is unknown.
    """
    if hasattr(module, "parametrizations"):
        return Generic(whole=True)
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    ours = function is type(module).forward or hasattr(function, "tapped")  # a copy or a pickle of a tapped module
    if "forward" in module.__dict__ and not ours:
        return Generic(whole=False) if own_parameters(module, whole=False) else None
    for base in type(module).__mro__:
        site = _BY_CLASS.get(base) or _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if site is not None and getattr(type(module), "forward", None) is getattr(base, "forward", None):
            return Generic(whole=False) if site.compiles and weight_hooks(module) else site
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return None  # their parameters are their parent's
    if any(p is not None and p.dim() in (2, 3) and p.shape[0] > 1 for p in module._parameters.values()):
        return InlineProducts(Generic(whole=bool(getattr(module, "has_post_expert_norm", False))))
    if not own_parameters(module, whole=False):
        return None
    known = (recognise(module) for recognise in _RECOGNISERS if not weight_hooks(module))
    return next((site for site in known if site is not None), Generic(whole=False))
