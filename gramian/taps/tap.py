"""The tap: one layer's forward, followed by an observer that sees (input, output gradient) once in the backward pass.

The layer's own operation runs untouched, so its output and all gradients are what they would be without gramian, bit for
bit. Behind it stands an identity, `Observe`, whose backward hands (kept inputs, output gradient) to the hub. The identity
returns `_unsafe_view(y)`: no copy, and not a view to autograd, so in-place activations behind it keep working.

In eager mode the observer calls the hub directly. Under `torch.compile` it becomes one opaque operator in the compiled
backward (`gramian::emit`), so any statistic runs on real tensors, outside the graph, while the graph stays whole. The tap
and the pass enter the graph as small CPU tensors, not as constants: one graph serves all blocks that look alike.
"""

import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.find_layers import FoundLayer
from gramian.taps.sites.site import Site, observed

if TYPE_CHECKING:
    from gramian.taps.hub import Hub

_keys = itertools.count()


class Listeners:
    """Whether anybody listens to any model in this process."""

    anywhere = False


LISTENERS = Listeners()
_taps: "weakref.WeakValueDictionary[int, Tap]" = weakref.WeakValueDictionary()
_hubs: "weakref.WeakValueDictionary[int, Hub]" = weakref.WeakValueDictionary()


def register_hub(hub: "Hub") -> int:
    """Make a hub known to compiled graphs and return its number there."""
    number = next(_keys)
    _hubs[number] = hub
    return number


class TapUse:
    """One call of a tapped layer in one pass (eager mode)."""

    __slots__ = ("extra", "inside_backward", "ordinal", "pass_", "tap")

    def __init__(self, tap: "Tap", pass_: Any, extra: Any, inside_backward: bool, ordinal: int = 0) -> None:
        """Remember who was called, how often before in which pass, and whether that was while a backward was running."""
        self.tap, self.pass_, self.extra, self.inside_backward = tap, pass_, extra, inside_backward
        self.ordinal = ordinal


class Observe(torch.autograd.Function):
    """Identity on the outputs of a layer; its backward reports the use."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, use: TapUse, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Outputs first, then what to keep. `probe` makes sure that there is a backward even if no output has one."""
        ctx.save_for_backward(*tensors[count:])
        ctx.use, ctx.kept = use, len(tensors) - count
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Report, and pass the gradients on as they are."""
        kept = [t.detach() for t in ctx.saved_tensors]  # the values, not the graph that made them
        ctx.use.tap.hub.report(ctx.use, kept, list(gradients))
        return None, None, None, *gradients, *[None] * ctx.kept


class ObserveCompiled(torch.autograd.Function):
    """The same for a graph under `torch.compile`: the report is the gradient of the probe."""

    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, ticket: Tensor, key: Tensor, ordinal: int, count: int, *tensors: Tensor
    ) -> Any:
        """As `Observe.forward`; the pass and the tap are named by tensors."""
        ctx.save_for_backward(ticket, key, *tensors[count:])
        ctx.ordinal, ctx.kept = ordinal, len(tensors) - count
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """As `Observe.backward`, through an operator."""
        ticket, key, *kept = ctx.saved_tensors
        reported = torch.ops.gramian.emit(ticket, key, ctx.ordinal, kept, list(gradients))
        return reported, None, None, None, None, *gradients, *[None] * ctx.kept


@torch.library.custom_op("gramian::begin", mutates_args=())
def _begin(
    hub: Tensor, first: Tensor, text: str, tensors: list[Tensor], integers: list[int], reals: list[float]
) -> Tensor:
    """Prove and open a pass when a compiled root runs; the ticket names it in the backward."""
    own = _hubs[int(hub)]
    if own.live:
        own.prove_compiled(first.shape[0], text, tensors, integers, reals)
    return torch.tensor([own.open_pass(first)])


@_begin.register_fake
def _(hub: Tensor, first: Tensor, text: str, tensors: list[Tensor], integers: list[int], reals: list[float]) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("gramian::emit", mutates_args=())
def _emit(ticket: Tensor, key: Tensor, ordinal: int, kept: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Report one use from a compiled backward."""
    tap = _taps[int(key)]
    tap.hub.report_compiled(tap, int(ticket), ordinal, kept, gradients)
    return torch.ones(())


@_emit.register_fake
def _(ticket: Tensor, key: Tensor, ordinal: int, kept: list[Tensor], gradients: list[Tensor]) -> Tensor:
    return torch.empty(())


