"""Clipping of batches of one sample: the ordinary gradient is that sample's, so it is clipped as it is.

`Clipping` needs a tap (hook) on every layer, and weights that are used through their own module alone. A batch of one sample
needs neither: autograd's own gradient is the sample's whatever the architecture, so `max_physical_batch=1` trains models that
taps refuse (weights used outside of their layer, layers without a per-sample formula). Hooks are on the root and on the
parameters alone. Both rules share the clip factor (`clip_factors`) and the receiver of the sums.

A backward must belong to exactly one forward: every output of the root passes through an identity, `Gate`, whose backward
reports which forward was reached. What autograd adds to `p.grad` is removed at once, so that a gradient that is not clipped
outlives no backward, not even one that breaks off.
"""

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.parallel.shared_refusals import SharedRefusals
from gramian.privacy.clipping.clip_factors import SLACK, ClipFunction, ClippedBatch
from gramian.privacy.clipping.clipping_plan import ClippingPlan
from gramian.privacy.clipping.clipping_work import SumReceiver
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_mixing
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.options import PrivacyOptions
from gramian.taps.model.empty_batches import with_a_row, without_a_row
from gramian.taps.passes import FORWARDS_WITHOUT_BACKWARD, SECOND_BACKWARD, accumulates, in_backward
from gramian.taps.sites.site import first_tensor

_keys = itertools.count()
_owners: "weakref.WeakValueDictionary[int, SingleSampleClipping]" = weakref.WeakValueDictionary()
"""{number of a `SingleSampleClipping`, by which compiled graphs refer to it: the object}."""


class RootHook:
    """Calls a `SingleSampleClipping` on every forward of the root; the hook of a copied or pickled module does nothing."""

    def __init__(self, owner: "SingleSampleClipping | None") -> None:
        """Store a weak reference to the `SingleSampleClipping` to call; None: the hook does nothing."""
        self._owner: Any = (lambda: None) if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: begin a forward; returns (args, kwargs) with a row of zeros for an empty batch, else None."""
        owner = self._owner()
        return None if owner is None else owner.enter_root(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: return the output with a `Gate` behind every tensor; None (unchanged) if there is nothing to call."""
        owner = self._owner()
        return None if owner is None else owner.leave_root(module, output)

    def __deepcopy__(self, memo: Any) -> "RootHook":
        """The hook of a copied module does nothing."""
        return RootHook(None)

    def __reduce__(self) -> Any:
        """Pickle as a hook that does nothing."""
        return (RootHook, (None,))


class Gate(torch.autograd.Function):
    """Identity on an output of the root; its backward reports to the `SingleSampleClipping` which forward was reached."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, ticket: Tensor, key: Tensor, output: Tensor) -> Tensor:
        """Return the output unchanged, with `probe`, a scalar leaf, as a second input.

        `backward()` accumulates into the probe and `torch.autograd.grad` does not, so that the two can be told apart. `ticket`
        is the number of the forward and `key` that of its `SingleSampleClipping`, both 0-dim.
        """
        ctx.ticket, ctx.key = ticket, key  # not saved: a checkpoint around the root counts what is
        found: Tensor = torch.ops.aten._unsafe_view(output, output.shape)  # no view to autograd: may be written to
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Report which forward the backward reached, and pass the gradient on unchanged."""
        report = torch.ops.gramian.reach if torch.compiler.is_compiling() else _report
        return report(ctx.ticket, ctx.key, *gradients), None, None, *gradients


