"""Layers that use weights of their children without calling the children (a mixer's `F.conv1d(x, self.conv.weight)`).

No tap on the child sees such a use. The layer around it is then tapped as one layer, its children included, and run again
sample by sample (the generic site), as `nn.MultiheadAttention` always is. Which classes these are is established by a row
proof: a weight whose gradient the taps do not explain names the layer around it, and the proof is repeated. Where no row is
attributed (K-FAC), a proof of the sums alone runs if the graph of a forward reaches a weight of a layer that is not called.
"""

import weakref
from collections.abc import Iterable

from torch import nn

from gramian.taps.model import user_names
from gramian.taps.sites import site_for

_classes: weakref.WeakKeyDictionary[nn.Module, set[type[nn.Module]]] = weakref.WeakKeyDictionary()
"""{root module: classes of its layers that are tapped as one}; all layers of a class, since they run the same code."""


def whole_classes(root: nn.Module) -> frozenset[type[nn.Module]]:
    """Classes of the layers of this model that are tapped as one layer, their children included."""
    return frozenset(_classes.get(root, ()))


def take_whole(root: nn.Module, name: str) -> bool:
    """Tap the nearest layer around a layer, or around those that have a parameter, as one from now on.

    If that one is already, the next outer one. Of several layers that have the parameter, the last ones come first: a table
    is used past its layer in a head. Layers that only contain others (`nn.Sequential`) use no weights. The root comes last, for
    a parameter alone. Returns False if no layer is left to take.
    """
    known = _classes.setdefault(root, set())
    modules = dict(user_names.named_modules(root))
    p = dict(user_names.named_parameters(root)).get(name)
    inside = (
        [layer for layer, m in modules.items() if any(p is own for own in m._parameters.values())]
        if p is not None
        else []
    )
    while inside := [layer.rpartition(".")[0] for layer in inside or [name] if layer]:
        for layer in reversed(inside):
            kind = type(modules.get(layer, nn.ModuleList()))
            lists = kind.forward in (nn.ModuleList.forward, nn.Sequential.forward)
            if kind not in known and not lists and (layer or p is not None):
                known.add(kind)
                return True
        if not any(inside):
            break
    return False


def take_known(root: nn.Module, uses: Iterable[tuple[str, str]]) -> bool:
    """Tap the layers as one that used a parameter of a child, as saved factors say; True if some were not known to.

    `uses`: (layer, name of a parameter that its tap explained).
    """
    known, modules = _classes.setdefault(root, set()), dict(user_names.named_modules(root))
    before = len(known)
    for layer, parameter in uses:
        child = parameter.rpartition(".")[0]
        if layer in modules and child in modules and child != layer and f"{child}.".startswith(layer and f"{layer}."):
            listed = isinstance(modules[child], nn.ParameterList | nn.ParameterDict)
            site = site_for(modules[layer])
            if not listed and not (site is not None and site.whole):
                known.add(type(modules[layer]))
    return len(known) > before


def restore(root: nn.Module, classes: frozenset[type[nn.Module]]) -> None:
    """Tap layers of exactly these classes as one layer from now on."""
    _classes[root] = set(classes)