class Tap:
    """What gramian keeps about one layer. Lives as long as the layer, so compiled graphs stay valid over captures."""

    def __init__(self, module: nn.Module, hub: "Hub") -> None:
        """Make the replacement forward; nothing is installed yet."""
        self.number = next(_keys)
        self.key = torch.tensor(self.number)
        _taps[self.number] = self
        self.owner = weakref.ref(module)
        self.hub = hub
        self.name = ""
        self.site: Site | None = None
        self.parameters: dict[str, str] = {}
        """{local name: the user's name} of the parameters this tap explains; tied ones under their first name."""
        self.is_root = False
        self.run: Callable[..., Any] = hub.run
        self._original: Callable[..., Any] | None = None
        self.traced_uses = 0
        self._tracing: Any = lambda: None
        self._forward = self._usual_forward = _replacement(self)

    def describe(self, found: FoundLayer, is_root: bool) -> None:
        """Take over what was found about the layer.

        Raises:
            GramianError: if a tap of another hub stands on it.
        """
        self.name, self.site, self.parameters, self.is_root = found.name, found.site, found.parameters, is_root
        self.run = self.hub.run
        if self.site is not None and not self.site.compiles:
            layer = f"{self.name or 'model'} ({type(found.module).__name__})"
            reason = f"{layer} has no compiled tap; expected a registered site, or fullgraph=False"
            self.run = torch.compiler.disable(self.hub.run, reason=reason)
        if self._taken(found.module):
            raise GramianError(
                f"{self.name or 'model'}: is tapped through another root; expected the same model in both captures"
            )

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Put the layer's name in front of an error that comes from its site."""
        try:
            yield
        except GramianError as error:
            name = f"{self.name or 'model'} ({type(self.owner()).__name__}) "
            raise GramianError(str(error) if str(error).startswith(name) else name + str(error)) from None

    def _taken(self, module: nn.Module) -> bool:
        """True if a tap of another hub stands on the module."""
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        return function is not self._forward and getattr(function, "tapped", lambda: None)() is module

    def install(self, module: nn.Module) -> None:
        """Put the replacement on the instance, remembering a forward that somebody else put there."""
        there = module.__dict__.get("forward")
        left_by_a_copy = hasattr(getattr(there, "__func__", None), "tapped")
        self._original = None if left_by_a_copy else there
        self._forward = self._usual_forward if self._original is None else _replacement(self, self._original)
        module.forward = types.MethodType(self._forward, module)

    def uninstall(self) -> None:
        """Give the instance its own forward back."""
        module = self.owner()
        if module is not None and getattr(module.__dict__.get("forward"), "__func__", None) is self._forward:
            del module.__dict__["forward"]
            if self._original is not None:
                module.forward = self._original
        self._original, self._forward = None, self._usual_forward

    def observe(self, output: Any, kept: list[Tensor], extra: Any) -> Any:
        """Put the observer behind the outputs of one use."""
        hub = self.hub
        if isinstance(output, Tensor):  # the usual case, and the one that compiles
            outputs, spec, places, leaves = [output], None, [0], [output]
        else:
            leaves, spec = pytree.tree_flatten(output)
            places = observed(leaves, hub.rule.withholds)
            outputs = [leaves[i] for i in places]
        if torch.compiler.is_compiling():
            ordinal = self.count_traced_use()
            seen = ObserveCompiled.apply(  # type: ignore[no-untyped-call]
                hub.probe, hub.ticket, self.key, ordinal, len(outputs), *outputs, *kept
            )
        else:
            use = hub.open_use(self, extra, kept, outputs)
            seen = Observe.apply(  # type: ignore[no-untyped-call]
                hub.probe, use, len(outputs), *outputs, *kept
            )
        if spec is None:
            return seen[0]
        for place, y in zip(places, seen, strict=True):
            leaves[place] = y
        return pytree.tree_unflatten(leaves, spec)

    def count_traced_use(self) -> int:
        """How often this layer was traced before in the graph being built (runs while tracing, not in the graph)."""
        context = TracingContext.try_get()
        if self._tracing() is not context:
            self._tracing, self.traced_uses = weakref.ref(context), 0
        self.traced_uses += 1
        return self.traced_uses - 1

    # What torch.compiler.assume_constant_result does; calling it would import the compiler with gramian.
    count_traced_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _replacement(tap: Tap, original: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The forward that stands on the instance. It takes `self`, so a deep copy of the module runs on its own weights.

    Args:
        tap: the tap of the instance.
        original: a forward that somebody else had put on the instance.
    """
    owner, hub = tap.owner, tap.hub

    def listened(self: nn.Module, args: Any, kwargs: Any) -> Any:
        plain = _plain(self, original, owner)
        if not hub.live or owner() is not self or not torch.is_grad_enabled():
            if hub.weights is None or owner() is not self:
                return plain(*args, **kwargs)
            return hub.run_untapped(tap, self, plain, args, kwargs)
        if not tap.is_root:
            return tap.run(tap, self, plain, args, kwargs)
        if not torch.compiler.is_compiling():
            return hub.run_root(tap, self, plain, args, kwargs)
        hub.enter_root(args, kwargs)
        return plain(*args, **kwargs) if tap.site is None else tap.run(tap, self, plain, args, kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if LISTENERS.anywhere:  # one object for all taps: idle ones cost a compiled graph one guard
            return listened(self, args, kwargs)
        return type(self).forward(self, *args, **kwargs)

    def forward_of_another(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if LISTENERS.anywhere:
            return listened(self, args, kwargs)
        return _plain(self, original, owner)(*args, **kwargs)

    chosen = forward if original is None else forward_of_another
    chosen.tapped = owner  # type: ignore[attr-defined]
    chosen.__name__ = "forward"  # under which a pickle finds the class's own
    return chosen


def _plain(module: nn.Module, original: Any, owner: Any) -> Callable[..., Any]:
    """The module's own forward: its class's, or the one that stood on the instance, bound to a copy if it is one."""
    if original is None:
        return partial(type(module).forward, module)
    if owner() is not module and isinstance(original, types.MethodType):
        return partial(original.__func__, module)
    return cast(Callable[..., Any], original)
