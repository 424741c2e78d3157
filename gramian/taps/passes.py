"""Passes: one forward of the root module and the backward through it, in which per-sample gradients are collected.

Uses of a parameter are counted in the forward. In the backward their per-sample gradients are collected until the last one has
arrived, joined per sample, and delivered to the listeners. A parameter that is used once is delivered at once, so nothing is
stored longer than the backward itself stores it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.linalg.wide import exact_products, wide
from gramian.taps.audit import AGREES, amplified
from gramian.taps.gradients import PerSampleGradient, join
from gramian.taps.gradients.ragged import regrouped
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.roles import GradientRule, Statistic
from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.sites.site import INLINE

SECOND_BACKWARD = "backward: ran twice through one forward; expected one backward for each forward"
FORWARDS_WITHOUT_BACKWARD = 1024
"""Largest number of open passes, whose backward has not run; when it is reached, the oldest are dropped."""


class Listener(Protocol):
    """An object that receives the records of a model's backwards: a capture, a gradient rule, a proof's recorder."""

    per_sample: bool
    """True if the listener needs per-sample gradients, so that layers that mix samples raise GramianError."""
    batch_size: int | None
    """Batch size B as the user gave it; None: B is the size of the first axis of the first input."""
    proof: "str | int"
    """When the row proof (each row depends on its own sample alone) runs. "auto": before rows are used for the first time; a
    number n: also on every n-th forward; "off": never."""
    sample_ids: Tensor | None
    """The unit (group that counts as one sample) of each row or token of the next forward; None: row i is sample i."""
    only: frozenset[str] | None
    """Parameters of which the listener needs records; None: all."""
    reads_calls: bool
    """True if `layer` is to be called, with the record of every call of a layer."""
    takes_shares: bool
    """True if processes of a tensor-parallel model, which see the same samples, each compute gradients of a share of them."""

    @property
    def statistics(self) -> Sequence[Statistic]:
        """The statistics that the listener computes."""

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Begin pass `number` (a forward and its backward) of `batch` rows; returns how to group rows and scale gradients."""

    def layer(self, record: LayerRecord) -> None:
        """Receive the record of one call of a layer: inputs, output gradients, per-sample gradients. See `reads_calls`."""

    def parameter(self, record: ParameterRecord) -> None:
        """Receive the record of one parameter, with its per-sample gradients summed over all its uses."""

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """Receive the tensor that this forward uses for the parameter of this name (under FSDP2 the gathered weight)."""

    def end_of_pass(self, info: PassInfo) -> None:
        """Called when a backward is over and all its records were delivered; `info` is what `pass_info` returned for it."""

    def failed_pass(self, info: PassInfo) -> None:
        """Called when a backward failed half-way, so that some of its records are missing."""

    def proof_is_due(self) -> bool:
        """True if the row proof is to be repeated on this batch; called at most once per forward."""

    def proof_failed(self) -> None:
        """Called when a repeated row proof failed: rows were attributed to the wrong samples."""

    def proof_stays_open(self) -> None:
        """Called if all samples of a batch are equal, so that nothing was proven; raises if the listener requires a proof."""


