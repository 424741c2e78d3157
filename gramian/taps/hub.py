"""The hub of one model: its taps, the passes under way, and who listens.

A *pass* is one forward of the root and the backward through it. Uses of a parameter are counted in the forward; in the
backward they are collected until the last one is in, joined per sample and handed on. A parameter that is used once is
handed on at once, so nothing is kept longer than the backward itself keeps it.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gramian.errors import GramianError
from gramian.taps import names
from gramian.taps.gradients import PerSampleGradient, join
from gramian.taps.record import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.sites import site_for
from gramian.taps.sites.site import first_tensor
from gramian.taps.statistic import GradientRule, Ordinary, ParameterInfo
from gramian.taps.tap import Tap, Use, _hubs

_hub_of: "weakref.WeakKeyDictionary[nn.Module, Hub]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


class Listener(Protocol):
    """Somebody who wants records of a model."""

    per_sample: bool

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """How this listener reads the gradients of a pass."""

    def layer(self, record: LayerRecord) -> None:
        """One use of a layer."""

    def parameter(self, record: ParameterRecord) -> None:
        """One parameter with all its uses joined."""

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """The tensor that stands for a parameter in this forward."""

    def end_of_pass(self, number: int) -> None:
        """The backward of a pass is over."""


@dataclass
class Pass:
    """One forward of the root, and what its backward has brought so far."""

    number: int
    batch: int
    length: int | None
    listeners: tuple[Listener, ...]
    infos: list[PassInfo]
    uses: dict[str, int] = field(default_factory=dict)
    """Forward uses per parameter; under compile at least one is assumed."""
    arrived: dict[str, list[tuple[str, PerSampleGradient]]] = field(default_factory=dict)
    delivered: set[str] = field(default_factory=set)
    reports: dict[int, int] = field(default_factory=dict)
    """Compiled reports per tap."""
    closed: bool = False


class Hub:
    """All taps of one root module."""

    def __init__(self, root: nn.Module) -> None:
        """Nothing is installed until somebody listens, or `install` is called."""
        self.number = next(_numbers)
        self.key = torch.tensor(self.number)
        _hubs[self.number] = self
        self.root = weakref.ref(root)
        self.live = False
        self.per_sample = False
        self.batch = 0
        self.ticket = torch.zeros(1, dtype=torch.int64)
        self.probe = torch.zeros((), requires_grad=True)
        self.rule: GradientRule = Ordinary()
        self.batch_size: int | None = None
        self.parameters: dict[str, ParameterInfo] = {}
        self.audited: frozenset[str] = frozenset()
        self._taps: "weakref.WeakKeyDictionary[nn.Module, Tap]" = weakref.WeakKeyDictionary()
        self._installed: list[Tap] = []
        self._holders = 0
        self._listeners: list[Listener] = []
        self._current: Pass | None = None
        self._passes: dict[int, Pass] = {}
        self._count = itertools.count(1)
        self._task = -1
        self._touched: dict[int, Pass] = {}

    # ---- installing -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the forwards of all layers that have something to explain; may be called more than once."""
        self._holders += 1
        if self._holders > 1:
            return
        try:
            self._discover()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Undo one `install`; the last one restores every forward."""
        self._holders -= 1
        if self._holders == 0:
            for tap in self._installed:
                tap.uninstall()
            self._installed.clear()
            self._current = None
            self._passes.clear()
            self._touched.clear()
            self._task = -1

    def _discover(self) -> None:
        root = self.root()
        assert root is not None
        user_name: dict[int, str] = {}
        skip: set[int] = set()
        self.parameters = {}
        found: list[tuple[str, nn.Module, Any, dict[str, str]]] = []
        for name, module in names.named_modules(root):
            owned: dict[str, str] = {}
            site = None if id(module) in skip else site_for(module)
            if site is not None:
                if getattr(site, "whole", False):
                    skip.update(id(child) for child in module.modules() if child is not module)
                for local in site.owned(module):
                    p = module.get_parameter(local)
                    owned[local] = user_name.setdefault(id(p), names.join(name, local))
                    if p.requires_grad:
                        reason = site.check(module)
                        if reason is not None:
                            raise GramianError(f"{name or 'model'} ({type(module).__name__}) {reason}")
                        info = ParameterInfo(owned[local], name, site.kind, tuple(p.shape), p.dtype, p.device)
                        self.parameters.setdefault(owned[local], info)
            if site is not None or module is root:
                found.append((name, module, site, owned))
        if not self.parameters:
            raise GramianError("model: has no trainable parameter; expected at least one with requires_grad=True")
        for name, module, site, owned in found:
            tap = self._taps.setdefault(module, Tap(module, self))
            if tap.taken(module):
                raise GramianError(f"{name or 'model'}: is tapped through another root; expected the same model in both captures")
            tap.name, tap.site, tap.parameters, tap.is_root = name, site, owned, module is root
            tap.install(module)
            self._installed.append(tap)

    # ---- listening --------------------------------------------------------------------------------------------------

    def attach(self, listener: Listener, batch_size: int | None) -> None:
        """Start reporting to a listener."""
        self.install()
        self._listeners.append(listener)
        self.batch_size = batch_size if batch_size is not None else self.batch_size
        self._refresh()

    def detach(self, listener: Listener) -> None:
        """Stop reporting to a listener."""
        self._listeners.remove(listener)
        self._refresh()
        if not self.live:
            self.batch_size = None
        self.uninstall()

    def _refresh(self) -> None:
        """Plain flags, which a compiled graph can guard on without knowing who listens."""
        self.live = bool(self._listeners)
        self.per_sample = any(listener.per_sample for listener in self._listeners)

    @contextmanager
    def governed_by(self, rule: GradientRule) -> Iterator[None]:
        """Let a rule decide about weight gradients while the context is open.

        Raises:
            GramianError: if another rule does already.
        """
        if not isinstance(self.rule, Ordinary):
            raise GramianError(f"rule: the model is governed by {type(self.rule).__name__} already; expected one rule at a time")
        self.rule = rule
        try:
            yield
        finally:
            self.rule = Ordinary()

    # ---- forward ----------------------------------------------------------------------------------------------------

    def enter_root(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the root begins: learn the batch size and open a pass."""
        if self.batch_size is not None:
            first = torch.empty(self.batch_size, 0)
        else:
            first = first_tensor(args, kwargs)
        if torch.compiler.is_compiling():
            self.batch = first.shape[0]
            self.ticket = torch.ops.gramian.begin(self.key, first)
        elif torch._C._current_graph_task_id() == -1:  # not a checkpoint's second run of the forward
            if first.dim() == 0:
                raise GramianError("model: its first tensor argument has no axes; expected the batch first, or batch_size=")
            self.batch = first.shape[0]
            number = self.open_pass(first.shape[0], first.shape[1] if first.dim() > 1 else None)
            self.ticket = torch.tensor([number])

    def open_pass(self, batch: int, length: int | None) -> int:
        """Open a pass and return its number."""
        if torch._C._current_graph_task_id() == -1:
            self._touched, self._task = {}, -1  # whatever a failed backward left behind
        number = next(self._count)
        listeners = tuple(self._listeners)
        infos = [listener.pass_info(number, batch) for listener in listeners]
        self._current = self._passes[number] = Pass(number, batch, length, listeners, infos)
        for stale in [n for n, p in self._passes.items() if p.closed]:
            del self._passes[stale]
        return number

    def run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a tapped layer: its own operation, then the observer."""
        assert tap.site is not None
        if self.per_sample:
            reason = tap.site.check_per_sample(module)
            if reason is not None:
                raise GramianError(f"{tap.name or 'model'} ({type(module).__name__}) {reason}")
        if self.rule.withholds:
            plain = Detached(plain, module, tuple(tap.parameters))
        if torch.compiler.is_compiling():
            output, kept, extra = tap.site.run(module, plain, args, kwargs)
        else:
            with _named(tap, module):
                output, kept, extra = tap.site.run(module, plain, args, kwargs)
        if not _trains(module, tap):
            return output
        if isinstance(output, Tensor):
            if output.dim() and output.shape[0] == 1 and self.batch != 1:
                output = output.expand(self.batch, *output.shape[1:])
            if not (output.requires_grad or self.rule.withholds):
                return output
        if not torch.compiler.is_compiling():
            for local, name in tap.parameters.items():
                for listener in self._listeners:
                    listener.watch(name, module.get_parameter(local))
        return tap.observe(output, kept, extra)

    def open_use(self, tap: Tap, extra: Any) -> Use:
        """A tapped layer runs in eager mode: count the use."""
        inside = torch._C._current_graph_task_id() != -1
        if self._current is None:
            if self.batch_size is None:
                raise GramianError(
                    f"{tap.name}: ran outside a forward of the captured model; expected a call of the model itself, or batch_size="
                )
            self.batch = self.batch_size
            self.open_pass(self.batch_size, None)
        assert self._current is not None
        if not inside:  # else a checkpoint's second run, which gets no backward of its own
            for name in tap.parameters.values():
                self._current.uses[name] = self._current.uses.get(name, 0) + 1
        return Use(tap, self._current, extra, inside)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def report(self, use: Use, kept: list[Tensor], gradients: list[Tensor]) -> None:
        """The backward reached one use (eager mode)."""
        if torch.is_grad_enabled():
            raise GramianError("backward: create_graph=True is not supported inside a capture; expected create_graph=False")
        if use.inside_backward:
            raise GramianError(
                f"{use.tap.name}: ran and was differentiated inside a backward (reentrant checkpointing or a nested backward); "
                "expected checkpoint(..., use_reentrant=False)"
            )
        if use.spent:
            raise GramianError("backward: ran twice through one forward; expected one backward for each forward in a capture")
        use.spent = True
        self._receive(use.pass_, use.tap, kept, gradients, use.extra, owned=True)

    def report_compiled(self, tap: Tap, number: int, ordinal: int, kept: list[Tensor], gradients: list[Tensor]) -> None:
        """The backward reached one use (compiled): the tensors are borrowed, the graph may reuse their memory."""
        pass_ = self._passes.get(number)
        if not self.live:
            return
        if pass_ is None or pass_.closed:
            raise GramianError("backward: ran twice through one forward; expected one backward for each forward in a capture")
        expected = max(ordinal + 1, tap.traced_uses)
        for name in tap.parameters.values():
            others = sum(name in other.parameters.values() for other in self._installed) - 1
            pass_.uses[name] = max(pass_.uses.get(name, 0), expected + others)
        self._receive(pass_, tap, kept, gradients, None, owned=False)

    def _receive(
        self, pass_: Pass, tap: Tap, kept: list[Tensor], output_gradients: list[Tensor], extra: Any, owned: bool
    ) -> None:
        module = tap.owner()
        if module is None or not any(listener in self._listeners for listener in pass_.listeners):
            return
        self._follow_task(pass_)
        assert tap.site is not None
        _refuse_bare_positions(pass_, tap, kept)
        live, self.live = self.live, False  # the generic site runs the layer again: untapped
        try:
            with _named(tap, module):
                by_local = tap.site.gradients(module, kept, output_gradients, pass_.batch, extra)
        finally:
            self.live = live
        trained = {tap.parameters[local]: gradient for local, gradient in by_local.items()}
        for listener, info in self._audience(pass_):
            listener.layer(LayerRecord(tap.name, tap.site.kind, kept, output_gradients, trained, info))
        for name, gradient in trained.items():
            if name in pass_.delivered:
                raise GramianError(
                    f"{name}: was used more often in a compiled forward than could be foreseen; expected torch.compile on the "
                    "whole model rather than on a module that is called several times"
                )
            parts = pass_.arrived.setdefault(name, [])
            last = len(parts) + 1 == pass_.uses.get(name, 1)
            parts.append((tap.site.kind, gradient if owned or last else gradient.copy()))
            if last:
                self._deliver(pass_, name)

    def _deliver(self, pass_: Pass, name: str) -> None:
        """All uses of a parameter are in: join them and hand them on."""
        parts = pass_.arrived.pop(name)
        pass_.delivered.add(name)
        kind = " + ".join(dict.fromkeys(kind for kind, _ in parts))
        gradient = join([part for _, part in parts])
        regrouped: dict[int, PerSampleGradient] = {}
        for listener, info in self._audience(pass_):
            units = info.units
            if units is not None and id(units) not in regrouped:
                regrouped[id(units)] = gradient.regroup(units)
            mine = gradient if units is None else regrouped[id(units)]
            listener.parameter(ParameterRecord(name, kind, len(parts), mine, info))
        if pass_.infos:
            self.rule.receive(ParameterRecord(name, kind, len(parts), gradient, pass_.infos[0]))

    def _audience(self, pass_: Pass) -> list[tuple[Listener, PassInfo]]:
        """Who listened when the pass began and still does."""
        pairs = zip(pass_.listeners, pass_.infos, strict=True)
        return [(listener, info) for listener, info in pairs if listener in self._listeners]

    def _follow_task(self, pass_: Pass) -> None:
        """Notice nested backwards, and ask for a call when this backward is over."""
        task = torch._C._current_graph_task_id()
        if self._task not in (-1, task):
            raise GramianError(
                "backward: another backward started before this one was over; expected checkpoint(..., use_reentrant=False) "
                "and no nested backward inside a capture"
            )
        self._touched[pass_.number] = pass_
        if self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        """Hand on what is still incomplete (uses that got no gradient) and close the passes."""
        touched, self._touched, self._task = self._touched, {}, -1
        for pass_ in touched.values():
            for name in list(pass_.arrived):
                self._deliver(pass_, name)
            pass_.closed = True
            if self._current is pass_:
                self._current = None
        for pass_ in touched.values():
            for listener, _ in self._audience(pass_):
                listener.end_of_pass(pass_.number)


def hub_of(model: nn.Module) -> Hub:
    """The hub of a model; the same for a model and every wrapper around it."""
    root = names.unwrap(model)
    if root not in _hub_of:
        _hub_of[root] = Hub(root)
    return _hub_of[root]


def _trains(module: nn.Module, tap: Tap) -> bool:
    return any(module.get_parameter(local).requires_grad for local in tap.parameters)


def _refuse_bare_positions(pass_: Pass, tap: Tap, kept: list[Tensor]) -> None:
    """Position ids of shape [T] have no batch axis, and T may well be a multiple of B: say so instead of guessing."""
    if pass_.batch > 1 and kept and kept[0].dim() == 1 and not kept[0].is_floating_point() and len(kept[0]) == pass_.length:
        raise GramianError(
            f"{tap.name}: saw {pass_.length} indices without a batch axis for inputs of {pass_.length} tokens; "
            "expected position ids of shape [1, T]"
        )


@contextmanager
def _named(tap: Tap, module: nn.Module) -> Iterator[None]:
    """Put the layer's name in front of an error that comes from its site."""
    try:
        yield
    except GramianError as error:
        if str(error).startswith((f"{tap.name} (", "sample_ids")):
            raise
        raise GramianError(f"{tap.name or 'model'} ({type(module).__name__}) {error}") from None


class Detached:
    """A layer's forward on its own weights, without their getting a gradient."""

    def __init__(self, plain: Callable[..., Any], module: nn.Module, locals_: tuple[str, ...]) -> None:
        """Nothing is swapped until it is called."""
        self.plain = plain
        self.places = [(module.get_submodule(local.rpartition(".")[0]), local.rpartition(".")[2]) for local in locals_]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with detached weights in place."""
        old = [owner._parameters[local] for owner, local in self.places]
        for (owner, local), p in zip(self.places, old, strict=True):
            owner._parameters[local] = p.detach() if p is not None else None  # type: ignore[assignment]
        try:
            return self.plain(*args, **kwargs)
        finally:
            for (owner, local), p in zip(self.places, old, strict=True):
                owner._parameters[local] = p
