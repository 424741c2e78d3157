"""The tap of one layer: its name, its site, and the parameters whose per-sample gradients the site explains.

A tap lives as long as its layer, so compiled graphs, which name it by a number, stay valid over captures. It stores facts
only:
`tapped_model` has the state of the model, `layer_forward` runs the layer, `replaced_forward` installs the tap.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext

from gramian.core.errors import GramianError
from gramian.taps.model.find_layers import FoundLayer
from gramian.taps.sites.site import Site

next_key = itertools.count().__next__
"""Return the next of the numbers by which compiled graphs name taps and roots."""


class Tap:
    """Facts about one tapped layer of a model: number, name, site, and the parameters whose gradients it computes."""

    def __init__(self, module: nn.Module) -> None:
        """Refer weakly to the layer; `describe` fills in name, site and parameters at every installation."""
        self.number = next_key()
        self.key = torch.tensor(self.number)
        """The tap's number as an input of a graph: not a constant, so that one graph serves all blocks that look alike."""
        self.owner = weakref.ref(module)
        self.name = ""
        self.site: Site | None = None
        """The site of the layer; None for a root without parameters of its own."""
        self.parameters: dict[str, str] = {}
        """{local name: the user's name} of the parameters whose gradients this tap computes; tied ones under their first name.
        """
        self.is_root = False
        self.run: Callable[..., Any] = lambda *_: None
        """`layer_forward.run_layer`, kept out of compiled graphs if the site does not compile; set at installation."""
        self.traced_uses = 0
        """Number of calls of the layer in the graph that was traced last."""
        self._tracing: Any = lambda: None

    def describe(self, found: FoundLayer, is_root: bool) -> None:
        """Copy name, site and parameters from what `find_layers` found about the layer."""
        self.name, self.site, self.parameters, self.is_root = found.name, found.site, found.parameters, is_root

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Context manager that puts the layer's name in front of GramianErrors raised inside it."""
        try:
            yield
        except GramianError as error:
            name = f"{self.name or 'model'} ({type(self.owner()).__name__}) "
            raise GramianError(str(error) if str(error).startswith(name) else name + str(error)) from None

    def count_traced_use(self) -> int:
        """Count a call of this layer in the graph being traced; returns the number of earlier ones. Runs at trace time only."""
        context = TracingContext.try_get()
        if self._tracing() is not context:
            self._tracing, self.traced_uses = weakref.ref(context), 0
        self.traced_uses += 1
        return self.traced_uses - 1

    # What torch.compiler.assume_constant_result does; calling it would import the compiler with gramian.
    count_traced_use._dynamo_marked_constant = True  # type: ignore[attr-defined]
