"""Weights that a hook computes before each forward: `spectral_norm`, `weight_norm` and `prune` of `torch.nn.utils`.

The hook sets `layer.weight` to a function of parameters (`weight_orig`; `weight_g` and `weight_v`) and buffers (`weight_u` and
`weight_v`; `weight_mask`) of the layer. It runs before the layer's forward, so a second run of the forward alone would not see
the parameters. `WithHookedWeights` computes the weights again inside: as the hook has just done, without its step of the power
iteration, so values are the same and buffers do not change.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Hook = SpectralNorm | WeightNorm | BasePruningMethod


def weight_hooks(module: nn.Module) -> list[Hook]:
    """The hooks of a module that compute a weight of it, in their order."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]


class WithHookedWeights:
    """A layer's forward on weights that are computed anew from its parameters and buffers."""

    def __init__(self, module: nn.Module, hooks: Sequence[Hook], plain: Callable[..., Any]) -> None:
        """Store the layer, the hooks that compute its weights, and its own forward (`plain`)."""
        self._module, self._hooks, self._plain = module, hooks, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; afterwards the layer has the weights that the hooks have set."""
        before = {hook: getattr(self._module, _name(hook)) for hook in self._hooks}
        try:
            for hook in self._hooks:
                setattr(self._module, _name(hook), _computed(hook, self._module))
            return self._plain(*args, **kwargs)
        finally:
            for hook, weight in before.items():
                setattr(self._module, _name(hook), weight)


def _name(hook: Hook) -> str:
    return hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name


def _computed(hook: Hook, module: nn.Module) -> Any:
    if isinstance(hook, BasePruningMethod):
        return hook.apply_mask(module)
    if not isinstance(hook, SpectralNorm):
        return hook.compute_weight(module)
    vectors = {key: module._buffers[key] for key in (f"{hook.name}_u", f"{hook.name}_v")}
    module._buffers |= {
        key: None if b is None else b.clone() for key, b in vectors.items()
    }  # later forwards write into them
    try:
        return hook.compute_weight(module, do_power_iteration=False)
    finally:
        module._buffers |= vectors
