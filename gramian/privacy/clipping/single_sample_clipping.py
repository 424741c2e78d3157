"""Batches of one sample: the ordinary gradient is that sample's, whatever the architecture; it is clipped as a whole.

A backward is tied to its forward: behind every output of the root stands an identity, `Gate`, whose backward says which
forward was reached. Exactly one must be. What autograd adds to `p.grad` is taken away in the same moment, so that a gradient
that is not clipped outlives no backward, not even one that breaks off.
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

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide_dtype
from gramian.privacy.clipping.clipping_rule import SLACK, Clipped, Sink
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_mixing
from gramian.taps.model.empty_batches import with_a_row, without_a_row
from gramian.taps.passes import FORWARDS_WITHOUT_BACKWARD, SECOND_BACKWARD, accumulates, in_backward
from gramian.taps.sites.site import first_tensor

_keys = itertools.count()
_owners: "weakref.WeakValueDictionary[int, WholeGradient]" = weakref.WeakValueDictionary()
"""By the number that stands for each in a compiled graph."""


class RootHook:
    """Tells a `WholeGradient` of every forward of the root; what copies and pickles of a module carry does nothing."""

    def __init__(self, owner: "WholeGradient | None") -> None:
        """Remember whom to tell, weakly."""
        self._owner: Any = (lambda: None) if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before: a batch without rows gets one."""
        owner = self._owner()
        return None if owner is None else owner.enter_root(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After: a gate behind every output."""
        owner = self._owner()
        return None if owner is None else owner.leave_root(module, output)

    def __deepcopy__(self, memo: Any) -> "RootHook":
        """One that does nothing."""
        return RootHook(None)

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return (RootHook, (None,))


class Gate(torch.autograd.Function):
    """Identity on an output of the root; its backward says that this forward was reached."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, ticket: Tensor, key: Tensor, output: Tensor) -> Tensor:
        """`probe` gets a gradient in every `backward()`, and in none of `torch.autograd.grad`."""
        ctx.ticket, ctx.key = ticket, key  # not saved: a checkpoint around the root counts what is
        found: Tensor = torch.ops.aten._unsafe_view(output, output.shape)  # no view to autograd: may be written to
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Tell, and pass the gradient on as it is."""
        tell = torch.ops.gramian.reach if torch.compiler.is_compiling() else _tell
        return tell(ctx.ticket, ctx.key, *gradients), None, None, *gradients


def _tell(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    owner = _owners.get(int(key))
    if owner is not None:
        owner.reach(int(ticket))
    return torch.zeros(())


@torch.library.custom_op("gramian::reach", mutates_args=())
def _reach(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    """A compiled backward reached a forward; the gradient is there so that this is no part of the forward's graph."""
    return _tell(ticket, key, gradient)


@_reach.register_fake
def _(ticket: Tensor, key: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty(())


@torch.library.custom_op("gramian::enter", mutates_args=())
def _enter(key: Tensor, first: Tensor) -> Tensor:
    """A compiled root runs; the ticket names this forward in the backward."""
    return torch.tensor(_owners[int(key)].open(first.shape[0]))


@_enter.register_fake
def _(key: Tensor, first: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


class WholeGradient:
    """Clips what autograd forms for one sample: no tap, any layer, weights used anywhere."""

    def __init__(
        self,
        root: nn.Module,
        trained: Mapping[str, nn.Parameter],
        sink: Sink,
        *,
        max_grad_norm: float,
        loss_reduction: str | float = "mean",
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
    ) -> None:
        """Put hooks on the root and its parameters; `remove` takes them off."""
        self._trained, self._sink, self._limit, self._loss_scale = dict(trained), sink, max_grad_norm, loss_scale
        self._factor = 1.0 if isinstance(loss_reduction, str) else 1.0 / loss_reduction
        self._root = weakref.ref(root)
        number = next(_keys)
        self._key, self._ticket = torch.tensor(number), torch.tensor(0)
        _owners[number] = self
        self._probe = torch.zeros((), requires_grad=True)
        self._probe_leaf = torch.autograd.graph.get_gradient_edge(self._probe).node
        self._numbers = itertools.count(1)
        self._batch = 1
        self._open: dict[int, int] = {}
        """{number of a forward whose backward has not come: its samples}."""
        self._task = -1
        """Autograd's number of the backward under way; -1: none."""
        self._reached: int | None = None
        """The forward that it reached."""
        self._own: dict[str, Tensor] = {}
        """{parameter: what that backward has formed for it}."""
        self._aside: dict[nn.Parameter, Tensor | None] = {}
        """`p.grad` of earlier backwards, for the moment in which autograd adds to it."""
        self.last: Clipped | None = None
        self.passes = 0
        self.paused = False
        self.on_begin: Callable[[int], None] = lambda rows: None
        """Called before anything is summed; may refuse."""
        self.on_done: Callable[[], None] = lambda: None
        self.on_inputs: Callable[[Any], None] = lambda inputs: None
        """Shown the arguments of every forward of the root (eager mode)."""
        hook = RootHook(self)
        self._handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(hook, with_kwargs=True),
            root.register_forward_hook(hook.after),
        ]
        self._layers = layers_with_sites(root)
        names = {p: name for name, p in self._trained.items()}
        for p in root.parameters():
            if p.requires_grad:  # those that the optimizer does not step have no name, and nothing is kept of them
                leaf = torch.autograd.graph.get_gradient_edge(p).node
                self._handles.append(p.register_hook(partial(self._put_aside, p, names.get(p), leaf)))
                self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, names.get(p))))

    def recover(self) -> None:
        """After a backward that broke off: nothing of it is left."""
        if not in_backward():
            self._forget()

    def _forget(self) -> None:
        for p, earlier in self._aside.items():
            p.grad = earlier
        self._task, self._reached = -1, None
        self._aside.clear()
        self._own.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        self.recover()
        for handle in self._handles:
            handle.remove()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward begins: how many samples it is of. None has a row of zeros in its place, which does not count.

        Raises:
            GramianError: if it is of several, or a layer would carry something of one sample into the next forward.
        """
        if not self._listens(module):
            return None
        refuse_mixing(self._layers)
        first = first_tensor(args, kwargs)
        self._batch = first.shape[0]
        if self._batch > 1:
            raise GramianError(
                f"batch: has {self._batch} samples, but max_physical_batch=1 clips whole gradients; expected one sample"
            )
        if torch.compiler.is_compiling():
            self._ticket = torch.ops.gramian.enter(self._key, first)
        else:
            self.on_inputs((args, kwargs))
            self._ticket = torch.tensor(self.open(self._batch))
        return None if self._batch else with_a_row((args, kwargs))

    def open(self, batch: int) -> int:
        """Number a forward of so many samples."""
        self.recover()
        while len(self._open) >= FORWARDS_WITHOUT_BACKWARD:
            del self._open[next(iter(self._open))]
        number = next(self._numbers)
        self._open[number] = batch
        return number

    def leave_root(self, module: nn.Module, output: Any) -> Any:
        """A forward is over: its outputs with a gate behind each; of a batch without rows, without the row of zeros."""
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
        """The backward under way came to the outputs of a forward.

        Raises:
            GramianError: if it came to another one before, or if a backward came to this one.
        """
        if not accumulates(self._probe_leaf):
            return  # torch.autograd.grad: parameters get nothing
        task = torch._C._current_graph_task_id()
        if self._task not in (-1, task):
            self._forget()  # that one broke off
        if self._reached == number:
            return  # by another output
        if self._reached is not None:
            raise GramianError(
                "backward: goes through two forwards of the model, so several samples would be clipped as one; "
                "expected one forward for each backward"
            )
        if number not in self._open:
            raise GramianError(SECOND_BACKWARD)
        self._begin(task)
        if not self.paused:
            self.on_begin(self._open[number])
        self._reached = number

    def _begin(self, task: int) -> None:
        if self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))

    def _put_aside(self, p: nn.Parameter, name: str | None, leaf: Any, gradient: Tensor | None) -> None:
        """Autograd is about to add to `p.grad`: let it be this backward's own."""
        if gradient is None or not accumulates(leaf):
            return  # torch.autograd.grad: `p.grad` gets nothing
        self._begin(torch._C._current_graph_task_id())
        self._aside[p] = p.grad
        p.grad = None if name is None else self._own.get(name)  # of a reentrant checkpoint the parts add up

    def _take(self, name: str | None, p: nn.Parameter) -> None:
        """Autograd has added: take it away."""
        if name is not None and p.grad is not None:
            self._own[name] = p.grad
        p.grad = self._aside.pop(p)

    @torch.no_grad()
    def _end(self, task: int) -> None:
        """The backward is over.

        Raises:
            GramianError: if it came to no forward.
        """
        own, reached, now = dict(self._own), self._reached, self._task
        self._forget()
        if reached is None or now != task:
            raise GramianError(
                "backward: did not come from one forward of the model itself; expected a loss of what a call of it returned, "
                "without inputs= and not inside another backward, or a larger max_physical_batch"
            )
        batch = self._open.pop(reached)
        if not own:
            return  # as if it had not been: functional_call on other tensors
        norm = self._norm(list(own.values()))
        slack = max(SLACK[g.dtype] for g in own.values())
        factor = (self._limit / (1 + slack) / norm).clamp(max=1.0)
        finite = bool(norm.isfinite())
        self.last = Clipped(
            norm.reshape(1)[:batch], (factor if finite else factor * 0).reshape(1)[:batch], int(not finite)
        )
        if finite and batch == 1 and not self.paused:
            for name in self._trained:
                if name in own:
                    gradient = own.pop(name)
                    self._sink.receive(name, gradient.mul_((factor * self._factor).to(gradient.device)))
        self._sink.settle()
        self.passes += 1
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