@dataclass
class Pass:
    """One forward of the root module, and the per-sample gradients that its backward has computed so far."""

    number: int
    batch: int
    length: int | None
    """Size of the second axis of the root's first tensor (tokens per row); None if it has none."""
    first: bool
    """True if some parameter was not yet audited (its gradient compared with autograd's) when the pass began."""
    infos: list[tuple[Listener, PassInfo]]
    """Listeners when the pass began, each with its `PassInfo`: how it groups rows and scales gradients."""
    tokens: int = 0
    """Memory address of the root's first tensor, whose first axis is the batch; 0 in a compiled graph."""
    uses: dict[str, int] = field(default_factory=dict)
    """{parameter: number of uses in the forward}; its gradient is complete when `arrived` has as many entries, or at the end of
    the backward."""
    arrived: dict[str, list[tuple[str, PerSampleGradient]]] = field(default_factory=dict)
    """{parameter: (kind of layer, per-sample gradient) of each use that the backward has reached}."""
    delivered: set[str] = field(default_factory=set)
    closed: bool = False
    returned: bool = False
    """True once the root's forward is over; stays False for a compiled one."""
    compiled: bool = False
    """True if the root's forward is compiled. Layers in it that are not compiled themselves run between its graphs."""
    repeated: bool = False
    """True in the second of two backwards through this forward."""
    ordinals: dict[str, int] = field(default_factory=dict)
    """{layer: number of its last call in this forward, from 0}."""
    layouts: dict[str, tuple[CallLayouts, ...]] = field(default_factory=dict)
    """{layer: where the samples lie in each of its calls} of layers that have them elsewhere than on axis 0."""
    batch_free: dict[str, frozenset[int] | None] = field(default_factory=dict)
    """{layer: its calls without a batch axis (None: all)}."""
    leaves: list[tuple[str, Tensor]] = field(default_factory=list)
    """(parameter, the detached weight that its layer ran on) of layers without a gradient formula, if the rule withholds
    weight gradients; autograd's gradient of the weight is compared with `explained`."""
    explained: dict[str, "Explained"] = field(default_factory=dict)
    """{parameter: sum of its per-sample gradients over samples and uses}, of layers without a gradient formula."""


@dataclass(frozen=True)
class Explained:
    """Sum Σ_i g_i of a parameter's per-sample gradients, and an upper bound of its norm that rounding errors scale with."""

    total: Tensor
    magnitude: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, gradient: PerSampleGradient, before: "Explained | None") -> "Explained":
        """The sum of a parameter's gradients of one use, plus `before`, the sum of earlier uses (None: this is the first)."""
        own = cls(gradient.total(), gradient.magnitude(), gradient.dtype)
        if before is None:
            return own
        dtype = min(own.dtype, before.dtype, key=lambda dtype: dtype.itemsize)
        return cls(before.total + own.total, before.magnitude + own.magnitude, dtype)


