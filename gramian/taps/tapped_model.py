"""The state of one tapped model: its listeners, its gradient rule, and the pass (a forward and its backward) under way.

Everything that runs on a tapped model reads and writes this one object. The modules import each other in one direction:

    tap → tapped_model → layer_backward → observer → layer_forward ─┐
                       └→ proof (runs the model through these)   ──┴→ root_forward → replaced_forward → hub → capture

`Hub` is this state together with the installed taps and the row proof (the check that rows belong to the right samples).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import GatheredParameters
from gramian.parallel.lockstep import Lockstep
from gramian.parallel.shared_refusals import SharedRefusals
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.gradients.directions import Directions
from gramian.taps.model import user_names
from gramian.taps.passes import Listener, Pass, PassBook, in_backward
from gramian.taps.roles import GradientRule, Ordinary, ParameterInfo
from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.tap import Tap

Call = tuple[str, int, int]
"""A call of a tapped layer: (its name, number of its earlier calls in the forward, rows per sample as `rows_over_batch`)."""


@dataclass(frozen=True)
class LayerUses:
    """How a forward uses the layers of a model."""

    calls: frozenset[Call]
    """Calls of tapped layers."""
    rows: frozenset[int]
    """Rows per sample of what these calls are given or return, as `rows_over_batch` counts them."""
    past_a_tap: bool
    """True if outputs depend on a weight of a layer that is not called."""


@dataclass
class ProofRun:
    """Calls of tapped layers in one run of the row proof, and layers whose one row for all samples was expanded to B rows."""

    calls: list[Call] = field(default_factory=list)
    expanded: set[str] = field(default_factory=set)
    expands: bool = True
    """False: one row for all samples stays one."""
    first_axes: dict[str, list[int]] = field(default_factory=dict)
    """{layer: size of the first axis of the tensor that each of its calls returned}."""
    failure: GramianError | None = None
    """A tap's error, raised after the run instead of at once, because other processes gather weights in the same run."""


BatchFreeCalls = dict[str, frozenset[int] | None]
"""{layer: numbers of its calls that return no batch axis; None: all}."""
Layouts = dict[str, tuple[CallLayouts, ...]]
"""{layer: where the samples lie in each of its calls}, of layers that have them elsewhere than on axis 0."""


