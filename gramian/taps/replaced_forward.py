"""The function that replaces a tapped layer's `forward` on its instance while a capture is open.

It takes `self`, so a deep copy of the module runs on its own weights; class, name and `state_dict` stay the user's.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.taps.layer_forward import run_layer, run_untapped
from gramian.taps.model.find_layers import FoundLayer
from gramian.taps.observer import register_tap
from gramian.taps.root_forward import RootForward
from gramian.taps.tap import Tap
from gramian.taps.tapped_model import TappedModel


class Listening:
    """A flag for this process: True if any model has a listener (an open capture or gradient rule)."""

    anywhere = False


LISTENING = Listening()
"""The one `Listening` flag, read by all taps: without a listener, taps cost a compiled graph one guard."""


class ReplacedForward:
    """The replacement of one layer's forward; it lives as long as the layer, so compiled graphs stay valid."""

    def __init__(self, module: nn.Module, model: TappedModel, root_forward: RootForward) -> None:
        """Create the tap and the replacement function of a module; nothing is installed yet."""
        self.tap = Tap(module)
        self._model, self._root_forward = model, root_forward
        register_tap(self.tap, model)
        self._original: Callable[..., Any] | None = None
        self._forward = self._usual_forward = self._replacement(None)

    def install(self, found: FoundLayer, is_root: bool) -> None:
        """Set the replacement as `forward` of the module's instance; one that other code had set there is stored and called.

        Raises:
            GramianError: if the module is tapped through another root.
        """
        tap, module = self.tap, found.module
        tap.describe(found, is_root)
        tap.run = run_layer
        if tap.site is not None and not tap.site.compiles:
            layer = f"{tap.name or 'model'} ({type(module).__name__})"
            reason = f"{layer} has no compiled tap; expected a registered site, or fullgraph=False"
            tap.run = torch.compiler.disable(run_layer, reason=reason)
        there = module.__dict__.get("forward")
        function = getattr(there, "__func__", None)
        if function is not self._forward and getattr(function, "tapped", lambda: None)() is module:
            raise GramianError(
                f"{tap.name or 'model'}: is tapped through another root; expected the same model in both captures"
            )
        left_by_a_copy = hasattr(function, "tapped")
        self._original = None if left_by_a_copy else there
        self._forward = self._usual_forward if self._original is None else self._replacement(self._original)
        module.forward = types.MethodType(self._forward, module)

    def uninstall(self) -> None:
        """Remove the replacement from the module's instance and restore the forward that was there before."""
        module = self.tap.owner()
        if module is not None and getattr(module.__dict__.get("forward"), "__func__", None) is self._forward:
            del module.__dict__["forward"]
            if self._original is not None:
                module.forward = self._original
        self._original, self._forward = None, self._usual_forward

    def _replacement(self, original: Callable[..., Any] | None) -> Callable[..., Any]:
        """Make the replacement function; `original` is a forward that other code had set on the instance, or None."""
        tap, model, root_forward = self.tap, self._model, self._root_forward
        owner = tap.owner

        def listened(self: nn.Module, args: Any, kwargs: Any) -> Any:
            plain = _plain(self, original, owner)
            if not model.live or owner() is not self or not torch.is_grad_enabled():
                if model.weights is None or owner() is not self:
                    return plain(*args, **kwargs)
                return run_untapped(model, tap, self, plain, args, kwargs)
            if not tap.is_root:
                return tap.run(model, tap, self, plain, args, kwargs)
            if not torch.compiler.is_compiling():
                return root_forward.run(tap, self, plain, args, kwargs)
            root_forward.enter(args, kwargs)
            return plain(*args, **kwargs) if tap.site is None else tap.run(model, tap, self, plain, args, kwargs)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if LISTENING.anywhere:
                return listened(self, args, kwargs)
            return type(self).forward(self, *args, **kwargs)

        def forward_of_another(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if LISTENING.anywhere:
                return listened(self, args, kwargs)
            return _plain(self, original, owner)(*args, **kwargs)

        chosen = forward if original is None else forward_of_another
        chosen.tapped = owner  # type: ignore[attr-defined]
        chosen.__name__ = "forward"  # under which a pickle finds the class's own
        return chosen


def _plain(module: nn.Module, original: Any, owner: Any) -> Callable[..., Any]:
    """The forward to run without the tap: that of the module's class, or `original` if other code had set one on the instance.

    `owner()` is the tapped module; if `module` is a copy of it, `original` is bound to the copy.
    """
    if original is None:
        return partial(type(module).forward, module)
    if owner() is not module and isinstance(original, types.MethodType):
        return partial(original.__func__, module)
    return cast(Callable[..., Any], original)
