"""The hub of one model: its taps, who listens, and the rule that governs weight gradients."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from gramian.core.errors import GramianError
from gramian.linalg.wide import exact_float32
from gramian.parallel.data_parallel import Gathered
from gramian.parallel.lockstep import Lockstep, sharing_group
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.gradients.directions import Directions
from gramian.taps.model import user_names
from gramian.taps.model.empty_batches import apart, with_a_row, without_a_row
from gramian.taps.model.find_layers import discover
from gramian.taps.passes import (
    SECOND_BACKWARD,
    Explained,
    Listener,
    Pass,
    PassBook,
    in_backward,
)
from gramian.taps.proof.compiled_arguments import Written, apart_from_the_graph, read
from gramian.taps.proof.row_proof import RowProof
from gramian.taps.proof.row_recorder import Recorder
from gramian.taps.records import LayerRecord
from gramian.taps.roles import GradientRule, Ordinary, ParameterInfo
from gramian.taps.sites.site import first_tensor
from gramian.taps.tap import LISTENERS, Tap, TapUse, register_hub

SPREADS = ("linear", "embedding", "norm")
"""Kinds of layers that may be tensor parallel."""
PASSED_ON = ("View", "Reshape", "Alias", "ToCopy", "Squeeze", "Redistribute", "ToTorchTensor", "FromTorchTensor")
"""Autograd nodes behind which an output is still the same numbers."""

Call = tuple[str, int, int]
"""A call of a tapped layer: its name, its ordinal in the forward, and its rows over B (0: one row for all samples)."""

_hub_of: weakref.WeakKeyDictionary[nn.Module, "Hub"] = weakref.WeakKeyDictionary()


@dataclass
class Rehearsal:
    """A run of a proof: the calls of tapped layers, and those whose one row was expanded to a row for each sample."""

    calls: list[Call] = field(default_factory=list)
    expanded: set[str] = field(default_factory=set)
    failure: GramianError | None = None
    """What a tap refused, where other processes gather weights in the same run: it is raised once the run is over."""


BEFORE_ROOT = "a sharded model is proven eagerly"


class BeforeRoot:
    """A hook in front of FSDP2's own; copies and pickles of a module carry one that does nothing."""

    def __init__(self, hub: "Hub | None") -> None:
        """Remember the hub, weakly."""
        self._hub: Any = (lambda: None) if hub is None else weakref.ref(hub)
        self._run = self._begin if hub is None else torch.compiler.disable(self._begin, reason=BEFORE_ROOT)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward of the root begins; a compiled one leaves its graph here, as it does for FSDP2's own hooks."""
        self._run(module, args, kwargs)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hub = self._hub()
        if hub is not None:
            hub.before_sharded_root(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "BeforeRoot":
        """One that does nothing."""
        return BeforeRoot(None)

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return (BeforeRoot, (None,))


class Hub:
    """All taps of one root module. It lives as long as the module, so compiled graphs stay valid over captures."""

    def __init__(self, root: nn.Module) -> None:
        """Nothing is installed until somebody listens, or `install` is called."""
        self.key = torch.tensor(register_hub(self))
        self.root = weakref.ref(root)
        self.live = False
        self.per_sample = False
        self.batch = 0
        self.blank = False
        """True if the pass under way has no samples and runs on one row of zeros (where a rule withholds gradients)."""
        self.batch_size: int | None = None
        self.ticket = torch.zeros(1, dtype=torch.int64)
        self.probe = torch.zeros((), requires_grad=True)
        self.probe.register_hook(_refuse_create_graph)  # of a compiled backward, inside which grad mode is always off
        self.rule: GradientRule = Ordinary()
        self.parameters: dict[str, ParameterInfo] = {}
        self.audited: frozenset[str] = frozenset()
        """Parameters whose whole gradient was compared with autograd's; after that, projections are."""
        self.audits = 0
        """Backwards that were audited; by their number parameters take turns."""
        self.directions: dict[Any, Directions] = {}
        """On which audits project gradients, by shape and device."""
        self._listeners: list[Listener] = []
        self._passes = PassBook(self._listeners, lambda: self.rule)
        self._taps: weakref.WeakKeyDictionary[nn.Module, Tap] = weakref.WeakKeyDictionary()
        self._installed: list[Tap] = []
        self._holders = 0
        self.proof = RowProof(self)
        self.calls: list[Call] = []
        """Calls of tapped layers in the forward under way (eager mode)."""
        self.lockstep = Lockstep()
        """Keeps processes together that gather weights for each other's runs of a proof."""
        self.shared: set[str] = set()
        """Layers that were shown to see one row for all samples: their output is expanded to a row for each."""
        self.rehearsing: Rehearsal | None = None
        """The run of a proof that is under way."""
        self.weights: dict[str, Tensor] | None = None
        """Where an untapped run of a proof collects the weights that the layers read."""
        self._gathered: Gathered | None = None
        self._hook: RemovableHandle | None = None
        self.tensor_parallel: TensorParallel | None = None
        """The processes that the model is spread over by features, and that deal its samples out among themselves while those
        who listen take shares; None: every process sees all of its samples."""
        self.on_inputs: Callable[[Any], None] = lambda inputs: None
        """Shown the arguments of every forward of the root (eager mode)."""
        self.output_layer: str | None = None
        """The layer whose output, up to views and casts, the last forward of the root returned (eager mode)."""

    # ---- installing ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the forwards of all layers that have something to explain; may be called more than once."""
        self._holders += 1
        if self._holders > 1:
            return
        try:
            root = self.root()
            assert root is not None
            layers, self.parameters = discover(root)
            self._gathered = Gathered(root)
            if isinstance(root, FSDPModule):
                hook = BeforeRoot(self)
                self._hook = root.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                self.lockstep = Lockstep(sharing_group(root))
            for found in layers:
                tap = self._taps.get(found.module)
                if tap is None:
                    tap = self._taps[found.module] = Tap(found.module, self)
                tap.describe(found, is_root=found.module is root)
                tap.install(found.module)
                self._installed.append(tap)
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
            self._passes.clear()
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            self._gathered = None  # it holds on to parameters

    # ---- listening -------------------------------------------------------------------------------------------------

    def attach(self, listener: Listener) -> None:
        """Start reporting to a listener.

        Raises:
            GramianError: if one of its statistics is at work on this model already, or captures disagree about the batch.
        """
        busy = [
            s for other in self._listeners for s in other.statistics if any(s is mine for mine in listener.statistics)
        ]
        if busy:
            raise GramianError(
                f"statistic: {type(busy[0]).__name__} is part of an open capture; expected another object"
            )
        sizes = {other.batch_size for other in (*self._listeners, listener)} - {None}
        if len(sizes) > 1:
            raise GramianError(
                f"batch_size: open captures of one model say {sorted(map(str, sizes))}; expected one number"
            )
        if self._listeners and self._listeners[0].takes_shares != listener.takes_shares and self._spread() is not None:
            raise GramianError("capture: K-FAC of a tensor-parallel model is under way; expected one capture at a time")
        self.tensor_parallel = self._spread() if listener.takes_shares else None
        self.install()
        self._listeners.append(listener)
        self._set_flags()

    def _spread(self) -> TensorParallel | None:
        root = self.root()
        assert root is not None
        return TensorParallel.of(root)

    def detach(self, listener: Listener) -> None:
        """Stop reporting to a listener."""
        if not in_backward():
            self._passes.settle()
        self._listeners.remove(listener)
        self._set_flags()
        self.uninstall()

    def _set_flags(self) -> None:
        """Plain flags, which a compiled graph can guard on without knowing who listens."""
        self.live = bool(self._listeners)
        LISTENERS.anywhere = any(hub.live for hub in _hub_of.values())
        if not self.live:
            self.tensor_parallel = None
        self.per_sample = self.tensor_parallel is not None or any(listener.per_sample for listener in self._listeners)
        given = [listener.batch_size for listener in self._listeners if listener.batch_size is not None]
        self.batch_size = given[0] if given else None

    @contextmanager
    def governed_by(self, rule: GradientRule) -> Iterator[None]:
        """Let a rule decide about weight gradients while the context is open.

        Raises:
            GramianError: if another rule does already.
        """
        if not isinstance(self.rule, Ordinary):
            raise GramianError(
                f"rule: {type(self.rule).__name__} governs the model already; expected one rule at a time"
            )
        self.rule = rule
        try:
            yield
        finally:
            self.rule = Ordinary()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def enter_root(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the root begins: learn the batch size and open a pass."""
        given = self.batch_size
        first = first_tensor(args, kwargs) if given is None else torch.empty(given, 0)
        if torch.compiler.is_compiling():
            self.batch = first.shape[0]
            written = Written()
            text = written.write((tuple(args), kwargs))
            tensors, integers, reals = written.tensors, written.integers, written.reals
            self.ticket = torch.ops.gramian.begin(self.key, first, text, tensors, integers, reals)
        elif not in_backward():  # else it is a checkpoint's second run of the forward
            if first.dim() == 0:
                raise GramianError(
                    "model: its first tensor has no axes; expected the batch as first axis, or batch_size="
                )
            if self.tensor_parallel is not None:
                self.tensor_parallel.refuse_other_inputs(first)
            if self.rehearsing is None:
                self.on_inputs((args, kwargs))
            self.blank = self.rule.withholds and not first.shape[0] and given is None
            first = with_a_row(first) if self.blank else first
            self.batch = first.shape[0]
            self.ticket = torch.tensor([self.open_pass(first)])

    def run_root(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of the root in eager mode: a pass, proven where samples are told apart."""
        forward = partial(self._forward_root, tap, module, plain)
        batch = self._samples_of(args, kwargs)
        if self.rehearsing is not None or in_backward() or batch < 2 or self.trusts_shapes:
            return forward(args, kwargs)
        sharded = isinstance(module, FSDPModule)
        if sharded:
            self._refuse_sharded_late()
        return self.proof.guard(forward, args, kwargs, batch, proven_before=sharded)

    def _refuse_sharded_late(self) -> None:
        if self._hook is None and not self.trusts_shapes:
            raise GramianError(
                "model: was sharded inside a capture, where it cannot be proven whose row is which; expected fully_shard "
                'before the capture is entered, or proof="off"'
            )

    def _samples_of(self, args: Any, kwargs: Any) -> int:
        if self.batch_size is not None:
            return self.batch_size
        first = first_tensor(args, kwargs)
        if first.is_nested:
            raise GramianError("model: its first tensor is nested; expected a padded tensor")
        return first.shape[0] if first.dim() else 0

    def before_sharded_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """FSDP2 is about to gather a root's weights for a forward: the proof runs before, whole forwards with all hooks.

        Every process comes here for every forward, and runs along if any of them has something to prove.
        """
        listens = self.live and torch.is_grad_enabled() and self.rehearsing is None and self.weights is None
        listens = listens and not self.trusts_shapes
        if listens and not in_backward() and module is self.root():
            self.proof.together(lambda a, k: module(*a, **k), args, kwargs, self._samples_of(args, kwargs))

    def _forward_root(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.live:
            return self.run_untapped(tap, module, plain, args, kwargs)
        self.enter_root(args, kwargs)
        if self.blank:
            args, kwargs = with_a_row((args, kwargs))
        output = plain(*args, **kwargs) if tap.site is None else tap.run(tap, module, plain, args, kwargs)
        self.leave_root(output)
        if self.blank:
            return without_a_row(output)
        return apart(output) if self._gathers_in_order(tap, module) else output

    def _gathers_in_order(self, tap: Tap, module: nn.Module) -> bool:
        """True for a root whose output must be another tensor than its last layer's, on every process."""
        return tap.is_root and self.rule.withholds and isinstance(module, FSDPModule)

    def open_pass(self, first: Tensor) -> int:
        """Open a pass for a batch whose first tensor is this one, and return its number."""
        new = not self.audited.issuperset(self.parameters)
        length = first.shape[1] if first.dim() > 1 else None
        return self._passes.open(first.shape[0], length, new, 0 if torch.compiler.is_compiling() else first.data_ptr())

    def run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a tapped layer: its own operation, then the observer."""
        if self.rule.withholds:
            plain = Detached(plain, module, tap.parameters, self._leaves(tap))
        if torch.compiler.is_compiling():
            output, kept, extra = self._run_site(tap, module, plain, args, kwargs)
        else:
            try:
                with tap.named_errors():
                    output, kept, extra = self._run_site(tap, module, plain, args, kwargs)
            except GramianError as error:
                self._raise_after_the_run(tap, error)
                return plain(*args, **kwargs)
        if not any(user_names.parameter(module, local).requires_grad for local in tap.parameters):
            return output
        if isinstance(output, Tensor):
            rows = output.shape[0] if output.dim() else 0
            if rows == 1:
                output = self._expanded(tap, output)
            if not (output.requires_grad or self.rule.withholds):
                return output
        self._refuse_spread(tap, module, [*kept, *([output] if isinstance(output, Tensor) else [])])
        if not torch.compiler.is_compiling():
            self._show(tap)
            if self.rule.withholds and not in_backward() and self.rehearsing is None:
                self.rule.foresee(tap, kept, output)
        return tap.observe(output, kept, extra)

    def _refuse_spread(self, tap: Tap, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Raise, on every process, for a tensor-parallel layer that cannot be looked at sample by sample.

        Raises:
            GramianError: naming it.
        """
        spread = any(isinstance(t, DTensor) for t in tensors)
        if not spread and self.tensor_parallel is None:
            return  # before a compiled graph has looked at names, which layers of one graph do not share
        assert tap.site is not None
        layer = f"{tap.name or 'model'} ({type(module).__name__})"
        if spread and self.tensor_parallel is None:
            raise GramianError(
                f"{layer} is tensor parallel, which only K-FAC can look at; expected a layer that is whole"
            )
        if self.tensor_parallel is not None and not tap.site.compiles:
            raise GramianError(
                f"{layer} has no formula and must be run again sample by sample, which a tensor-parallel model cannot be; "
                "expected a registered site (register_site)"
            )
        if spread and tap.site.kind not in SPREADS:
            raise GramianError(
                f"{layer} is tensor parallel; expected {', '.join(SPREADS)} layers to be, and others to be whole"
            )

    def _leaves(self, tap: Tap) -> "list[tuple[str, Tensor]] | None":
        """Where a layer without a formula leaves the weights it ran on, to be compared with what its tap explains."""
        assert tap.site is not None
        if tap.site.compiles or torch.compiler.is_compiling():
            return None
        if in_backward() or self._passes.current is None:
            return []  # a checkpoint's second run is of the same kind as its first, but gets nothing
        return self._passes.current.leaves

    def _expanded(self, tap: Tap, output: Tensor) -> Tensor:
        """One row that stands for all samples, as B rows, so that each sample sends its own gradient back.

        In eager mode only where a proof tries it or has shown that the model returns the same; a compiled graph expands always,
        and is proven before it runs.
        """
        batch = self.batch
        if not torch.compiler.is_compiling():
            proven = self.rehearsing is not None or tap.name in self.shared or self.trusts_shapes
            if batch and not proven:  # of no samples there are no rows
                return output
            if in_backward():
                batch = self._passes.batch_of_second_run(tap.name)
            elif self.rehearsing is not None and batch != 1:
                self.rehearsing.expanded.add(tap.name)
        return output if batch == 1 else output.expand(batch, *output.shape[1:])

    def leave_root(self, output: Any) -> None:
        """A forward of the root is over: note whose output it returned, and show audits the layers that were passed by."""
        self.output_layer = _maker(output)
        if self._passes.current is None:
            return
        self._passes.current.returned = not torch.compiler.is_compiling()
        if not self._passes.current.first:
            return
        for tap in self._installed:
            self._show(tap)

    def _show(self, tap: Tap) -> None:
        """Show the listeners the tensors that stand for a layer's parameters right now."""
        module = tap.owner()
        if module is not None:
            for local, name in tap.parameters.items():
                for listener in self._listeners:
                    listener.watch(name, user_names.parameter(module, local))

    def _run_site(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert tap.site is not None
        reason = tap.site.check_per_sample(module) if self.per_sample else None
        if reason is not None:
            raise GramianError(f"{tap.name or 'model'} ({type(module).__name__}) {reason}")
        return tap.site.run(module, plain, args, kwargs)

    def open_use(self, tap: Tap, extra: Any, kept: Sequence[Tensor], outputs: Sequence[Tensor]) -> TapUse:
        """A tapped layer runs in eager mode: count the use."""
        if in_backward():  # a checkpoint's second run, which gets no backward of its own
            return TapUse(tap, None, None, inside_backward=True)
        outside = self._passes.current is None or self._passes.current.returned
        if outside and self.tells_samples_apart:
            raise GramianError(
                f"{tap.name or 'model'}: ran outside a forward of the captured model, where no proof sees whose row is which; "
                'expected one module whose forward makes every call, or proof="off" (and batch_size=, if it is never called)'
            )
        if self._passes.current is None:
            if self.batch_size is None:
                raise GramianError(
                    f"{tap.name}: ran outside a forward of the captured model; "
                    "expected a call of the model itself, or batch_size="
                )
            self.batch = self.batch_size
            self.open_pass(torch.empty(self.batch, 0))
        pass_ = self._passes.current
        assert pass_ is not None
        for name in tap.parameters.values():
            pass_.uses[name] = pass_.uses.get(name, 0) + 1
        ordinal = pass_.ordinals[tap.name] = pass_.ordinals.get(tap.name, -1) + 1
        rows = _rows_over_batch(kept, outputs, pass_.batch)
        calls = self.calls if self.rehearsing is None else self.rehearsing.calls
        calls.append((tap.name, ordinal, rows))
        return TapUse(tap, pass_, extra, inside_backward=False, ordinal=ordinal)

    # ---- backward --------------------------------------------------------------------------------------------------

    def report(self, use: TapUse, kept: list[Tensor], gradients: list[Tensor]) -> None:
        """The backward reached one use (eager mode)."""
        _refuse_create_graph()
        if use.inside_backward:
            raise GramianError(
                f"{use.tap.name}: ran and was differentiated inside a backward (reentrant checkpointing or a nested "
                "backward); expected checkpoint(..., use_reentrant=False)"
            )
        if use.pass_ is None or use.pass_.closed:
            raise GramianError(SECOND_BACKWARD)
        pass_, extra = use.pass_, use.extra
        if not self.rule.again:
            use.pass_ = use.extra = None  # the graph outlives the backward
        try:
            self._receive(pass_, use.tap, use.ordinal, kept, gradients, extra, borrowed=False)
        except GramianError as error:
            self._raise_after_the_run(use.tap, error)

    def report_compiled(self, tap: Tap, number: int, ordinal: int, kept: list[Tensor], gradients: list[Tensor]) -> None:
        """The backward reached one use (compiled): the tensors are borrowed, the graph may reuse their memory."""
        if not self.live:
            return
        pass_ = self._passes.get(number)
        if isinstance(self.root(), FSDPModule) and self.tells_samples_apart and pass_.batch > 1:
            self.proof.refuse_unseen([(tap.name, ordinal, _rows_over_batch(kept, gradients, pass_.batch))])
        for name in tap.parameters.values():
            tied = sum(name in other.parameters.values() for other in self._installed) - 1
            pass_.uses[name] = max(pass_.uses.get(name, 0), ordinal + 1 + tied, tap.traced_uses + tied)
        self._receive(pass_, tap, ordinal, kept, gradients, None, borrowed=True)

    def _receive(
        self,
        pass_: Pass,
        tap: Tap,
        ordinal: int,
        kept: list[Tensor],
        output_gradients: list[Tensor],
        extra: Any,
        borrowed: bool,
    ) -> None:
        module, audience = tap.owner(), self._passes.audience(pass_)
        if module is None or not audience:
            return
        assert tap.site is not None
        device = output_gradients[0].device.type
        self._passes.begin(pass_, device)
        batch = pass_.batch
        if self.tensor_parallel is not None:
            with tap.named_errors():
                kept = [self.tensor_parallel.take(t, batch) for t in kept]
                output_gradients = [self.tensor_parallel.take(t, batch) for t in output_gradients]
            mine = self.tensor_parallel.share(batch)
            batch = mine.stop - mine.start
        if self._gathered is not None:
            kept = self._gathered.kept(kept)  # those who listen may hold them until the backward is over
        with torch.autocast(device, enabled=False), exact_float32():  # whatever the user's backward runs in
            self.live = False  # the generic site runs the layer again: untapped
            try:
                with tap.named_errors():
                    by_local = tap.site.gradients(module, kept, output_gradients, batch, extra)
            finally:
                self.live = True
            gradients = {tap.parameters[local]: gradient for local, gradient in by_local.items()}
            for name, gradient in gradients.items():
                if name not in self.parameters:
                    raise GramianError(
                        f"{name}: began to train inside a capture; expected requires_grad to be set before it is entered"
                    )
                if gradient.shape != self.parameters[name].shape:
                    raise GramianError(
                        f"{name}: its site explains a gradient of shape {list(gradient.shape)}; "
                        f"expected {list(self.parameters[name].shape)}"
                    )
            for listener, info in audience:
                sides = partial(tap.site.sides, module, kept, output_gradients, batch)
                record = LayerRecord(
                    tap.name, tap.site.kind, ordinal, kept, output_gradients, gradients, info, sides, borrowed
                )
                listener.layer(record)
            if self.rule.withholds and not tap.site.compiles:
                for name, gradient in gradients.items():
                    pass_.explained[name] = Explained.of(gradient, pass_.explained.get(name))
            self._passes.arrive(pass_, tap.site.kind, gradients, borrowed)

    # ---- proofs ----------------------------------------------------------------------------------------------------

    def prove_compiled(
        self, batch: int, text: str, tensors: list[Tensor], integers: list[int], reals: list[float]
    ) -> None:
        """A compiled forward begins: the eager module is proven on its arguments.

        Raises:
            GramianError: if the proof fails, or arguments cannot be passed through a graph.
        """
        root = self.root()
        assert root is not None
        tap = self._taps[root]
        if batch < 2:
            return
        if isinstance(
            root, FSDPModule
        ):  # proven by all processes before it began; its calls are looked at as they report
            self._refuse_sharded_late()
            return
        try:
            args, kwargs = read(text, tensors, integers, reals)
        except ValueError:
            raise GramianError(
                "model: is compiled and gets an argument that no graph can pass to the row proof; expected tensors, numbers, "
                "strings and None in tuples, lists and dicts"
            ) from None
        apart_from_the_graph(
            partial(self.proof.before_compiled, partial(self._eagerly, tap, root), args, kwargs, batch)
        )

    def _eagerly(self, tap: Tap, root: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._forward_root(tap, root, partial(type(root).forward, root), args, kwargs)

    @property
    def trusts_shapes(self) -> bool:
        """True where no proof runs: in a tensor-parallel model, and in a sharded one that not every process captures."""
        collective = any(one.proof != "off" and (one.per_sample or one.takes_shares) for one in self._listeners)
        return self.tensor_parallel is not None or (isinstance(self.root(), FSDPModule) and not collective)

    @property
    def tells_samples_apart(self) -> bool:
        """True if somebody needs to know whose row is which, and has not switched the proof off."""
        return any(listener.per_sample and listener.proof != "off" for listener in self._listeners)

    def groupings(self) -> list[Tensor | None]:
        """How those who listen group rows or tokens into units; None: each row is one."""
        found: list[Tensor | None] = []
        for listener in self._listeners:
            ids = listener.sample_ids if listener.per_sample else None
            if not any(ids is other for other in found):
                found.append(ids)
        return found

    @property
    def passes_begun(self) -> int:
        """Passes of the model so far."""
        return self._passes.begun

    def proof_is_due(self) -> bool:
        """True if somebody wants one run of the proof again on this batch."""
        return any([listener.proof_is_due() for listener in self._listeners])

    def proof_failed(self) -> None:
        """A repeated run failed: what was computed since the last proof is not proven."""
        for listener in self._listeners:
            listener.proof_failed()

    def proof_stays_open(self) -> None:
        """All samples of a batch are equal, so that it proves nothing; whoever cannot accept that raises."""
        for listener in self._listeners:
            listener.proof_stays_open()

    @contextmanager
    def rehearsal(self, recorder: Recorder) -> Iterator[Rehearsal]:
        """Let a proof alone listen."""
        self._passes.settle()  # reports a backward that broke off, while its own listeners are attached
        listeners, current, per_sample, batch = list(self._listeners), self._passes.current, self.per_sample, self.batch
        output_layer = self.output_layer
        self.per_sample, self.rehearsing = self.tells_samples_apart, Rehearsal()
        self._listeners[:] = [recorder]
        try:
            yield self.rehearsing
        finally:
            self._passes.settle()
            self._listeners[:] = listeners
            failure = self.rehearsing.failure
            self._passes.current, self.per_sample, self.batch, self.rehearsing = current, per_sample, batch, None
            self.output_layer = output_layer
        if failure is not None:
            raise failure

    def _raise_after_the_run(self, tap: Tap, error: GramianError) -> None:
        """Raise; where other processes wait for what the rest of this run gathers, when it is over.

        At once on weights that are not there (a unit that nobody gathers): autograd, which goes on, would crash on them.
        """
        module = tap.owner()
        gone = module is None or any(isinstance(p, DTensor) for p in module.parameters())
        if self.rehearsing is None or self.lockstep.alone or gone:
            raise error
        self.rehearsing.failure = self.rehearsing.failure or error

    @contextmanager
    def untapped(self) -> Iterator[dict[str, Tensor]]:
        """Let the model run as if nothing were installed; collects the weights that its layers read."""
        self.live, self.weights = False, {}
        try:
            yield self.weights
        finally:
            self.live, self.weights = True, None

    def run_untapped(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a layer, or of the root, in an untapped run of a proof."""
        for local, name in tap.parameters.items() if self.weights is not None else ():
            weight = user_names.parameter(module, local)
            if weight.requires_grad and name in self.parameters:
                self.weights[name] = weight  # type: ignore[index]
        output = plain(*args, **kwargs)
        return apart(output) if self._gathers_in_order(tap, module) else output


def _rows_over_batch(kept: Sequence[Tensor], outputs: Sequence[Tensor], batch: int) -> int:
    """Rows of a call over B: 0 for one row that stands for all samples, negative if they are no multiple of B."""
    first = next((t for t in (*kept, *outputs) if t.dim()), None)
    rows = 0 if first is None else first.shape[0]
    if rows == 1 and batch != 1:
        return 0
    return rows // batch if batch and rows % batch == 0 else -rows


def _maker(output: Any) -> str | None:
    """The tapped layer that made the first tensor of an output, if nothing but views and casts stand between."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    logits = getattr(output, "logits", tensors[0] if tensors else None)
    node = logits.grad_fn if isinstance(logits, Tensor) else None
    while node is not None:
        use = getattr(node, "use", None)
        if isinstance(use, TapUse) and use.tap.is_root and use.tap.site is not None and use.tap.site.kind == "generic":
            # a root with parameters of its own is seen behind its last layer
            node = node.next_functions[1][0] if len(node.next_functions) > 1 else None
            continue
        if isinstance(use, TapUse):
            return use.tap.name
        if not any(word in node.name() for word in PASSED_ON):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


class Detached:
    """A layer's forward on its own weights, without their getting a gradient."""

    def __init__(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        parameters: dict[str, str],
        leaves: list[tuple[str, Tensor]] | None,
    ) -> None:
        """Nothing is swapped until it is called.

        Args:
            plain: the forward.
            module: whose weights.
            parameters: {local name: the user's}.
            leaves: gains (the user's name, the weight it ran on), which collects what autograd sends it; None: it gets nothing.
        """
        self.plain, self.leaves, self.names = plain, leaves, tuple(parameters.values())
        self.places = [
            (module.get_submodule(local.rpartition(".")[0]), local.rpartition(".")[2]) for local in parameters
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with detached weights in place."""
        old = [owner._parameters[local] for owner, local in self.places]
        for name, (owner, local), p in zip(self.names, self.places, old, strict=True):
            weight = None if p is None else p.detach()
            if weight is not None and self.leaves is not None and p is not None and p.requires_grad:
                self.leaves.append((name, weight.requires_grad_()))
            owner._parameters[local] = weight  # type: ignore[assignment]
        try:
            return self.plain(*args, **kwargs)
        finally:
            for (owner, local), p in zip(self.places, old, strict=True):
                owner._parameters[local] = p


def _refuse_create_graph(_: Tensor | None = None) -> None:
    if torch.is_grad_enabled():
        raise GramianError("backward: create_graph=True is not supported; expected create_graph=False")


def hub_of(model: nn.Module) -> Hub:
    """The hub of a model; the same for a model and every wrapper around it."""
    root = user_names.unwrap(model)
    if root not in _hub_of:
        _hub_of[root] = Hub(root)
    return _hub_of[root]
