"""Modules that private training cannot run: they mix the samples of a batch, or store something of them in the forward."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from gramian.core.errors import GramianError
from gramian.taps.model.user_names import is_compiled, named_modules
from gramian.taps.sites import Site, site_for


def layers_with_sites(root: nn.Module) -> list[tuple[str, nn.Module, Site]]:
    """(user's name, module, site) of every layer that has a site (the gradient formulas for its type), trained or frozen."""
    return [(name, module, site) for name, module in named_modules(root) if (site := site_for(module)) is not None]


def refuse_mixing(layers: Sequence[tuple[str, nn.Module, Site]]) -> None:
    """Raise a `GramianError` for a layer which, in its present mode, mixes samples or stores something of them.

    `layers` is the result of `layers_with_sites`; the error names the layer.
    """
    for name, layer, site in layers:
        reason = site.check_per_sample(layer) or (site.check(layer) if site.kind == "embedding" else None)
        if reason is None and isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
            reason = (
                "stores running statistics of the samples without noise; expected track_running_stats=False, or eval()"
            )
        if reason is not None:
            raise GramianError(f"{name or 'model'} ({type(layer).__name__}) {reason}")


def refuse_compiled(module: nn.Module) -> None:
    """Raise a `GramianError` for a tensor-parallel model of which some module is compiled."""
    if any(is_compiled(inner) for inner in module.modules()):
        raise GramianError("module: is tensor parallel and compiled; expected eager mode")