class Watcher(Protocol):
    """Runs the calls of tapped layers in a run without taps, to look at their tensors."""

    def run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return `plain(*args, **kwargs)`, the output of the layer `module`."""


class TapUse:
    """One call of a tapped layer in one pass (eager mode)."""

    __slots__ = ("extra", "inside_backward", "layouts", "model", "ordinal", "pass_", "site", "tap")

    def __init__(
        self,
        model: "TappedModel",
        tap: Tap,
        pass_: Pass | None,
        extra: Any,
        inside_backward: bool,
        ordinal: int = 0,
        layouts: CallLayouts | None = None,
    ) -> None:
        """Store the call.

        Args:
            model: the tapped model.
            tap: the tap of the layer.
            pass_: the pass (forward and backward) under way; None if `inside_backward`.
            extra: what the layer's site saved besides tensors.
            inside_backward: True if a backward runs, so that the call is a checkpoint's second run of the layer.
            ordinal: number of earlier calls of the layer in the pass.
            layouts: where its samples lie; None: on axis 0.
        """
        self.model, self.tap, self.pass_, self.extra = model, tap, pass_, extra
        self.site, self.layouts = tap.site, layouts
        self.inside_backward, self.ordinal = inside_backward, ordinal


class TappedModel:
    """The state of one root module and its taps. It lives as long as the module, so compiled graphs stay valid."""

    def __init__(self, root: nn.Module) -> None:
        """Start with no listener, the ordinary gradient rule and no pass."""
        self.root = weakref.ref(root)
        self.live = False
        """True if the model has a listener; a compiled graph guards on this flag."""
        self.per_sample = False
        """True if a listener needs per-sample gradients."""
        self.batch = 0
        """Batch size B of the pass under way."""
        self.blank = False
        """True if the batch has no samples and runs on one row of zeros; only if the rule withholds weight gradients."""
        self.batch_size: int | None = None
        """Batch size B as a listener gave it; None: B is the size of the first axis of the root's first tensor argument."""
        self.ticket = torch.zeros(1, dtype=torch.int64)
        """The number of the pass under way, as an input of compiled graphs."""
        self.probe = torch.zeros((), requires_grad=True)
        """An input of every observer (the identity on a layer's outputs): its backward runs even if no output needs one."""
        self.probe.register_hook(refuse_create_graph)  # of a compiled backward, inside which grad mode is always off
        self.rule: GradientRule = Ordinary()
        self.parameters: dict[str, ParameterInfo] = {}
        self.audited: frozenset[str] = frozenset()
        """Parameters whose entire gradient was compared with autograd's; from then on projections are compared."""
        self.audits = 0
        """Number of audited backwards, from which the next audit computes whose turn it is to be compared."""
        self.directions: dict[Any, Directions] = {}
        """Random directions on which audits project gradients, by shape and device."""
        self.listeners: list[Listener] = []
        self._outside: list[Listener] = []
        """The listeners that wait while a proof's recorder is in their place."""
        self.passes = PassBook(self.listeners, lambda: self.rule)
        self.taps: list[Tap] = []
        """The installed taps."""
        self.users: Counter[str] = Counter()
        """{parameter: number of installed taps whose layer has it}, more than 1 for a tied one."""
        self.fallbacks = 0
        """How many layers of products began anew, with their fallback."""
        self.calls: list[Call] = []
        """Calls of tapped layers in the forward under way (eager mode)."""
        self.lockstep = Lockstep()
        """Lets all processes of an FSDP2 model make equally many runs of a proof, because each run gathers weights from all."""
        self.proven_calls: set[Call] = set()
        """Calls of layers that occurred in a row proof, so that they are covered by it."""
        self.shared: set[str] = set()
        """Layers that process one row for all samples, as a row proof has shown: their output is expanded to B rows."""
        self.batch_free: BatchFreeCalls = {}
        """{layer: numbers of its calls that return no batch axis, as a forward with one more sample has shown; None: all}."""
        self.layouts: Layouts = {}
        """Where samples lie in each call of layers that have them elsewhere than on axis 0, for inputs as the present ones."""
        self.watcher: Watcher | None = None
        """Runs the calls of tapped layers in a proof's run without taps; None: nobody looks at them."""
        self.proof_run: ProofRun | None = None
        """The run of a row proof that is under way; None: there is none."""
        self.weights: dict[str, Tensor] | None = None
        """{parameter: the tensor that its layer used} in a proof's run without taps; None: no such run is under way."""
        self.gathered: GatheredParameters | None = None
        """Finds tensors that are views of weights gathered by FSDP2; None while no taps are installed."""
        self.tensor_parallel: TensorParallel | None = None
        """The processes of a tensor-parallel model, each with a share of the samples; None: each uses all samples it sees."""
        self.on_batch: Callable[[Any], None] = lambda inputs: None
        """Called with (args, kwargs) of every forward of the root that several samples share, before a row proof."""
        self.on_inputs: Callable[[Any], None] = lambda inputs: None
        """Called with (args, kwargs) of every forward of the root in eager mode, except those of a row proof."""
        self.refusals = SharedRefusals()
        """Raises what one process of a private model refuses on all of them; for any other model it raises at once."""
        self.private = False
        """True while a privacy engine trains the model: what is captured then depends on private data."""
        self.retap: Callable[[], None] = lambda: None
        """Finds the layers to be tapped again, after it was established how some of them use weights."""
        self.output_layer: str | None = None
        """Name of the layer whose output, up to views and casts, the last eager forward of the root returned; None: unknown."""

    @property
    def root_module(self) -> nn.Module:
        """The root module; asserts that it still exists."""
        root = self.root()
        assert root is not None
        return root

    # ---- listeners -------------------------------------------------------------------------------------------------

    @property
    def trusts_shapes(self) -> bool:
        """True if no row proof runs: none is asked for in an FSDP2 model, or by sample in a tensor-parallel one."""
        tensor = self.tensor_parallel is not None
        asked = any(one.per_sample or (one.takes_shares and not tensor) for one in self.listeners if one.proof != "off")
        return (tensor or isinstance(self.root(), FSDPModule)) and not asked

    @property
    def tells_samples_apart(self) -> bool:
        """True if a listener needs per-sample gradients and has not switched the row proof off."""
        return any(listener.per_sample and listener.proof != "off" for listener in self.listeners)

    @property
    def tells_sizes_apart(self) -> bool:
        """True if calls with as many tokens as samples are others (`rows_over_batch`); in FSDP2 batches (`batch_structure`)."""
        return self.per_sample and self.lockstep.alone

    @property
    def takes_layers(self) -> bool:
        """True if a statistic of a listener receives records of whole layers (`Health`), not of parameters or products."""
        found = [statistic for one in self._outside or self.listeners for statistic in one.statistics]
        return any(one.needs == "layer" and not getattr(one, "takes_products", False) for one in found)

    @property
    def needed(self) -> frozenset[str] | None:
        """Parameters of which some listener needs records; None: all."""
        wanted = [listener.only for listener in self.listeners]
        return None if None in wanted else frozenset[str]().union(*(one for one in wanted if one is not None))

    def groupings(self) -> list[Tensor | None]:
        """The `sample_ids` tensors of all listeners, each object once; None: each row is a sample."""
        found: list[Tensor | None] = []
        for listener in self.listeners:
            ids = listener.sample_ids if listener.per_sample else None
            if not any(ids is other for other in found):
                found.append(ids)
        return found

    def units_in(self, batch: int) -> int:
        """Number of samples in a batch of `batch` rows; of units where a listener's ids by token put several into a row."""
        by_token = [ids for ids in self.groupings() if ids is not None and ids.dim() == 2]
        return max([batch, *(len(ids.unique()) for ids in by_token)])

    def proof_is_due(self) -> bool:
        """True if a listener asks for the row proof to be repeated on this batch."""
        return any([listener.proof_is_due() for listener in self.listeners])

    def proof_failed(self) -> None:
        """Notify all listeners that a repeated row proof failed: results since the last proof are not proven."""
        for listener in self.listeners:
            listener.proof_failed()

    def proof_stays_open(self) -> None:
        """Notify all listeners that all samples of a batch are equal, so that nothing was proven; a listener may raise."""
        for listener in self.listeners:
            listener.proof_stays_open()

    def watch(self, tap: Tap) -> None:
        """Call `watch` of all listeners with the tensors that the layer of `tap` uses for its parameters in this forward."""
        module = tap.owner()
        if module is not None:
            for local, name in tap.parameters.items():
                tensor = user_names.parameter(module, local)
                for listener in self.listeners:
                    listener.watch(name, tensor)

    def open_pass(self, first: Tensor) -> int:
        """Open a pass (one forward and its backward) and return its number; `first` is the root's first tensor, [B, …]."""
        needed = self.needed
        new = not self.audited.issuperset(self.parameters if needed is None else needed)
        length = first.shape[1] if first.dim() > 1 else None
        number = self.passes.open(first.shape[0], length, new, 0 if torch.compiler.is_compiling() else first.data_ptr())
        pass_ = self.passes.get(number)
        pass_.layouts, pass_.batch_free = self.layouts, self.batch_free
        return number

    # ---- runs of a proof -------------------------------------------------------------------------------------------

    @contextmanager
    def recorded_by(self, recorder: Listener) -> Iterator[ProofRun]:
        """Context manager for a proof's run: `recorder` is the only listener; afterwards listeners and pass are restored.

        Yields what the run records. Raises, at the end, a tap's GramianError that `raise_after_run` stored.
        """
        self.passes.settle()  # reports a backward that broke off, while its own listeners are attached
        listeners, current, per_sample, batch = list(self.listeners), self.passes.current, self.per_sample, self.batch
        output_layer = self.output_layer
        self.per_sample, self.proof_run = self.tells_samples_apart, ProofRun()
        self._outside = listeners
        self.listeners[:] = [recorder]
        try:
            yield self.proof_run
        finally:
            self.passes.settle()
            self.listeners[:], self._outside = listeners, []
            failure = self.proof_run.failure
            if (opened := self.passes.current) is not None and opened is not current:
                opened.closed = True  # of a run that failed, or of a forward alone: it gets no further backward
            self.passes.current, self.per_sample, self.batch, self.proof_run = current, per_sample, batch, None
            self.output_layer = output_layer
        if failure is not None:
            raise failure

    @contextmanager
    def untapped(self) -> Iterator[dict[str, Tensor]]:
        """Context manager: the model runs without taps; yields {parameter: tensor that its layer used}, filled by the run."""
        self.live, self.weights = False, {}
        try:
            yield self.weights
        finally:
            self.live, self.weights = True, None

    def add_uncalled(self, weights: dict[str, Tensor]) -> None:
        """Add parameters whose layers did not run to {parameter: tensor that its layer used}; not of sharded models."""
        for name, p in user_names.named_parameters(self.root_module):
            if name in self.parameters and self.lockstep.alone and not isinstance(p, DTensor):
                weights.setdefault(name, p)

    def is_batch_free(self, tap: Tap, output: Tensor) -> bool:
        """True if the call of a layer that is under way returns no batch axis (eager mode).

        Calls in a checkpoint's second run have no number: of a layer with such calls, this is one unless it returns B rows.
        """
        again = in_backward()
        pass_ = self.passes.second_run(tap.name) if again else None
        calls = (self.batch_free if pass_ is None else pass_.batch_free).get(tap.name, frozenset())
        if calls is None:
            return True
        if again:
            return bool(calls) and output.shape[:1] != (self.passes.batch_of_second_run(tap.name),)
        current = self.passes.current
        return current is not None and current.ordinals.get(tap.name, -1) + 1 in calls

    def layouts_of(self, tap: Tap) -> CallLayouts | None:
        """Where samples lie in the layer's call under way, or, run again by a checkpoint, in its first; None: on axis 0."""
        again = in_backward()
        pass_ = self.passes.second_run(tap.name) if again else None
        calls = (self.layouts if pass_ is None else pass_.layouts).get(tap.name)
        if calls is None:
            return None
        current = None if again else self.passes.current
        number = 0 if current is None else current.ordinals.get(tap.name, -1) + 1
        return calls[number] if number < len(calls) and calls[number].moved else None

    def told(self) -> AbstractContextManager[None]:
        """Context manager: the other processes read of an error in it, except in a proof's run, which raises it itself."""
        return self.refusals.told() if self.proof_run is None else nullcontext()

    def raise_after_run(self, tap: Tap, error: GramianError) -> None:
        """Raise a tap's error now, or store it until this run is over if other processes gather weights in it.

        It is raised now if this process has only a shard of the layer's weights: autograd would crash on them.
        """
        module = tap.owner()
        gone = module is None or any(isinstance(p, DTensor) for p in module.parameters())
        needed = in_backward() or not self.lockstep.alone  # a tensor-parallel forward is refused on all processes
        if self.proof_run is None and needed and not gone and self.refusals.hold(error):
            return
        if self.proof_run is None or self.lockstep.alone or gone:
            raise error
        self.proof_run.failure = self.proof_run.failure or error