def _report(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    owner = _owners.get(int(key))
    if owner is not None:
        with owner.refusals.told():
            owner.reach(int(ticket))
    return torch.zeros(())


@torch.library.custom_op("gramian::reach", mutates_args=())
def _reach(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    """Report that a compiled backward reached forward `ticket`; the argument `gradient` keeps this operator in the backward."""
    return _report(ticket, key, gradient)


@_reach.register_fake
def _(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty(())


@torch.library.custom_op("gramian::enter", mutates_args=())
def _enter(key: Tensor, first: Tensor) -> Tensor:
    """Begin a forward of a compiled root; returns its number, a 0-dim tensor, which identifies it in the backward."""
    return torch.tensor(_owners[int(key)].open(first.shape[0]))


@_enter.register_fake
def _(key: Tensor, first: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


class SingleSampleClipping:
    """Clips the gradient that autograd forms for one sample: no taps, any layer, weights used anywhere."""

    def __init__(
        self,
        root: nn.Module,
        trained: Mapping[str, nn.Parameter],
        receiver: SumReceiver,
        options: PrivacyOptions,
        clip: ClipFunction,
        metric: PublicMetric | None = None,
    ) -> None:
        """Put hooks on the root and its parameters; `receiver` gets the clipped gradients, which `clip` scales.

        `metric`: where norms are measured; None: as they are.
        """
        self._metric = metric
        self.refusals = SharedRefusals()
        """Tells the other processes of the model why a backward fails."""
        self._trained, self._receiver = dict(trained), receiver
        self._clip, self._loss_scale = clip, options.loss_scale
        self._factor = 1.0 if isinstance(options.loss_reduction, str) else 1.0 / options.loss_reduction
        self._root = weakref.ref(root)
        number = next(_keys)
        self._key, self._ticket = torch.tensor(number), torch.tensor(0)
        _owners[number] = self
        self._probe = torch.zeros((), requires_grad=True)
        self._probe_leaf = torch.autograd.graph.get_gradient_edge(self._probe).node
        self._numbers = itertools.count(1)
        self._batch = 1
        self._forwards: dict[int, int] = {}
        """{number of a forward whose backward has not run: its number of samples, 0 or 1}."""
        self._task = -1
        """Autograd's number of the running backward; -1: none runs."""
        self._reached: int | None = None
        """Number of the forward that the running backward reached; None: none yet."""
        self._gradients: dict[str, Tensor] = {}
        """{parameter: the gradient that this backward has formed so far}."""
        self._earlier: dict[nn.Parameter, Tensor | None] = {}
        """{parameter: its `p.grad` from earlier backwards}, set aside while autograd adds to `p.grad`."""
        self.last: ClippedBatch | None = None
        self.plan: ClippingPlan | None = None
        """Always None: a batch of one sample needs no clipping plan."""
        self.on_begin: Callable[[int, int | None], None] = lambda rows, units: None
        """Called with the number of rows of a backward, and None, before anything is summed; may raise."""
        self.on_done: Callable[[], None] = lambda: None
        self.on_inputs: Callable[[Any], None] = lambda inputs: None
        """Called with the arguments of every forward of the root (eager mode)."""
        hook = RootHook(self)
        self._handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(hook, with_kwargs=True),
            root.register_forward_hook(hook.after),
        ]
        self._layers = layers_with_sites(root)
        names = {p: name for name, p in self._trained.items()}
        for p in root.parameters():
            if p.requires_grad:  # those that the optimizer does not step have no name, and their gradients are dropped
                leaf = torch.autograd.graph.get_gradient_edge(p).node
                self._handles.append(p.register_hook(partial(self._set_aside, p, names.get(p), leaf)))
                self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, names.get(p))))

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`; a callback at its end clips the gradient."""
        loss.backward()

    def recover(self) -> None:
        """Drop the gradients of a backward that failed half-way, and put `p.grad` of earlier ones back."""
        if not in_backward():
            self._reset()

    def _reset(self) -> None:
        for p, earlier in self._earlier.items():
            p.grad = earlier
        self._task, self._reached = -1, None
        self._earlier.clear()
        self._gradients.clear()

    def remove(self) -> None:
        """Remove all hooks from the root and its parameters."""
        self.recover()
        for handle in self._handles:
            handle.remove()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a forward of the root and read its batch size.

        Returns:
            For an empty batch (args, kwargs) with a row of zeros, which does not count as a sample; otherwise None.

        Raises:
            GramianError: if there are several samples, or a layer would carry something of one into the next forward.
        """
        if not self._listens(module):
            return None
        refuse_mixing(self._layers)
        first = first_tensor(args, kwargs)
        self._batch = first.shape[0]
        if self._batch > 1:
            raise GramianError(
                f"batch: has {self._batch} samples, but max_physical_batch=1 clips one at a time; expected one sample"
            )
        if torch.compiler.is_compiling():
            self._ticket = torch.ops.gramian.enter(self._key, first)
        else:
            self.on_inputs((args, kwargs))
            self._ticket = torch.tensor(self.open(self._batch))
        return None if self._batch else with_a_row((args, kwargs))

    def open(self, batch: int) -> int:
        """Register a forward of `batch` samples (0 or 1) and return its number."""
        self.recover()
        while len(self._forwards) >= FORWARDS_WITHOUT_BACKWARD:
            del self._forwards[next(iter(self._forwards))]
        number = next(self._numbers)
        self._forwards[number] = batch
        return number

    def leave_root(self, module: nn.Module, output: Any) -> Any:
        """End a forward: return the output with a `Gate` behind each tensor, and without the row of zeros of an empty batch."""
        if not self._listens(module):
            return None
        return pytree.tree_map(self._gated, output if self._batch else without_a_row(output))

    def _gated(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.requires_grad:
                return value
            return Gate.apply(self._probe, self._ticket, self._key, value)  # type: ignore[no-untyped-call]
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        gated = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(gated, field.name, pytree.tree_map(self._gated, getattr(value, field.name)))
        return gated

    def _listens(self, module: nn.Module) -> bool:
        if module is not self._root() or not torch.is_grad_enabled():
            return False
        return torch.compiler.is_compiling() or not in_backward()  # else it is a checkpoint's second run

    # ---- backward --------------------------------------------------------------------------------------------------

    def reach(self, number: int) -> None:
        """Record that the running backward reached forward `number`; nothing is recorded for `torch.autograd.grad`.

        Raises:
            GramianError: if it reached another forward before, or this one had a backward already.
        """
        if not accumulates(self._probe_leaf):
            return  # torch.autograd.grad: parameters get nothing
        task = torch._C._current_graph_task_id()
        if self._task not in (-1, task):
            self._reset()  # that one broke off
        if self._reached == number:
            return  # by another output
        if self._reached is not None:
            raise GramianError(
                "backward: goes through two forwards of the model, so several samples would be clipped as one; "
                "expected one forward for each backward"
            )
        if number not in self._forwards:
            raise GramianError(SECOND_BACKWARD)
        self._begin(task)
        self.on_begin(self._forwards[number], None)
        self._reached = number

    def _begin(self, task: int) -> None:
        if self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.refusals.told()(self._end), task))

    def _set_aside(self, p: nn.Parameter, name: str | None, leaf: Any, gradient: Tensor | None) -> None:
        """Before autograd adds to `p.grad`: set earlier gradients aside, so that `p.grad` becomes this backward's alone."""
        if gradient is None or not accumulates(leaf):
            return  # torch.autograd.grad: `p.grad` gets nothing
        self._begin(torch._C._current_graph_task_id())
        self._earlier[p] = p.grad
        p.grad = None if name is None else self._gradients.get(name)  # of a reentrant checkpoint the parts add up

    def _take(self, name: str | None, p: nn.Parameter) -> None:
        """After autograd has added to `p.grad`: store this backward's gradient and put the earlier one back."""
        if name is not None and p.grad is not None:
            self._gradients[name] = p.grad
        p.grad = self._earlier.pop(p)

    @torch.no_grad()
    def _end(self, task: int) -> None:
        """Clip the gradient at the end of backward `task` (autograd's number) and pass it to the receiver.

        Raises:
            GramianError: if the backward did not come from exactly one forward of the root.
        """
        gradients, reached, now = dict(self._gradients), self._reached, self._task
        self._reset()
        if reached is None or now != task:
            raise GramianError(
                "backward: did not come from one forward of the model itself; expected a loss of what a call of it returned, "
                "without inputs= and not inside another backward, or a larger max_physical_batch"
            )
        batch = self._forwards.pop(reached)
        if not gradients:
            return  # functional_call on other tensors
        groups: dict[int, list[Tensor]] = {}
        measured = gradients if self._metric is None else self._metric.whitened(gradients)
        for name, gradient in measured.items():
            groups.setdefault(self._clip.groups[name], []).append(gradient)
        norms = {group: self._norm(parts) for group, parts in groups.items()}
        slack = max(SLACK[g.dtype] for g in gradients.values()) + (self._metric.rounding if self._metric else 0.0)
        factors = {group: self._clip.factors(norm, slack, group) for group, norm in norms.items()}
        norm = torch.stack([*norms.values()]).norm()
        finite = bool(norm.isfinite())
        shown = self._clip.columns({group: factor.reshape(1) for group, factor in factors.items()})
        self.last = ClippedBatch(norm.reshape(1)[:batch], shown[:batch] * finite, int(not finite))
        if finite and batch == 1:
            for name in self._trained:
                if name in gradients:
                    gradient = wide(gradients.pop(name))  # half precision would round off the metric's small directions
                    factor = factors[self._clip.groups[name]] * self._factor
                    self._receiver.receive(name, gradient.mul_(factor.to(gradient.device)))
        self._receiver.settle()
        self.on_done()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        parts = torch._foreach_norm(gradients, 2, dtype=wide_dtype(*gradients))
        carried = torch.stack([part.to(parts[0].device) for part in parts]).square().sum().sqrt()
        norm: Tensor = carried * self._factor / self._scale()
        return norm

    def _scale(self) -> Any:
        if not isinstance(self._loss_scale, torch.amp.GradScaler):
            return self._loss_scale
        scale = getattr(self._loss_scale, "_scale", None)
        return scale if scale is not None else self._loss_scale.get_scale()