class PassBook:
    """The open passes of one model: forwards whose backward has not finished."""

    def __init__(self, listeners: list[Listener], rule: Callable[[], GradientRule]) -> None:
        """Start with no pass. The model's list `listeners` is shared; `rule()` returns its present gradient rule."""
        self.current: Pass | None = None
        self.reached: Pass | None = None
        """The pass that the running backward reached last, to which a layer that a checkpoint runs again belongs; else None."""
        self._listeners, self._rule = listeners, rule
        self._passes: dict[int, Pass] = {}
        self._numbers = itertools.count(1)
        self.begun = 0
        """Number of passes opened so far."""
        self._task = -1
        self._touched: dict[int, Pass] = {}

    def clear(self) -> None:
        """Drop all open passes without reporting them."""
        self.current, self.reached, self._task = None, None, -1
        self._passes.clear()
        self._touched = {}

    def open(self, batch: int, length: int | None, first: bool, tokens: int = 0) -> int:
        """Open a pass, one forward of the root and its backward, and return its number.

        Args:
            batch: number of rows.
            length: size of the second axis of the root's first tensor; None if it has none.
            first: True if some parameter was not audited yet.
            tokens: memory address of the root's first tensor; 0 in a compiled graph.
        """
        if not in_backward():
            self.settle()
        for number in [number for number, pass_ in self._passes.items() if pass_.closed]:
            del self._passes[number]
        while len(self._passes) >= FORWARDS_WITHOUT_BACKWARD:
            del self._passes[next(iter(self._passes))]
        number = next(self._numbers)
        self.begun += 1
        infos = [(listener, listener.pass_info(number, batch)) for listener in self._listeners]
        self.current = self._passes[number] = Pass(number, batch, length, first, infos, tokens=tokens)
        return number

    def settle(self) -> None:
        """Call `failed_pass` of the listeners for backwards that began and did not finish; not called inside a backward."""
        touched, self._touched, self._task, self.reached = self._touched, {}, -1, None
        for pass_ in touched.values():
            for listener, info in self.audience(pass_):
                listener.failed_pass(info)

    def batch_of_second_run(self, layer: str) -> int:
        """Batch size of the forward that a checkpoint recomputes in the backward; `layer`, which it runs, is named in errors.

        Raises:
            GramianError: if forwards of different batches are open and the backward has reached none of them yet.
        """
        batches = {self.reached.batch} if self.reached else {p.batch for p in self._passes.values() if not p.closed}
        if len(batches) != 1:
            raise GramianError(
                f"{layer}: sees one row for all samples in a checkpoint, and forwards of different batches are open; "
                "expected each backward before the next forward"
            )
        return batches.pop()

    def second_run(self, layer: str) -> Pass | None:
        """A forward that assumes of layers what the one does that a checkpoint recomputes; errors name `layer`, which it runs.

        Raises:
            GramianError: if forwards with different ones are open and the backward has reached none of them yet.
        """
        found = [self.reached] if self.reached else [p for p in self._passes.values() if not p.closed]
        if any((p.layouts, p.batch_free) != (found[0].layouts, found[0].batch_free) for p in found):
            raise GramianError(
                f"{layer}: has its samples on another axis, or none, in some open forwards, and a checkpoint runs it again; "
                "expected each backward before the next forward"
            )
        return found[0] if found else None

    def get(self, number: int) -> Pass:
        """The open pass of this number.

        Raises:
            GramianError: if its backward has already run.
        """
        pass_ = self._passes.get(number)
        if pass_ is None or pass_.closed:
            raise GramianError(SECOND_BACKWARD)
        return pass_

    def audience(self, pass_: Pass) -> list[tuple[Listener, PassInfo]]:
        """(listener, its `PassInfo`) of the listeners that receive a pass: attached when it began, and still attached.

        In the second of two backwards through one forward: the gradient rule alone.
        """
        there = [(listener, info) for listener, info in pass_.infos if listener in self._listeners]
        rule: object = self._rule()
        return [pair for pair in there if pair[0] is rule] if pass_.repeated else there

    def begin(self, pass_: Pass, device: str) -> None:
        """Record that the backward reached a pass, and queue what is done at its end (`device`: type of device, "cuda").

        Raises:
            GramianError: if another backward is running (nested, or of a reentrant checkpoint).
        """
        task = torch._C._current_graph_task_id()
        if self._task not in (-1, task):
            raise GramianError(
                "backward: another backward started before this one was over; "
                "expected checkpoint(..., use_reentrant=False) and no nested backward inside a capture"
            )
        self._touched[pass_.number] = self.reached = pass_
        if self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_of_backward, device))

    def arrive(self, pass_: Pass, kind: str, gradients: dict[str, PerSampleGradient], borrowed: bool) -> None:
        """Collect {parameter: gradient} of one call of a layer of this kind, and deliver parameters whose uses are complete.

        With `borrowed`, tensors are valid during this call only, so gradients of a parameter with uses to come are copied.

        Raises:
            GramianError: if a parameter was delivered before, because a compiled forward used it more often than expected.
        """
        for name, gradient in gradients.items():
            if name in pass_.delivered:
                raise GramianError(
                    f"{name}: was used more often in a compiled forward than could be foreseen; "
                    "expected torch.compile on the whole model, not on a module that is called several times, or eager mode"
                )
            parts = pass_.arrived.pop(name, [])
            last = len(parts) + 1 == pass_.uses.get(name, 1)
            parts.append((kind, gradient.copy() if borrowed and not last else gradient))
            if last:
                self._deliver(pass_, name, parts, borrowed)
            else:
                pass_.arrived[name] = parts

    def _refuse_unexplained(self, pass_: Pass) -> None:
        """Compare the taps' gradients of layers without a gradient formula with autograd's for the same weights.

        Raises:
            GramianError: naming a parameter whose gradients differ: part of its gradient does not come through the layer's
                outputs, and would not be clipped.
        """
        arrived: dict[str, Tensor] = {}
        for name, leaf in pass_.leaves:
            if leaf.grad is not None:
                arrived[name] = arrived[name] + leaf.grad if name in arrived else leaf.grad
                leaf.grad = None
        explained, pass_.explained = pass_.explained, {}
        norms = torch.stack([wide(got).norm() for got in arrived.values()]) if arrived else torch.zeros(1)
        whole = norms.nan_to_num(0.0, posinf=0.0).norm()
        for name, got in arrived.items():
            own = explained.get(name, Explained(torch.zeros_like(wide(got)), wide(got).new_zeros(()), got.dtype))
            dtype = min(got.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
            eps = torch.finfo(dtype).eps
            allowed = AGREES[dtype] * wide(got).norm() + 8 * eps * own.magnitude + amplified(eps) * whole
            if bool(got.isfinite().all()) and not bool((wide(got) - own.total).norm() <= allowed):
                raise GramianError(
                    f"{name}: gets a gradient past what its layer returns (an auxiliary loss kept on the module, a list, a "
                    "custom object), which would not be clipped; expected tensors alone or in tuples, lists and dicts"
                )

    def _deliver(self, pass_: Pass, name: str, parts: list[tuple[str, PerSampleGradient]], borrowed: bool) -> None:
        """Join the per-sample gradients of all uses of a parameter, `parts`, and deliver the record to the listeners."""
        pass_.delivered.add(name)
        kinds = [kind for kind, _ in parts]
        kind = " + ".join(dict.fromkeys(kinds))
        calls = len(kinds) - max(kinds.count(INLINE) - 1, 0)  # products inside a layer are no calls of it
        gradient = join([part for _, part in parts])
        for listener, info in self.audience(pass_):
            mine = gradient
            if info.units is not None:
                try:
                    mine = join([regrouped(part, info.units) for _, part in parts])
                except GramianError as error:
                    raise GramianError(f"{name}: {error}") from None
            listener.parameter(ParameterRecord(name, kind, calls, mine, info, borrowed, INLINE in kinds))

    def _end_of_backward(self, device: str) -> None:
        """Deliver parameters some of whose uses got no gradient, and close the passes of the backward that ends.

        Raises:
            GramianError: if a parameter without a gradient formula has another gradient by autograd than by the taps.
        """
        touched, self._touched, self._task, self.reached = self._touched, {}, -1, None
        with exact_products(device):
            for pass_ in touched.values():
                for name in list(pass_.arrived):
                    self._deliver(pass_, name, pass_.arrived.pop(name), borrowed=False)  # incomplete uses were copied
                if self.current is pass_:
                    self.current = None
            again = self._rule().another_backward_follows
            try:
                for pass_ in touched.values():
                    self._refuse_unexplained(pass_)
            except GramianError:
                self._touched = touched
                self.settle()
                raise
            for pass_ in touched.values():
                pass_.closed = not again
                for listener, info in self.audience(pass_):
                    listener.end_of_pass(info)
                if again:
                    pass_.delivered.clear()
                    pass_.repeated = True


def accumulates(leaf: Any) -> bool:
    """True if the running backward adds to `.grad` of a leaf tensor; False if not, or if it is `torch.autograd.grad` of it.

    `leaf` is the node of `torch.autograd.graph.get_gradient_edge` of the tensor.
    """
    try:
        found: bool = torch._C._will_engine_execute_node(leaf)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False  # its gradient is what torch.autograd.grad was asked for
    return found


def in_backward() -> bool:
    """True while autograd runs a backward in this thread (as in the second run of a checkpointed forward)."""
    return torch._C._current_graph_task_id() != -1
