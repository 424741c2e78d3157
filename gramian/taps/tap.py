"""The tap of one layer: its name, its site (how this kind of layer is tapped), and the parameters whose gradients it computes.

A tap exists as long as its layer. Compiled graphs refer to it by a number and so stay valid from one capture to the next. It
only stores these facts: `tapped_model` has the state of the model, `layer_forward` runs it, `replaced_forward` installs it.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext

from gramian.core.errors import GramianError
from gramian.taps.model.find_layers import FoundLayer
from gramian.taps.sites import InlineProducts
from gramian.taps.sites.site import Site

next_key = itertools.count().__next__
"""Function that returns a new number on every call; compiled graphs refer to taps and root modules by these numbers."""


class LayerRefused(GramianError):
    """The error of one layer, or of a parameter, which its tap cannot explain; a proof may tap the layer around it as one."""

    def __init__(self, message: str, layer: str = "", parameter: str = "") -> None:
        """Store the message, and the names of the layer and of the parameter, or ""."""
        super().__init__(message)
        self.layer, self.parameter = layer, parameter


class Tap:
    """Facts about one tapped layer of a model: number, name, site (how it is tapped), and parameters that get gradients."""

    def __init__(self, module: nn.Module) -> None:
        """Store a weak reference to the layer; `describe` sets name, site and parameters each time the tap is installed."""
        self.number = next_key()
        self.key = torch.tensor(self.number)
        """The tap's number as a tensor: an input of compiled graphs, not a constant: layers of equal structure share one."""
        self.owner = weakref.ref(module)
        self.name = ""
        self.site: Site | None = None
        """How the layer is tapped; None for a root module without direct parameters."""
        self.parameters: dict[str, str] = {}
        """{name inside the layer: name in the user's model} of the parameters whose gradients this tap computes; a tied
        parameter has the first of its names in the model."""
        self.products: InlineProducts | None = None
        """The site, if it is one of products inside the layer, whose fallback may take its place from call to call."""
        self.is_root = False
        self.run: Callable[..., Any] = lambda *_: None
        """Function that runs the layer: `layer_forward.run_layer`, excluded from compilation if `site.compiles` is False."""
        self.traced_uses = 0
        """Number of calls of the layer in the graph that was traced last."""
        self._tracing: Any = lambda: None

    def describe(self, found: FoundLayer, is_root: bool) -> None:
        """Set name, site and parameters from `found`; `is_root`: the layer is the root module of the model."""
        self.name, self.site, self.parameters, self.is_root = found.name, found.site, found.parameters, is_root
        self.products = found.site if isinstance(found.site, InlineProducts) else None

    def named_errors(self) -> "NamedErrors":
        """Context manager that puts the layer's name in front of GramianErrors raised inside it."""
        return NamedErrors(self)

    def count_traced_use(self) -> int:
        """Count a call of this layer while `torch.compile` traces a graph; returns the number of earlier calls in the graph."""
        context = TracingContext.try_get()
        if self._tracing() is not context:
            self._tracing, self.traced_uses = weakref.ref(context), 0
        self.traced_uses += 1
        return self.traced_uses - 1

    # What torch.compiler.assume_constant_result does; calling it would import the compiler with gramian.
    count_traced_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


class NamedErrors:
    """The context manager of `Tap.named_errors`: a class, since every call of a layer enters some."""

    __slots__ = ("tap",)

    def __init__(self, tap: Tap) -> None:
        """Of the layer of this tap."""
        self.tap = tap

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise an error with the layer's name in place of one without it."""
        if isinstance(error, GramianError):
            name = f"{self.tap.name or 'model'} ({type(self.tap.owner()).__name__}) "
            if not str(error).startswith(name):
                raise LayerRefused(name + str(error), self.tap.name) from None
