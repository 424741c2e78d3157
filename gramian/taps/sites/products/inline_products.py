"""Sites of layers whose weights only enter products and sums of rows: attention's projections, fused experts.

The layer runs its own code, whichever kernel that is: every product with a weight is seen where it is called, its input is
saved and its output gets an observer of its own, so that the backward has the two sides of each weight's gradient. Nothing runs
again, and dropout between the products needs nothing. Which sample a row is of is followed through the code (`row_owners`).

A layer that uses a weight otherwise, or rows of which it is not known whose they are, runs again sample by sample (`fallback`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gramian.taps.gradients import PerSampleGradient
from gramian.taps.model import user_names
from gramian.taps.model.dropout import python_body
from gramian.taps.products.banks import MatrixSides
from gramian.taps.products.parts import owner
from gramian.taps.products.sides import LayerForm
from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.sites.borrowed import own_parameters
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.row_owners import RowOwners
from gramian.taps.sites.products.use_layout import UseLayout, save
from gramian.taps.sites.products.weight_use import find_uses
from gramian.taps.sites.products.weight_views import UnknownUse, WeightViews
from gramian.taps.sites.site import INLINE, Site

Observe = Callable[[Tensor, list[Tensor], UseLayout], Tensor]
"""Function (y, saved tensors, layout) that puts an observer behind the result y of a product or sum."""


class InlineProducts(Site):
    """Site of a layer whose weights are used in products that its own code calls, by functions of torch."""

    kind = INLINE
    compiles = False
    inline = True

    def __init__(self, fallback: Generic) -> None:
        """Set the site that takes layers which use a weight otherwise; parameters and children are as there."""
        self.fallback, self.whole = fallback, fallback.whole

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """Names, inside the module, of its parameters, and of those of its children if these are not tapped."""
        return self.fallback.owned(module)

    def check(self, module: nn.Module) -> str | None:
        """Error text if the fallback cannot take this module; None if it can."""
        return self.fallback.check(module)

    def forms(self, module: nn.Module) -> dict[str, LayerForm]:
        """The matrices that the layer is taken to multiply by, as its fallback has them."""
        return self.fallback.forms(module)

    def matrix_sides(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, MatrixSides]:
        """Inputs and output gradients of the matrices of one product's weight, whose `UseLayout` is `extra`."""
        keys = [key for key in self.forms(module) if owner(key) == extra.view.name]
        return {} if not keys else extra.matrix_sides(keys, saved, output_gradients[0], batch)

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """Those of the fallback, which may run the layer later."""
        return self.fallback.batch_axes(module, output)

    def observed(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        batch: int,
        observe: Observe,
        layouts: CallLayouts | None = None,
    ) -> Callable[..., Any]:
        """The layer's own `forward` with an observer behind each product of a trained weight.

        `layouts`: where the samples lie in its inputs, as a row proof has found; None: as the fallback assumes.
        It raises UnknownUse if a weight is used otherwise, if the samples of its rows are not known, or if no function of torch
        shows any use of a weight (one inside an `autograd.Function`, say).
        """
        trained = [name for name, p in own_parameters(module, self.whole).items() if p.requires_grad]

        def run(*args: Any, **kwargs: Any) -> Any:
            weights = {name: user_names.parameter(module, name) for name in trained}
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            found = [None] * len(inputs) if layouts is None else layouts.inputs
            places = [own or self.fallback.assumed(module, x) for own, x in zip(found, inputs, strict=True)]
            owners = RowOwners(inputs, places, batch)
            with ProductMode(WeightViews(weights), owners, batch, observe) as mode:
                output = forward(*args, **kwargs)
            if batch and torch.is_grad_enabled() and mode.used < set(trained):
                raise UnknownUse("a weight that no function uses")
            return output

        return run

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of the one weight of a product, whose `UseLayout` is `extra`."""
        return {extra.view.name: extra.gradient(saved, output_gradients[0], batch)}


class ProductMode(TorchFunctionMode):
    """Torch function mode that follows rows and weights through a layer's code, and observes products of both."""

    def __init__(self, views: WeightViews, owners: RowOwners, batch: int, observe: Observe) -> None:
        """Begin a call of the layer on these weights and inputs, for `batch` samples."""
        super().__init__()
        self._views, self._owners, self._batch, self._observe = views, owners, batch, observe
        self.used: set[str] = set()
        """Names of the weights whose products or sums were observed."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # written in Python, whose calls a mode would not see
            with self:
                return python_body(func)(*args, **kwargs)
        name, result = _name(func), func(*args, **kwargs)
        if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(result)):
            return result  # a shape, a dtype, a place
        of_weights = any(self._views.get(t) is not None for t in pytree.tree_leaves((args, kwargs)))
        if not of_weights or not torch.is_grad_enabled():
            self._owners.follow(name, func, args, kwargs, result)
            return result
        if self._views.follow(name, args, kwargs, result):
            return result
        y = result
        for use in find_uses(name, args, kwargs, self._views.get):
            owners = self._owners.of_use(use.x, y, use.columns)
            y = self._observe(y, *save(use, y, owners, self._batch))
            self._owners.set(y, owners)
            self.used.add(use.view.name)
        return y


def _name(func: Any) -> str:
    """The name of a function of torch; of an attribute that is read, the attribute's."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name
