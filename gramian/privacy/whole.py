"""Batches of one sample: the ordinary gradient is that sample's, whatever the architecture; it is clipped as a whole."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError
from gramian.linalg.wide import wide_dtype
from gramian.privacy.clipping import SLACK, Clipped, Sink
from gramian.taps.blank import with_a_row, without_a_row
from gramian.taps.names import named_modules
from gramian.taps.passes import accumulates, in_backward
from gramian.taps.sites import site_for
from gramian.taps.sites.site import first_tensor


class RowCount:
    """A forward hook that tells a `WholeGradient` of every batch; what copies and pickles of a module carry does nothing."""

    def __init__(self, owner: "WholeGradient | None") -> None:
        """Remember whom to tell, weakly."""
        self._owner: Any = (lambda: None) if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Tell; a batch without rows gets one."""
        owner = self._owner()
        return None if owner is None else owner.count_rows(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A batch without rows has an output without rows."""
        owner = self._owner()
        return None if owner is None or not owner.blank(module) else without_a_row(output)

    def __deepcopy__(self, memo: Any) -> "RowCount":
        """One that does nothing."""
        return RowCount(None)

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return (RowCount, (None,))


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
        """Put hooks on the parameters; `remove` takes them off."""
        self._trained, self._sink, self._limit, self._loss_scale = dict(trained), sink, max_grad_norm, loss_scale
        self._factor = 1.0 if isinstance(loss_reduction, str) else 1.0 / loss_reduction
        self._root, self._entered = weakref.ref(root), False
        self._before: dict[str, Tensor | None] | None = None
        self._others_before: list[Tensor | None] = []
        self._batch = 1
        self.last: Clipped | None = None
        self.passes = 0
        self.paused = False
        self.on_begin: Callable[[int], None] = lambda rows: None
        """Called before anything is summed; may refuse."""
        self.on_done: Callable[[], None] = lambda: None
        hook = RowCount(self)
        self._handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(hook, with_kwargs=True),
            root.register_forward_hook(hook.after),
        ]
        self._layers = [
            (name, module, site) for name, module in named_modules(root) if (site := site_for(module)) is not None
        ]
        own = {id(p) for p in self._trained.values()}
        self._others = [p for p in root.parameters() if p.requires_grad and id(p) not in own]
        """What autograd gives a gradient to and the optimizer does not step: it must not outlive the backward."""
        for p in self._trained.values():
            leaf = torch.autograd.graph.get_gradient_edge(p).node
            self._handles.append(p.register_hook(partial(self._begin, leaf)))

    def recover(self) -> None:
        """After a backward that broke off: `p.grad` as it was before it."""
        if self._before is not None and not in_backward():
            for name, p in self._trained.items():
                p.grad = self._before[name]
            self._before = None
            self._give_back()

    def _give_back(self) -> None:
        """Parameters that the optimizer does not step have the gradient that they had."""
        for p, earlier in zip(self._others, self._others_before, strict=True):
            p.grad = earlier
        self._others_before = []

    def remove(self) -> None:
        """Take the hooks off."""
        self.recover()
        for handle in self._handles:
            handle.remove()

    def count_rows(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward begins: how many samples it is of. None has a row of zeros in its place, which does not count.

        Raises:
            GramianError: if it is of several, or a layer would carry something of one sample into the next forward.
        """
        if module is not self._root() or in_backward() or not torch.is_grad_enabled():
            return None
        self.recover()
        for name, layer, site in self._layers:
            reason = site.check_per_sample(layer) or (site.check(layer) if site.kind == "embedding" else None)
            if reason is not None:
                raise GramianError(f"{name or 'model'} ({type(layer).__name__}) {reason}")
        self._batch, self._entered = first_tensor(args, kwargs).shape[0], True
        if self._batch > 1:
            raise GramianError(
                f"batch: has {self._batch} samples, but max_physical_batch=1 clips whole gradients; expected one sample"
            )
        return None if self._batch else with_a_row((args, kwargs))

    def blank(self, module: nn.Module) -> bool:
        """True if the forward that just ran was of no sample."""
        return module is self._root() and not in_backward() and torch.is_grad_enabled() and not self._batch

    def _begin(self, leaf: Any, gradient: Tensor) -> None:
        """The backward reached a first parameter: put earlier sums aside, so that `p.grad` becomes this sample's own.

        Raises:
            GramianError: if nobody knows how many samples it is of.
        """
        if not accumulates(leaf):
            return  # torch.autograd.grad: `p.grad` gets nothing
        if self._before is None:
            if not self._entered:
                raise GramianError(
                    "backward: did not come from a forward of the model itself; expected a call of it, or a larger "
                    "max_physical_batch"
                )
            if not self.paused:
                self.on_begin(self._batch)
            self._before = {name: p.grad for name, p in self._trained.items()}
            self._others_before = [p.grad for p in self._others]
            for p in (*self._trained.values(), *self._others):
                p.grad = None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        before, self._before, self._entered = self._before, None, False
        assert before is not None
        self._give_back()
        own = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        gradients = [g for g in own.values() if g is not None]
        wide = wide_dtype(*gradients)
        parts = torch._foreach_norm(gradients, 2, dtype=wide)
        norm = torch.stack([part.to(parts[0].device) for part in parts]).square().sum().sqrt()
        norm = norm * self._factor / self._scale()
        slack = max(SLACK[g.dtype] for g in gradients)
        factor = (self._limit / (1 + slack) / norm).clamp(max=1.0)
        finite = bool(norm.isfinite())
        self.last = Clipped(
            norm.reshape(1)[: self._batch],
            (factor if finite else factor * 0).reshape(1)[: self._batch],
            int(not finite),
        )
        counts = finite and self._batch == 1 and not self.paused
        for name, p in self._trained.items():
            p.grad, gradient = before[name], own.get(name)
            if gradient is not None and counts:
                self._sink.receive(name, gradient.mul_((factor * self._factor).to(gradient.device)))
        self._sink.settle()
        self.passes += 1
        self.on_done()

    def _scale(self) -> Any:
        if not isinstance(self._loss_scale, torch.amp.GradScaler):
            return self._loss_scale
        scale = getattr(self._loss_scale, "_scale", None)
        return scale if scale is not None else self._loss_scale.get_scale()
