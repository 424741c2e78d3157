"""Find the layers of a model that can be tapped, and its trainable parameters, under the user's names."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gramian.core.errors import GramianError
from gramian.taps.model import user_names
from gramian.taps.model.whole_layers import whole_classes
from gramian.taps.products.sides import LayerForm
from gramian.taps.roles import ParameterInfo
from gramian.taps.sites import Generic, InlineProducts, Site, site_for


@dataclass(frozen=True)
class FoundLayer:
    """One layer of a model with its site (how it is tapped) and the names of its parameters."""

    name: str
    module: nn.Module
    site: Site | None
    """How the layer is tapped; None for the root module, if it has no direct parameters."""
    parameters: dict[str, str]
    """{name inside the layer: name in the model}; a tied parameter has the first name under which it was found."""

    @cached_property
    def forms(self) -> dict[str, LayerForm]:
        """{name of a parameter inside the layer, or of a part of one: its form as a matrix} (`Site.forms`)."""
        return {} if self.site is None else self.site.forms(self.module)


def discover(root: nn.Module) -> tuple[list[FoundLayer], dict[str, ParameterInfo]]:
    """Find all layers to tap, the root module always among them, and every trainable parameter.

    Args:
        root: the user's module, unwrapped.

    Returns:
        The layers, parents first, and {name in the model: facts about a trainable parameter}.

    Raises:
        GramianError: if nothing is trainable; for a TorchScript module, a lazy parameter without values or a complex one; or
            if a layer with trainable parameters cannot be tapped.
    """
    user_name: dict[int, str] = {}
    explained_by_parent: set[int] = set()
    layers: list[FoundLayer] = []
    whole = whole_classes(root)
    parameters: dict[str, ParameterInfo] = {}
    for name, module in user_names.named_modules(root):
        if isinstance(module, torch.jit.ScriptModule):
            raise GramianError(
                f"{name or 'model'} (TorchScript) cannot be tapped; expected the module it was made from"
            )
        site = InlineProducts(Generic(whole=True)) if type(module) in whole else site_for(module)
        site = None if id(module) in explained_by_parent else site
        if site is None and module is not root:
            continue
        owned: dict[str, str] = {}
        for local in site.owned(module) if site is not None else ():
            p = module.get_parameter(local)
            if is_lazy(p):
                raise GramianError(
                    f"{name or 'model'} ({type(module).__name__}) has no weights yet; expected one forward before the capture"
                )
            if p.is_complex() and p.requires_grad:
                raise GramianError(
                    f"{user_names.join(name, local)}: is a complex parameter; "
                    "expected a real one, and torch.view_as_complex of it"
                )
            owned[local] = user_name.setdefault(id(p), user_names.join(name, local))
            if p.requires_grad and site is not None:
                info = ParameterInfo(owned[local], (name,), site.kind, tuple(p.shape), p.dtype, p.device)
                known = parameters.setdefault(owned[local], info)
                if known is not info:
                    parameters[owned[local]] = replace(known, layers=(*known.layers, name))
        if site is not None:
            if site.whole:
                explained_by_parent.update(id(child) for child in module.modules() if child is not module)
            if module is root and getattr(module, "batch_first", True) is False:
                raise GramianError(
                    f"model ({type(module).__name__}) has the batch on axis 1; expected batch_first=True, or the layer inside "
                    "a module whose input has the batch first"
                )
            reason = site.check(module) if any(local_name in parameters for local_name in owned.values()) else None
            if reason is not None:
                raise GramianError(f"{name or 'model'} ({type(module).__name__}) {reason}")
        layers.append(FoundLayer(name, module, site, owned))
    if not parameters:
        raise GramianError("model: has no trainable parameter; expected at least one with requires_grad=True")
    return layers, parameters
