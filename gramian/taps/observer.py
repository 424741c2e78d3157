"""The observer: an identity function on a layer's outputs whose backward reports saved inputs and output gradients.

The layer's own operation runs unchanged, so its output and all gradients are what they would be without gramian, bit for bit.
The identity returns `_unsafe_view(y)`: no copy, and not a view to autograd, so in-place activations behind it keep working.

In eager mode the backward calls `layer_backward.report`. Under `torch.compile` it is one opaque operator in the compiled
backward (`gramian::emit`), so any statistic runs on real tensors, outside the graph, without a graph break. The tap and the
pass (a forward and its backward) enter the graph as small CPU tensors, not as constants, so layers of equal structure share
one graph.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.layer_backward import report, report_compiled
from gramian.taps.passes import in_backward
from gramian.taps.sites.site import observed
from gramian.taps.tap import Tap
from gramian.taps.tapped_model import TappedModel, TapUse, rows_of_call

UNTRACKED_VIEW = torch.ops.aten._unsafe_view.default

_taps: "weakref.WeakValueDictionary[int, Tap]" = weakref.WeakValueDictionary()
_models: "weakref.WeakValueDictionary[int, TappedModel]" = weakref.WeakValueDictionary()


def register_tap(tap: Tap, model: TappedModel) -> None:
    """Register a tap and its model under the tap's number, by which compiled graphs find them."""
    _taps[tap.number], _models[tap.number] = tap, model