def rows_of_call(
    saved: Sequence[Tensor],
    outputs: Sequence[Tensor],
    batch: int,
    layouts: CallLayouts | None = None,
    alike: bool = False,
) -> int:
    """Rows per sample of a layer's call: 0 for one row shared by all samples, −rows if `rows` is not a multiple of `batch`.

    `rows` is the size of the first axis of the first of the saved tensors and outputs that has axes. With `layouts`, that of
    the first output on the axis of its samples (without outputs, of the first saved tensor), or 0 if this is no multiple.

    `alike`: a call of which another axis has the same size (tokens as many as samples) has a number of its own for each size,
    because its shape does not show which of the two has the samples.
    """
    known = () if layouts is None else layouts.outputs if outputs else layouts.inputs
    axis = next((one.axis for one in known if one is not None and one.axis is not None), 0)
    tensors = (*saved, *outputs) if layouts is None else (*outputs, *saved)
    shape = next((t.shape for t in tensors if t.dim()), torch.Size([0]))
    rows = shape[axis] if axis < len(shape) else 0
    if layouts is None and rows == 1 and batch != 1:
        return 0
    if not batch or rows % batch:
        return -rows if layouts is None else 0
    same = alike and batch > 1 and any(shape[i] == rows for i in range(len(shape) - 1) if i != axis)
    return rows // batch + (rows << 32 if same else 0)


def rows_over_batch(rows: int, batch: int) -> int:
    """Rows per sample of a first axis: 0 for one row shared by all samples, −rows if `rows` is not a multiple of `batch`."""
    return 0 if rows == 1 != batch else rows // batch if batch and rows % batch == 0 else -rows


def refuse_unseen(calls: Sequence[Call]) -> None:
    """Raise GramianError for calls that occurred in no row proof: one process of an FSDP2 model cannot run one."""
    for layer, ordinal, rows in calls:
        raise GramianError(
            f"{layer or 'model'}: is called in a way that no proof has seen (call {ordinal}, {rows} rows a sample), "
            "and a sharded model cannot be proven by one process alone; expected the same calls in every batch"
        )


def refuse_create_graph(_: Tensor | None = None) -> None:
    """Raise GramianError in a backward with create_graph=True; usable as a gradient hook."""
    if torch.is_grad_enabled():
        raise GramianError("backward: create_graph=True is not supported; expected create_graph=False")