class Observe(torch.autograd.Function):
    """Identity on the outputs of a layer; its backward reports saved inputs and output gradients (eager mode)."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, use: TapUse, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the first `count` tensors (the outputs) and save the others with `use`, the description of the call.

        `probe` requires a gradient, so that a backward always runs.
        """
        ctx.save_for_backward(*tensors[count:])
        ctx.use, ctx.saved = use, len(tensors) - count
        return tuple([UNTRACKED_VIEW(y, y.shape) for y in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Report saved inputs and output gradients to the listeners, and pass the gradients on unchanged."""
        saved = [t.detach() for t in ctx.saved_tensors]  # the values, not the graph that made them
        with ctx.use.model.told():
            report(ctx.use, saved, list(gradients))
        return None, None, None, *gradients, *[None] * ctx.saved


class ObserveInPlace(Observe):
    """The same observer behind a tensor that was written in place, which other code goes on to use."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, use: TapUse, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the first tensor itself and save all but the first, as `Observe` does."""
        ctx.save_for_backward(*tensors[1:])
        ctx.use, ctx.saved = use, len(tensors) - 1
        ctx.mark_dirty(tensors[0])
        return tensors[:1]


class ObserveCompiled(torch.autograd.Function):
    """Identity on the outputs of a layer in a compiled graph; its backward reports through the operator `gramian::emit`."""

    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, ticket: Tensor, key: Tensor, ordinal: int, count: int, *tensors: Tensor
    ) -> Any:
        """Return the first `count` tensors (the outputs); save the others and what identifies the call.

        That is `ticket` (number of the pass), `key` (number of the tap) and `ordinal` (number of earlier calls of the layer).
        `probe` requires a gradient, so that a backward always runs.
        """
        ctx.save_for_backward(ticket, key, *tensors[count:])
        ctx.ordinal, ctx.saved = ordinal, len(tensors) - count
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Report through `gramian::emit`, whose result is the probe's gradient, and pass the gradients on unchanged."""
        ticket, key, *saved = ctx.saved_tensors
        reported = torch.ops.gramian.emit(ticket, key, ctx.ordinal, saved, list(gradients))
        return reported, None, None, None, None, *gradients, *[None] * ctx.saved


@torch.library.custom_op("gramian::emit", mutates_args=())
def _emit(ticket: Tensor, key: Tensor, ordinal: int, saved: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Report the saved inputs and output gradients of one call of a layer, from a compiled backward, to the layer's tap.

    `ticket`: number of the pass. `key`: number of the tap. `ordinal`: number of earlier calls of the layer. Returns a 0-dim 1,
    the gradient of the probe.
    """
    model = _models[int(key)]
    with model.told():
        report_compiled(model, _taps[int(key)], int(ticket), ordinal, saved, gradients)
    return torch.ones(())


@_emit.register_fake
def _(ticket: Tensor, key: Tensor, ordinal: int, saved: list[Tensor], gradients: list[Tensor]) -> Tensor:
    return torch.empty(())


def observe(model: TappedModel, tap: Tap, output: Any, saved: list[Tensor], extra: Any) -> Any:
    """Apply the observer to a layer's outputs and return them in the same structure.

    Its backward computes gradients from the tensors `saved` and, in eager mode, `extra`, which the layer's site returned.
    """
    if isinstance(output, Tensor):  # the usual case, and the one that compiles
        outputs, spec, places, leaves = [output], None, [0], [output]
    else:
        leaves, spec = pytree.tree_flatten(output)
        places = observed(leaves, model.rule.withholds)
        outputs = [leaves[i] for i in places]
    if torch.compiler.is_compiling():
        ordinal = tap.count_traced_use()
        seen = ObserveCompiled.apply(  # type: ignore[no-untyped-call]
            model.probe, model.ticket, tap.key, ordinal, len(outputs), *outputs, *saved
        )
    else:
        use = open_use(model, tap, extra, saved, outputs)
        seen = Observe.apply(  # type: ignore[no-untyped-call]
            model.probe, use, len(outputs), *outputs, *saved
        )
    if spec is None:
        return seen[0]
    for place, y in zip(places, seen, strict=True):
        leaves[place] = y
    return pytree.tree_unflatten(leaves, spec)


def observe_product(model: TappedModel, tap: Tap, y: Tensor, saved: list[Tensor], layout: Any) -> Tensor:
    """Put an observer behind one product of a weight inside a layer; `saved` and `layout` are the site's (eager mode)."""
    name = tap.parameters[layout.view.name]
    use = open_use(model, tap, layout, saved, [y], [name])
    if model.rule.withholds and not in_backward() and model.proof_run is None:
        model.rule.foresee_product(name, layout, y, saved)
    function = ObserveInPlace if layout.in_place else Observe
    seen: tuple[Tensor, ...] = function.apply(model.probe, use, 1, y, *saved)  # type: ignore[no-untyped-call]
    return seen[0]


def open_use(
    model: TappedModel,
    tap: Tap,
    extra: Any,
    saved: Sequence[Tensor],
    outputs: Sequence[Tensor],
    parameters: Sequence[str] | None = None,
) -> TapUse:
    """Record one call of a layer in the pass under way, count the uses of its parameters, and return the call (eager mode).

    `parameters`: names of those of a product inside the layer, which is no call of it; None: the layer itself was called.

    Raises:
        GramianError: if the layer runs outside a forward of the root module while a listener needs proven per-sample
            gradients, or before any such forward and no listener gave a batch size.
    """
    if in_backward():  # a checkpoint's second run, which gets no backward of its own
        return TapUse(model, tap, None, None, inside_backward=True)
    outside = model.passes.current is None or model.passes.current.returned
    if outside and model.tells_samples_apart:
        raise GramianError(
            f"{tap.name or 'model'}: ran outside a forward of the captured model, where no proof sees whose row is which; "
            'expected one module whose forward makes every call, or proof="off" (and batch_size=, if it is never called)'
        )
    if model.passes.current is None:
        if model.batch_size is None:
            raise GramianError(
                f"{tap.name}: ran outside a forward of the captured model; "
                "expected a call of the model itself, or batch_size="
            )
        model.batch = model.batch_size
        model.open_pass(torch.empty(model.batch, 0))
    pass_ = model.passes.current
    assert pass_ is not None
    for name in tap.parameters.values() if parameters is None else parameters:
        in_graphs_too = pass_.compiled and (model.users[name] > 1 or tap.traced_uses)  # which are not counted here
        pass_.uses[name] = sys.maxsize if in_graphs_too else pass_.uses.get(name, 0) + 1
    if parameters is not None:
        return TapUse(model, tap, pass_, extra, inside_backward=False)
    layouts = model.layouts_of(tap) if model.layouts else None
    ordinal = pass_.ordinals[tap.name] = pass_.ordinals.get(tap.name, -1) + 1
    calls = model.calls if model.proof_run is None else model.proof_run.calls
    rows = rows_of_call(saved, outputs, pass_.batch, layouts, model.tells_sizes_apart)
    calls.append((tap.name, ordinal, rows))
    return TapUse(model, tap, pass_, extra, inside_backward=False, ordinal=ordinal, layouts=layouts)
